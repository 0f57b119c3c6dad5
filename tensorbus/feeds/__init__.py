"""Joins log and projections: position, lag, rebuild, and the voice of one author whose own fold decides."""

from tensorbus.feeds._author import Author
from tensorbus.feeds._base import base_for, newest_snapshot
from tensorbus.feeds._decode import decode_all, decode_one
from tensorbus.feeds._feed import DirectoryFeed
from tensorbus.feeds._history import History, archived_files
from tensorbus.feeds._leases import LeaseFeed, ShardGrant
from tensorbus.feeds._lookout import insist
from tensorbus.feeds._page_log import PageLog
from tensorbus.feeds._remember import Loss, LostPositionError, Remembered, check, newest_truncation, remember
from tensorbus.feeds._restore import newest_purge
from tensorbus.feeds._shard_replay import decode_pages, replay_shard, shard_snapshots

__all__ = [
    "Author",
    "DirectoryFeed",
    "History",
    "LeaseFeed",
    "Loss",
    "LostPositionError",
    "PageLog",
    "Remembered",
    "ShardGrant",
    "archived_files",
    "base_for",
    "check",
    "decode_all",
    "decode_one",
    "decode_pages",
    "insist",
    "newest_purge",
    "newest_snapshot",
    "newest_truncation",
    "remember",
    "replay_shard",
    "shard_snapshots",
]
