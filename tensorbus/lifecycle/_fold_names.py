"""How key and version facts change the Directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorbus.events import Event, KeyBound, KeyUnbound, Recorded, VersionPublished
from tensorbus.lifecycle._records import Key, Series, Touched, Verdict

if TYPE_CHECKING:
    from tensorbus.lifecycle._directory import Directory


def evolve(state: Directory, recorded: Recorded[Event]) -> Verdict:
    match recorded.event:
        case KeyBound() as fact:
            return _bound(state, recorded, fact)
        case KeyUnbound() as fact:
            return _unbound(state, recorded, fact)
        case VersionPublished() as fact:
            return _published(state, fact)
        case _:
            return Verdict(False, "unknown")


def _bound(state: Directory, recorded: Recorded[Event], fact: KeyBound) -> Verdict:
    target = state.artifacts.get((fact.tenant, fact.artifact))
    if target is None or not target.live:
        return Verdict(False, "destroyed")
    known = state.keys.get((fact.tenant, fact.key))
    touched = [Touched("key", fact.tenant, fact.key), Touched("artifact", fact.tenant, fact.artifact)]
    if known is not None and known.artifact is not None:
        if known.artifact == fact.artifact:
            return Verdict(False, "duplicate")
        if not fact.rebind:
            return Verdict(False, "conflict")
        state.artifacts[fact.tenant, known.artifact].keys.pop(fact.key, None)
        touched.append(Touched("artifact", fact.tenant, known.artifact))
    state.keys[fact.tenant, fact.key] = Key(fact.key, fact.artifact, recorded.seq)
    target.keys[fact.key] = None
    return Verdict(True, touched=tuple(touched))


def _unbound(state: Directory, recorded: Recorded[Event], fact: KeyUnbound) -> Verdict:
    known = state.keys.get((fact.tenant, fact.key))
    if known is None or known.artifact != fact.artifact:
        return Verdict(False, "missing")
    state.artifacts[fact.tenant, fact.artifact].keys.pop(fact.key, None)
    state.keys[fact.tenant, fact.key] = Key(fact.key, None, recorded.seq, gone="unbound")
    touched = (Touched("key", fact.tenant, fact.key), Touched("artifact", fact.tenant, fact.artifact))
    return Verdict(True, touched=touched)


def _published(state: Directory, fact: VersionPublished) -> Verdict:
    target = state.artifacts.get((fact.tenant, fact.artifact))
    if target is None or not target.live:
        return Verdict(False, "destroyed")
    series = state.series.get((fact.tenant, fact.name))
    if fact.version != (series.last if series else 0) + 1:
        return Verdict(False, "conflict")
    if series is None:
        series = state.series[fact.tenant, fact.name] = Series(fact.name, 0)
    series.last = fact.version
    series.versions[fact.version] = fact.artifact
    target.versions[fact.name, fact.version] = None
    touched = (Touched("series", fact.tenant, fact.name), Touched("artifact", fact.tenant, fact.artifact))
    return Verdict(True, touched=touched)
