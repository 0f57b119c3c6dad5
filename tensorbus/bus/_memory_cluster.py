"""The state that buses in memory share, and how a test makes it misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tensorbus.bus._beats import MARKER, MARKER_TTL_S, TTL
from tensorbus.bus._memory_ask import Switchboard
from tensorbus.bus._memory_stream import MemoryStream, Refused
from tensorbus.bus._port import Message, StreamLimits
from tensorbus.clock import Clock, LoopClock
from tensorbus.errors import UnavailableError
from tensorbus.events import Subjects

BACKLOG_MAX: Final = 1 << 20


class _Sleeper(Protocol):
    """A reading that waits for messages."""

    def wake(self) -> None: ...


class _Connected(Protocol):
    """A bus that hears of the server's end."""

    def disconnect(self) -> None: ...

    def reconnect(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one request on its way.

    Attributes:
        delay_s: Seconds until the server has it.
        lose_request: The server never has it.
        lose_reply: The server acts on it and nobody hears.
        repeat: The server has it twice.
        refuse: The server denies it.
    """

    delay_s: float = 0.0
    lose_request: bool = False
    lose_reply: bool = False
    repeat: bool = False
    refuse: bool = False


NO_FAULT: Final = Fault()


class MemoryCluster:
    """The state that buses share: a log, page facts, a live stream, and the switches of a test.

    Args:
        subjects: The subjects' prefix.
        clock: Gives stored messages their time.
        first_seq: The log's first sequence.
        replicated: Answer a repeated message id before comparing sequences, as three servers do; one compares first.
    """

    def __init__(
        self,
        subjects: Subjects | None = None,
        *,
        clock: Clock | None = None,
        first_seq: int = 1_700_000_000_000_000,
        replicated: bool = False,
    ) -> None:
        self.subjects = subjects or Subjects()
        self.replicated = replicated
        self.on_publish: Callable[[str, Mapping[str, str]], Fault] | None = None
        """Asked for every publish and heartbeat."""
        self.on_deliver: Callable[[Message], float] | None = None
        """Seconds by which a batch that begins with a message reaches a reader later."""
        self.readers: dict[_Sleeper, None] = {}
        self.connections: dict[_Connected, None] = {}
        self.lives = 1
        """Of the server: a request that was sent to an earlier one never arrives."""
        self.switchboard = Switchboard()
        self._clock = clock or LoopClock()
        self._limits = StreamLimits()
        self._paused = False
        self._backlog: list[Callable[[], None]] = []
        self._first_seq = first_seq
        self.log = self._stream(self.subjects.log_stream, first_seq)
        self.pages = self._stream(self.subjects.pages_stream, first_seq)
        self.live: MemoryStream | None = None

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self) -> None:
        """Stop the server as SIGSTOP does: requests wait in its sockets, and are acted on afterwards."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.submit(action)
        self.wake()

    def restart(self) -> None:
        """Lose what a single server keeps in memory only: the live stream."""
        if self.live is not None:
            self._first_seq = max(self._first_seq, self.live.last_seq + 1)
        self.live = None
        self.wake()

    def truncate(self, last_seq: int) -> None:
        """Die, and come back with an older copy of the log: what came after a sequence never was."""
        self._die()
        self.log.truncate(last_seq)
        self.restart()

    def lose(self, *, first_seq: int | None = None) -> None:
        """Die, and come back with streams that were made anew, above the old ones' sequences if none is given."""
        self._die()
        self.log = self._stream(self.subjects.log_stream, first_seq or self.log.last_seq + 1_000_000)
        self.pages = self._stream(self.subjects.pages_stream, first_seq or self.pages.last_seq + 1_000_000)
        self.restart()

    def _die(self) -> None:
        self.lives += 1
        self._backlog.clear()
        for bus in list(self.connections):
            bus.disconnect()
            bus.reconnect()

    def limit(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.log.limits = limits
        self.pages.limits = replace(limits, log_bytes_max=limits.pages_bytes_max)

    def submit(self, action: Callable[[], None]) -> None:
        """Let the server act, now or when it goes on."""
        if not self._paused:
            action()
        elif len(self._backlog) < BACKLOG_MAX:
            self._backlog.append(action)

    def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        """Act on a publish as the stream of its subject does."""
        stream = next((stream for stream in (self.log, self.pages) if stream.takes(subject)), None)
        if stream is not None:
            seq = stream.store(subject, data, headers)
        elif self.live is not None and self.live.takes(subject):
            seq = self.live.store(subject, data, headers)
            self._expire_later(self.live, subject, seq, float(headers[TTL].rstrip("s")))
        else:
            raise Refused(UnavailableError(f"there is no stream for {subject}"))
        self.wake()
        return seq

    def ensure_live(self) -> MemoryStream:
        if self.live is None:
            self.live = self._stream(self.subjects.live_stream, self._first_seq)
            self.live.keeps_last_only = True
        return self.live

    def wake(self) -> None:
        for reader in self.readers:
            reader.wake()

    def _stream(self, name: str, first_seq: int) -> MemoryStream:
        return MemoryStream(
            self.subjects.streams[name],
            first_seq=first_seq,
            wall_ns=self._clock.wall_ns,
            limits=self._limits,
            replicated=self.replicated,
        )

    def _expire_later(self, live: MemoryStream, subject: str, seq: int, ttl_s: float) -> None:
        loop = asyncio.get_running_loop()

        def expire() -> None:
            if self.live is live and live.remove(seq):
                marker = live.store(subject, b"", {MARKER: "MaxAge", TTL: f"{MARKER_TTL_S}s"})
                loop.call_later(MARKER_TTL_S, lambda: self.submit(lambda: _drop(live, marker)))
                self.wake()

        loop.call_later(ttl_s, lambda: self.submit(expire))


def _drop(live: MemoryStream, seq: int) -> None:
    live.remove(seq)
