"""Hashes of pages: where to look for one, and what a copy of one adds to the hash of a table."""

from __future__ import annotations

from typing import Final

import numpy as np

from tensorbus.lifecycle._page_rows import Seconds, Words

LANES: Final = 4
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = tuple(np.uint64(x) for x in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFTS: Final = tuple(np.uint64(x) for x in (30, 27, 31))
_LANES: Final = np.array(
    [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89], np.uint64
).reshape(LANES, 1)
_FRAGMENT_AND_FLAGS: Final = np.uint64(0xFF00_0000_FFFF_0000)
_NBYTES: Final = np.uint64(0xFFFF_FFFF)
_HALF: Final = np.uint64(32)


def hash_of(words: Words, keyspace: Words) -> Words:
    """The hash of a page: bytes 8 to 15 of the key, which are random, moved by keyspace and fragment.

    Args:
        words: uint64[n, 4 or more], beginning with the key.
        keyspace: uint64[n], the keyspace's number, and the fragment times 65,536.
    """
    hashes: Words = words[:, 1] ^ keyspace * _ODD
    return hashes


def terms(words: Words, keyspaces: Words, holders: Words, last_s: Seconds) -> Words:
    """uint64[4, n]: what copies add to the hash: four mixes (the finalizer of SplitMix64, Steele et al. 2014) of all
    that is known of each.

    Args:
        words: uint64[n, 8], the rows.
        keyspaces: uint64[n], the seeds of their names; likewise ``holders``.
    """
    acc = _mixed(words[:, 0] ^ keyspaces)
    for value in (
        words[:, 1],
        words[:, 2],
        words[:, 3],
        holders,
        words[:, 4] & _FRAGMENT_AND_FLAGS,
        words[:, 5],
        words[:, 6],
    ):
        acc ^= value
        _mixed(acc)
    acc ^= words[:, 7] & _NBYTES | last_s.astype(np.uint64) << _HALF
    return _mixed(_mixed(acc) ^ _LANES)


def _mixed(value: Words) -> Words:
    """In place."""
    value += _ODD
    value ^= value >> _SHIFTS[0]
    value *= _MIX[0]
    value ^= value >> _SHIFTS[1]
    value *= _MIX[1]
    value ^= value >> _SHIFTS[2]
    return value
