"""Processes that play a part in a benchmark: forked from a clean server that has everything imported already."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

READY_S = 60.0
END_S = 5.0

Part = Callable[..., None]
"""A module-level function ``part(cue, **arguments)``: says ``"ready"``, hears its cue, plays, says its result."""


class Player:
    """One process and the line to it."""

    def __init__(self, process: Any, line: Connection, name: str) -> None:
        self._process = process
        self._line = line
        self._name = name

    def tell(self, message: object) -> None:
        self._line.send(message)

    def hear(self, timeout_s: float) -> Any:
        """Its next message; a player that fell silent or ended ends the benchmark."""
        if self._line.poll(timeout_s):
            with contextlib.suppress(EOFError):
                return self._line.recv()
            raise SystemExit(f"{self._name} ended with {self._process.exitcode}")
        raise SystemExit(f"{self._name} said nothing for {timeout_s:g} s")

    def end(self) -> None:
        self._line.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Crew:
    """All players of a benchmark."""

    def __init__(self, preload: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])
        self._players: list[Player] = []

    def hire(self, part: Part, /, *, name: str, **arguments: Any) -> Player:
        """Start a process; it is not ready yet."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_play, args=(part, theirs, arguments), name=name, daemon=True)
        process.start()
        theirs.close()
        player = Player(process, ours, name)
        self._players.append(player)
        return player

    def pipe(self) -> tuple[Connection, Connection]:
        """Where the first to be given reads what the second writes."""
        reading, writing = self._context.Pipe(duplex=False)
        return reading, writing

    def end(self, player: Player) -> None:
        """End one player."""
        self._players.remove(player)
        player.end()

    def dismiss(self) -> None:
        """End every player."""
        for player in self._players:
            player.end()
        self._players.clear()


@contextlib.contextmanager
def crew(preload: str) -> Iterator[Crew]:
    """A crew whose processes are ended at the end, whatever happens."""
    gathered = Crew(preload)
    try:
        yield gathered
    finally:
        gathered.dismiss()


def perform(players: list[Player], *, seconds: float, lead_s: float = 0.5) -> list[Any]:
    """Wait until all are ready, have them play at the same moment, and give what each says at the end."""
    for player in players:
        player.hear(READY_S)
    start = time.perf_counter() + lead_s
    for player in players:
        player.tell((start, seconds))
    return [player.hear(seconds + READY_S) for player in players]


def _play(part: Part, cue: Connection, arguments: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends its players itself
    gc.freeze()  # else all collect what they inherited at the same moment, and copy its pages for it
    try:
        part(cue, **arguments)
        while True:  # others may still write to this process
            cue.recv()
    except EOFError:
        return  # sent home before the end
