"""The in-memory twin of a socket: two channels joined back to back, for a loop on virtual time."""

# ruff: noqa: SLF001 - the two ends of a pair are one unit
from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from tensorbus.errors import UnavailableError
from tensorbus.transport._channel import PeerInfo, owned
from tensorbus.transport._frames import BODY_BYTES_MAX, BytesLike, Decoder, Frame, encode

_FRAMES_MAX = 256


class MemoryChannel:
    """One end of :func:`memory_pair`. Frames pass through the codec, so both ends see what a socket would show."""

    def __init__(self, name: str, *, delay: Callable[[], float] | None) -> None:
        self._info = PeerInfo(address=f"memory:{name}")
        self._delay = delay
        self._peer: MemoryChannel | None = None
        self._decoder = Decoder(owned_fds=False)
        self._incoming: deque[Frame] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self._ended = False
        self._in_flight: deque[tuple[bytes, list[int]] | None] = deque()
        self._last_arrival = 0.0

    @property
    def info(self) -> PeerInfo:
        return self._info

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def passes_fds(self) -> bool:
        return True

    @property
    def owns_fds(self) -> bool:
        return False

    def buffered(self) -> int:
        return 0 if self._peer is None else len(self._peer._incoming)

    def post(self, header: Mapping[str, object], body: BytesLike = b"", fds: Iterable[int] = ()) -> None:
        frame = Frame(header=dict(header), body=bytes(body), fds=owned(fds, as_owner=False))
        pieces = encode(frame, body_bytes_max=BODY_BYTES_MAX)
        peer = self._peer
        if self._closed or peer is None or peer._closed:
            raise UnavailableError(f"the connection to {self._info.address} is closed")
        data = b"".join(bytes(piece) for piece in pieces)
        self._pass(peer, (data, frame.fds.take()))

    async def send(self, header: Mapping[str, object], body: BytesLike = b"", fds: Iterable[int] = ()) -> None:
        self.post(header, body, fds)
        peer = self._peer
        assert peer is not None
        while len(peer._incoming) > _FRAMES_MAX and not (self._closed or peer._closed):
            peer._room.clear()
            await peer._room.wait()

    async def recv(self) -> Frame | None:
        while not self._incoming:
            if self._closed or self._ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._incoming.popleft()
        self._room.set()
        return frame

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while (frame := await self.recv()) is not None:
            yield frame

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._incoming.clear()
        self._arrived.set()
        self._room.set()
        if self._peer is not None:
            self._peer._room.set()
            self._pass(self._peer, None)

    def _pass(self, peer: MemoryChannel, item: tuple[bytes, list[int]] | None) -> None:
        if self._delay is None:
            peer._receive(item)
            return
        loop = asyncio.get_running_loop()
        # The link is a stream: whatever their delays, what was sent first arrives first. Timers of the same instant
        # fire in any order, so each takes the oldest item.
        self._in_flight.append(item)
        self._last_arrival = max(self._last_arrival, loop.time() + self._delay())
        loop.call_at(self._last_arrival, lambda: peer._receive(self._in_flight.popleft()))

    def _receive(self, item: tuple[bytes, list[int]] | None) -> None:
        if self._closed:
            return
        if item is None:
            self._ended = True
            self._room.set()
        else:
            self._incoming.extend(self._decoder.feed(*item))
        self._arrived.set()


def memory_pair(
    *, names: tuple[str, str] = ("server", "client"), delay: Callable[[], float] | None = None
) -> tuple[MemoryChannel, MemoryChannel]:
    """Two joined channels, without sockets. Descriptors pass through as the plain numbers they are, and stay open.

    Args:
        names: What the first and the second end call their peer.
        delay: Seconds that the next frame takes, asked per frame; at once when ``None``.
    """
    first, second = MemoryChannel(names[0], delay=delay), MemoryChannel(names[1], delay=delay)
    first._peer, second._peer = second, first
    return first, second
