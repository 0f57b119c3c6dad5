"""The followed directory: what names were last known to be, kept up to date by the worker's pushes.

Only the bus's loop writes; any thread may look, without a lock: a look is one dict lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from tensorbus.model import ViewSpec
from tensorbus.sdk._records import ArtifactInfo

Name: TypeAlias = tuple[str, str]
"""How it was asked for (``any``, ``id`` or ``key``) and the text."""

REFS_MAX: Final = 100_000
_NAMED: Final = ("artifact", "key")


class Entry:
    """What a name is, known to hold at ``position``. Entries are replaced, never changed, but for ``used``.

    ``view`` is there when the name is a view's id; a definition never changes under its id.
    """

    __slots__ = ("info", "position", "used", "view")

    def __init__(self, info: ArtifactInfo, position: int, view: ViewSpec | None = None) -> None:
        self.info = info
        self.position = position
        self.view = view
        self.used = True


class _Asked:
    __slots__ = ("count", "pushes")

    def __init__(self) -> None:
        self.count = 0
        self.pushes: list[tuple[int, ArtifactInfo | None]] = []


class Followed:
    """The names that this process follows.

    Args:
        limit: How many are kept; those not looked at go first.
        on_dropped: Called with names that need not be followed any more.
    """

    def __init__(self, *, limit: int = REFS_MAX, on_dropped: Callable[[list[Name]], None] | None = None) -> None:
        self._limit = limit
        self._on_dropped = on_dropped
        self._entries: dict[Name, Entry] = {}
        self._by_artifact: dict[str, dict[Name, None]] = {}
        self._asked: dict[Name, _Asked] = {}
        self.look = self._entries.get

    def __len__(self) -> int:
        return len(self._entries)

    def ask(self, name: Name) -> None:
        """A question about the name is under way: pushes that overtake its answer count from now on."""
        self._asked.setdefault(name, _Asked()).count += 1

    def answered(
        self, name: Name, info: ArtifactInfo, position: int, view: ViewSpec | None = None
    ) -> tuple[ArtifactInfo | None, int]:
        """Take the answer in. Gives what is known now: a push may have overtaken the answer."""
        known: ArtifactInfo | None = info
        for pushed_at, pushed in self._asked[name].pushes:
            if pushed_at > position:
                known, position = pushed, pushed_at
        entry = self._entries.get(name)
        if entry is not None and entry.position > position:
            return entry.info, entry.position
        if known is not None:
            self._set(name, known, position, view)
        return known, position

    def asked(self, name: Name) -> None:
        """The question is over, answered or not."""
        asked = self._asked[name]
        asked.count -= 1
        if not asked.count:
            del self._asked[name]

    def pushed(self, name: Name, info: ArtifactInfo | None, position: int) -> None:
        """The worker says that the name changed; ``None`` if it is nothing any more, and not followed either."""
        if name in self._asked:
            self._asked[name].pushes.append((position, info))
        entry = self._entries.get(name)
        if entry is None or position <= entry.position:
            return
        if info is None:
            self._drop(name)
        else:
            self._set(name, info, position)

    def keep(self, name: Name, entry: Entry) -> None:
        """Take in what was looked up in this process: nothing can have overtaken it."""
        self._set(name, entry.info, entry.position, entry.view)

    def touched(self, kind: str, text: str) -> list[Name]:
        """The names that are kept here and hang on the artifact or key of that id or text."""
        names: list[Name] = [("any", text), (kind if kind == "key" else "id", text)] if kind in _NAMED else []
        names += self._by_artifact.get(text, ()) if kind == "artifact" else ()
        return [name for name in dict.fromkeys(names) if name in self._entries]

    def changed_here(self, info: ArtifactInfo, key: str | None, position: int) -> None:
        """A change of this process's own, known before the push: later looks must see it."""
        for name in (("any", key), ("key", key)) if key is not None else ():
            entry = self._entries.get(name)
            if entry is not None and entry.position < position:
                self._set(name, info, position)

    def ended_here(self, artifact: str | None, key: str | None, position: int) -> None:
        """An artifact or key was ended by this process: look again at whatever named it."""
        names = [("any", key), ("key", key)] if key is not None else []
        names += self._by_artifact.get(artifact, ()) if artifact is not None else ()
        for name in names:
            entry = self._entries.get(name)
            if entry is not None and entry.position < position:
                self._drop(name)

    def clear(self) -> None:
        """Nothing is known any more: the connection that kept it true is gone."""
        self._entries.clear()
        self._by_artifact.clear()
        for asked in self._asked.values():
            asked.pushes.clear()

    def _set(self, name: Name, info: ArtifactInfo, position: int, view: ViewSpec | None = None) -> None:
        old = self._entries.get(name)
        if old is not None and old.info.artifact != info.artifact:
            self._unlink(name, old)
        entry = Entry(info, position, view if old is None or view is not None else old.view)
        if old is not None:
            entry.used = old.used
        self._entries[name] = entry
        self._by_artifact.setdefault(info.artifact, {})[name] = None
        if len(self._entries) > self._limit:
            self._make_room()

    def _drop(self, name: Name) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._unlink(name, entry)

    def _unlink(self, name: Name, entry: Entry) -> None:
        names = self._by_artifact.get(entry.info.artifact)
        if names is not None:
            names.pop(name, None)
            if not names:
                del self._by_artifact[entry.info.artifact]

    def _make_room(self) -> None:
        dropped: list[Name] = []
        wanted = len(self._entries) - self._limit + self._limit // 100  # some at once, so that it is rarely done
        for name in list(self._entries):
            entry = self._entries[name]
            if entry.used and name not in self._asked:
                entry.used = False  # a second chance, at the end of the line
                self._entries[name] = self._entries.pop(name)
            else:
                self._drop(name)
                dropped.append(name)
            if len(dropped) >= wanted:
                break
        if dropped and self._on_dropped is not None:
            self._on_dropped(dropped)
