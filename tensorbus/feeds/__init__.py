"""Joins log and projections: position, lag, rebuild, and the voice of one author whose own fold decides."""

from tensorbus.feeds._author import Author
from tensorbus.feeds._base import base_for, newest_snapshot
from tensorbus.feeds._decode import decode_all, decode_one
from tensorbus.feeds._feed import DirectoryFeed
from tensorbus.feeds._history import History, archived_files

__all__ = [
    "Author",
    "DirectoryFeed",
    "History",
    "archived_files",
    "base_for",
    "decode_all",
    "decode_one",
    "newest_snapshot",
]
