"""A shard as bytes, and back: a line of JSON, then the copies of its pages as packed records.

See ``docs/spec/page-facts.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensorbus.errors import CorruptError, OutOfSpaceError, UnavailableError
from tensorbus.events import RECORD, RECORD_BYTES, Subjects
from tensorbus.lifecycle._fold_pages import PAGES_FOLD_VERSION, ShardLease, ShardSnapshot, ShardState
from tensorbus.lifecycle._page_rows import Numbered

SHARD_FORMAT: Final = 1
NAME: Final = "tensorbus shard"
HEAD_BYTES_MAX: Final = 16 << 20
ROWS_AT_ONCE: Final = 4096
"""A millisecond's work."""
_ROW_BYTES: Final = RECORD_BYTES + 4


def dump_shard(state: ShardState) -> Iterator[bytes]:
    """The state in pieces; the table is copied at the first one, so the state may go on meanwhile.

    Raises:
        UnavailableError: If the state is not the stream's: nothing may start from it.
    """
    if state.degraded:
        raise UnavailableError(
            f"shard {state.shard} lacks messages of its stream ({state.gaps} gaps, {state.unknown} unreadable), "
            "so it cannot be stored",
            shard=state.shard,
        )
    records, expires_s = state.pages.dump()
    keyspaces, holders = _tables(state.pages.keyspaces), _tables(state.pages.holders)
    head = {
        "name": NAME,
        "format": SHARD_FORMAT,
        "fold": PAGES_FOLD_VERSION,
        "shard": state.shard,
        "seq": state.seq,
        "hash": state.state_hash,
        "number": state.number,
        "lease": state.lease and astuple(state.lease),
        "snapshot": state.snapshot and astuple(state.snapshot),
        "dropped": state.dropped,
        "keyspaces": list(keyspaces.values()),
        "holders": list(holders.values()),
        "count": len(records),
    }
    for name, table in (("keyspace", keyspaces), ("holder", holders)):
        places = np.zeros(max(table, default=0) + 1, np.uint16)
        places[list(table)] = np.arange(len(table))
        records[name] = places[records[name]] if len(records) else records[name]
    return _pieces(json.dumps(head, separators=(",", ":")).encode() + b"\n", records, expires_s)


def load_shard(data: bytes, *, subjects: Subjects | None = None) -> Iterator[ShardState | None]:
    """The state that :func:`dump_shard` wrote, in steps of a millisecond: ``None`` until it is whole.

    Raises:
        CorruptError: While iterating, if the bytes are not those of a shard, or its hash is not the one they say.
        UnavailableError: If a newer program wrote them.
    """
    head, at = _head(data)
    state = _begun(head, subjects)
    keyspaces = _filled(state.pages.keyspaces, head["keyspaces"])
    holders = _filled(state.pages.holders, map(tuple, head["holders"]))
    for start in range(0, head["count"], ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, head["count"] - start)
        rows = at + start * _ROW_BYTES
        records = np.frombuffer(data, RECORD, count, rows).copy()
        expires_s = np.frombuffer(data, "<u4", count, rows + count * RECORD_BYTES).astype(np.uint32)
        try:
            records["keyspace"] = keyspaces[records["keyspace"]]
            records["holder"] = holders[records["holder"]]
            state.pages.add(records, expires_s)
        except (IndexError, OutOfSpaceError) as exc:
            raise CorruptError(f"the snapshot of shard {state.shard} cannot be read: {exc}") from exc
        yield None
    if state.state_hash != head["hash"]:
        raise CorruptError(f"the snapshot of shard {state.shard} at {state.seq} does not have the hash that it says")
    yield state


def _tables(known: Numbered) -> dict[int, Any]:
    """Name by number, of those that rows refer to."""
    return {number: name for name in known if (number := known.get(name)) is not None}


def _pieces(head: bytes, records: npt.NDArray[np.void], expires_s: npt.NDArray[np.uint32]) -> Iterator[bytes]:
    yield head
    for start in range(0, len(records), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        yield records[part].tobytes() + expires_s[part].astype("<u4").tobytes()


def _head(data: bytes) -> tuple[dict[str, Any], int]:
    """The line before the rows, and where these begin."""
    end = data.find(b"\n", 0, HEAD_BYTES_MAX)
    try:
        head = json.loads(data[: max(end, 0)])
        if head["name"] != NAME:
            raise ValueError(f"it is a {head['name']!r}")
        if head["format"] > SHARD_FORMAT or head["fold"] > PAGES_FOLD_VERSION:
            raise UnavailableError("a newer program wrote this snapshot of a shard; upgrade", format=head["format"])
        if missing := {"hash", "keyspaces", "holders"} - head.keys():
            raise ValueError(f"it lacks {sorted(missing)}")
        if len(data) != end + 1 + head["count"] * _ROW_BYTES:
            raise ValueError(f"{len(data)} bytes are not those of {head['count']} rows")
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise CorruptError(f"these bytes are no snapshot of a shard: {exc}") from exc
    return head, end + 1


def _begun(head: dict[str, Any], subjects: Subjects | None) -> ShardState:
    """The state without its pages."""
    try:
        state = ShardState(head["shard"], subjects)
        state.seq, state.number = head["seq"], head["number"]
        state.lease = ShardLease(*head["lease"]) if head["lease"] else None
        state.snapshot = ShardSnapshot(*head["snapshot"]) if head["snapshot"] else None
        state.dropped = dict(head["dropped"])
        return state
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise CorruptError(f"these bytes are no snapshot of a shard: {exc}") from exc


def _filled(known: Numbered, names: Iterable[Any]) -> npt.NDArray[np.uint16]:
    """The numbers that names get in a new table."""
    try:
        return np.array([known.number(name) for name in names], np.uint16)
    except (TypeError, OutOfSpaceError) as exc:
        raise CorruptError(f"the snapshot of a shard names what cannot be: {exc}") from exc
