"""What differs between two states, and the end of one: both in slices, for a process that serves meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tensorbus.lifecycle._directory import Directory
from tensorbus.lifecycle._records import Touched

_SETTLED_AT_ONCE = 64
_COMPARED_AT_ONCE = 1024
_DROPPED_AT_ONCE = 256


def differences(before: Directory, after: Directory) -> Iterator[tuple[Touched, ...]]:
    """What followers of ``before`` must look at if it becomes ``after``, slice by slice, some of them empty.

    Neither state may change meanwhile.
    """
    for state in (before, after):
        while not state.settled(_SETTLED_AT_ONCE):
            yield ()
    yield from _changed(before.terms, after.terms)
    gone = _changed(after.terms, before.terms)
    for slice_ in gone:
        yield tuple(touched for touched in slice_ if touched not in before.terms)


def _changed(here: Mapping[Any, int], there: Mapping[Any, int]) -> Iterator[tuple[Touched, ...]]:
    """The things of ``here`` that are not the same ``there``."""
    terms = iter(here.items())
    while slice_ := list(islice(terms, _COMPARED_AT_ONCE)):
        yield tuple(key for key, term in slice_ if type(key) is Touched and there.get(key) != term)


def dissolve(state: Directory) -> Iterator[None]:
    """Empty a state that nobody needs any more, in slices: freeing a million records at once holds the interpreter.

    Nothing may use the state from the first slice on.
    """
    terms = state.terms
    assert isinstance(terms, dict)
    state.restored(state.seq, {}, 0)
    indexes: list[dict[Any, Any]] = [*state.by_worker.values(), *state.by_lessor.values(), *state.quarantined.values()]
    indexes += [*state.running.values(), *state.finished.values()]
    tables: list[dict[Any, Any]] = [state.artifacts, terms, state.keys, state.series, state.heads, *indexes]
    tables.append(state.operations)
    for table in (*tables, state.by_digest, state.by_view, state.orphans):
        while table:
            for _ in range(min(_DROPPED_AT_ONCE, len(table))):
                table.popitem()
            yield
