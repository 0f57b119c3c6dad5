"""Joins log and projections: position, lag, and the voice of one author whose own fold decides."""

from tensorbus.feeds._author import Author
from tensorbus.feeds._feed import DirectoryFeed, decode_all, decode_one

__all__ = ["Author", "DirectoryFeed", "decode_all", "decode_one"]
