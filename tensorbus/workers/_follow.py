"""Tells callers of changes to the names and series that they follow, each with the position it holds at."""

from __future__ import annotations

from collections.abc import Iterable

from tensorbus.errors import TensorbusError, to_wire
from tensorbus.lifecycle import Artifact, Directory, Touched, rules
from tensorbus.projections import Json, LiveDirectory, artifact_info, series_news
from tensorbus.workers._callers import FOLLOWED_MAX, Caller

Followed = tuple[Caller, str, str]


class Follows:
    """Who follows what. Lives on the worker's loop, as a follower of its Directory."""

    def __init__(self, live: LiveDirectory) -> None:
        self._live = live
        self._by_touched: dict[Touched, dict[Followed, None]] = {}
        self._depends: dict[Followed, tuple[Touched, ...]] = {}
        self._series: dict[Touched, dict[Caller, None]] = {}

    def follow(self, caller: Caller, by: str, ref: str, record: Artifact) -> None:
        """Tell the caller whenever what ``ref`` resolves to changes."""
        if len(caller.follows) >= FOLLOWED_MAX:
            return  # it asks again each time, which is right, only slower
        caller.follows[by, ref] = None
        self._depend((caller, by, ref), record)

    def unfollow(self, caller: Caller, refs: Iterable[tuple[str, str]]) -> None:
        for by, ref in refs:
            caller.follows.pop((by, ref), None)
            self._forget((caller, by, ref))

    def follow_series(self, caller: Caller, name: str, told: int) -> None:
        """Tell the caller of every version of a series above ``told``."""
        caller.series[name] = told
        self._series.setdefault(Touched("series", caller.tenant, name), {})[caller] = None

    def gone(self, caller: Caller) -> None:
        self.unfollow(caller, list(caller.follows))
        for name in caller.series:
            key = Touched("series", caller.tenant, name)
            followers = self._series.get(key, {})
            followers.pop(caller, None)
            if not followers:
                self._series.pop(key, None)
        caller.series.clear()

    def on_change(self, position: int, touched: tuple[Touched, ...]) -> None:
        """Follower of the Directory."""
        affected: dict[Caller, dict[tuple[str, str], None]] = {}
        for thing in touched:
            for caller, by, ref in self._by_touched.get(thing, ()):
                affected.setdefault(caller, {})[by, ref] = None
            if thing.kind == "series":
                for caller in list(self._series.get(thing, ())):
                    self._tell_series(caller, thing.name, position)
        for caller, refs in affected.items():
            items = [self._look_again(caller, by, ref) for by, ref in refs]
            caller.push("changed", {"position": position, "items": items})

    def _look_again(self, caller: Caller, by: str, ref: str) -> Json:
        state = self._live.state
        try:
            record = rules.resolve(state, tenant=caller.tenant, ref=ref, by=by)
        except TensorbusError as error:
            self.unfollow(caller, [(by, ref)])
            return {"by": by, "ref": ref, "artifact": None, "error": to_wire(error)}
        self._depend((caller, by, ref), record)
        return {"by": by, "ref": ref, "artifact": artifact_info(state, record), "error": None}

    def _tell_series(self, caller: Caller, name: str, position: int) -> None:
        series = self._live.state.one_series(caller.tenant, name)
        if series is None:
            return
        told = min(caller.series[name], series.last)  # lower only after a loss of the log's tail
        news = series_news(self._live.state, caller.tenant, series, told)
        caller.series[name] = series.last
        caller.push("series", {"position": position, **news})

    def _depend(self, followed: Followed, record: Artifact) -> None:
        caller, by, ref = followed
        depends = depends_on(self._live.state, caller.tenant, by, ref, record)
        if self._depends.get(followed) == depends:
            return
        self._forget(followed)
        self._depends[followed] = depends
        for thing in depends:
            self._by_touched.setdefault(thing, {})[followed] = None

    def _forget(self, followed: Followed) -> None:
        for thing in self._depends.pop(followed, ()):
            followers = self._by_touched.get(thing, {})
            followers.pop(followed, None)
            if not followers:
                self._by_touched.pop(thing, None)


def depends_on(state: Directory, tenant: str, by: str, ref: str, record: Artifact) -> tuple[Touched, ...]:
    """What a resolved name's answer hangs on: the artifact, and the key unless it was asked for by id."""
    things = [Touched("artifact", tenant, record.artifact)]
    if by != "id":
        things.append(Touched("key", tenant, ref))
    return tuple(things)
