"""Decisions over what was observed, as plain objects that do no I/O."""

from tensorbus.policies._eviction import EVICTIONS, Eviction, eviction
from tensorbus.policies._eviction_lfu import Lfu
from tensorbus.policies._eviction_lru import Lru
from tensorbus.policies._eviction_s3fifo import S3Fifo

__all__ = ["EVICTIONS", "Eviction", "Lfu", "Lru", "S3Fifo", "eviction"]
