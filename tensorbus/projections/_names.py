"""The names of a tenant in order, kept up with the Directory, so that a page of a listing costs a page."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from tensorbus.lifecycle import Directory, Touched


class Names:
    """Bound keys and series by tenant, each sorted by code point, which is the order of the UTF-8 bytes."""

    def __init__(self, state: Directory) -> None:
        self._state = state
        self._sorted: dict[tuple[str, str], list[str]] = {}
        for tenant, key in state.keys:
            self._look("key", tenant, key)
        for tenant, name in state.series:
            self._look("series", tenant, name)

    def on_change(self, _position: int, touched: tuple[Touched, ...]) -> None:
        """Follower of the Directory."""
        for thing in touched:
            if thing.kind in ("key", "series"):
                self._look(thing.kind, thing.tenant, thing.name)

    def page(
        self, kind: str, tenant: str, *, prefix: str, after: str | None, limit: int
    ) -> tuple[list[str], str | None]:
        """One page of the names with a prefix, and the name that the next one starts after.

        A name that went a moment ago, and whose going was not told yet, is left out.
        """
        names = self._sorted.get((kind, tenant), [])
        start = bisect_left(names, prefix)
        if after is not None:
            start = max(start, bisect_right(names, after))
        page = [name for name in names[start : start + limit + 1] if name.startswith(prefix)]
        more = len(page) > limit
        present = [name for name in page[:limit] if self._is_there(kind, tenant, name)]
        return present, page[limit - 1] if more else None

    def _look(self, kind: str, tenant: str, name: str) -> None:
        names = self._sorted.setdefault((kind, tenant), [])
        place = bisect_left(names, name)
        there = place < len(names) and names[place] == name
        wanted = self._is_there(kind, tenant, name)
        if wanted and not there:
            insort(names, name)
        elif there and not wanted:
            del names[place]

    def _is_there(self, kind: str, tenant: str, name: str) -> bool:
        if kind == "series":
            return self._state.one_series(tenant, name) is not None
        known = self._state.key(tenant, name)
        return known is not None and known.artifact is not None
