"""Joins log and projections: position, lag, rebuild, and the voice of one author whose own fold decides."""

from tensorbus.feeds._author import Author
from tensorbus.feeds._decode import decode_all, decode_one
from tensorbus.feeds._feed import DirectoryFeed

__all__ = ["Author", "DirectoryFeed", "decode_all", "decode_one"]
