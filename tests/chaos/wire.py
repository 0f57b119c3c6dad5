"""A way to a NATS server on which deliveries get lost, come twice or change places, and which breaks now and then."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

DELIVERY = b" $JS.ACK."
"""In the line of a message that a consumer delivers, and in no other's."""


@dataclass(kw_only=True)
class Faults:
    """Shares of the deliveries that are hurt, and how long a connection lives.

    Attributes:
        connection_s: Mean time after which a connection is cut; ``None`` for ever.
    """

    drop: float = 0.0
    repeat: float = 0.0
    swap: float = 0.0
    connection_s: float | None = None


class Frames:
    """Cuts what a server sends into protocol messages, whole ones."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._data += data
        while (end := self._data.find(b"\r\n")) >= 0:
            line = bytes(self._data[: end + 2])
            size = len(line)
            if line.startswith((b"MSG ", b"HMSG ")):
                size += int(line.split()[-1]) + 2
            if len(self._data) < size:
                return
            frame = bytes(self._data[:size])
            del self._data[:size]
            yield frame


class Spoiler:
    """Decides what arrives of one connection's messages, and in which order."""

    def __init__(self, faults: Faults, rng: random.Random, counts: Counter[str]) -> None:
        self._faults, self._rng, self._counts = faults, rng, counts
        self._held: bytes | None = None

    def pass_on(self, frame: bytes) -> Iterator[bytes]:
        held, self._held = self._held, None
        if DELIVERY not in frame.partition(b"\r\n")[0]:
            yield from (() if held is None else (held,))
            yield frame
            return
        if held is not None:
            yield from (frame, held)
            return
        drawn = self._rng.random()
        for name, share in (("drop", self._faults.drop), ("repeat", self._faults.repeat), ("swap", self._faults.swap)):
            if drawn < share:
                self._counts[name] += 1
                if name == "swap":
                    self._held = frame
                elif name == "repeat":
                    yield from (frame, frame)
                return
            drawn -= share
        yield frame


@dataclass
class Wire:
    """Listens on a port of its own and carries to a server. Use it as an async context manager.

    Attributes:
        faults: May be changed at any time; the default is a good wire.
        counts: What was done: ``drop``, ``repeat``, ``swap``, ``cut``.
    """

    url: str
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    counts: Counter[str] = field(default_factory=Counter)

    async def __aenter__(self) -> Wire:
        parts = urlsplit(self.url)
        self._to = (parts.hostname, parts.port)
        self._rng = random.Random(self.seed)
        self._open = True
        self._writers: dict[asyncio.StreamWriter, None] = {}
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection there is."""
        for writer in list(self._writers):
            writer.transport.abort()

    @contextlib.contextmanager
    def pulled(self) -> Iterator[None]:
        """Nothing gets through while the context is open."""
        self._open = False
        self.cut()
        try:
            yield
        finally:
            self._open = True

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._to)
        self._writers.update({writer: None, back: None})
        spoiler = Spoiler(self.faults, self._rng, self.counts)
        life_s = None if self.faults.connection_s is None else self._rng.expovariate(1 / self.faults.connection_s)
        try:
            async with asyncio.timeout(life_s):
                await asyncio.gather(self._out(reader, back), self._in(there, writer, spoiler))
        except TimeoutError:
            self.counts["cut"] += 1
        except OSError:
            pass
        finally:
            for end in (writer, back):
                self._writers.pop(end, None)
                end.transport.abort()

    async def _out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spoiler: Spoiler) -> None:
        frames = Frames()
        while data := await reader.read(1 << 16):
            for frame in frames.feed(data):
                for piece in spoiler.pass_on(frame):
                    writer.write(piece)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.transport.abort()
