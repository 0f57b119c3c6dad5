"""Bringing blocks here over several connections, from one source or several, into memory of ours.

A thread per connection takes blocks as :class:`Shares` gives them out. What is lost with a connection is asked for
again, there or elsewhere; what came with other bytes than its source sent is asked for again and never counts.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from tensorbus.clock import NS_PER_S, Clock, Deadline, SystemClock
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    NotFoundError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.transport._blocks import Block, block_bytes
from tensorbus.transport._bulk import LostError
from tensorbus.transport._bulk_client import BulkClient, Came, OpenedSource, Wanted
from tensorbus.transport._frames import RemoteProtocolError
from tensorbus.transport._lines import Line, Lines
from tensorbus.transport._shares import Path, Run, Shares

log = logging.getLogger("tensorbus.transport")

CONNECT_S: Final = 5.0
TRIES_MAX: Final = 4
"""So often in a row may a connection fail without bringing a block."""
BLOCKS_PER_CONNECTION: Final = 4
_RETRY_S: Final = 0.05
_LOOK_S: Final = 0.02

Address = tuple[str, int]


def parse_addresses(text: str) -> tuple[Address, ...]:
    """``host:port``, several with commas, as a worker says where it serves its bytes.

    Raises:
        CorruptError: If it is written otherwise.
    """
    found: list[Address] = []
    for one in text.split(","):
        host, _, port = one.strip().rpartition(":")
        if not host or not port.isdecimal():
            raise CorruptError(f"{text!r:.200} is not an address for bytes, host:port")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Somebody who has the bytes.

    Attributes:
        name: For people, and to :meth:`Transfer.drop` it.
        addresses: Where to connect; connections are spread over them.
        request: What to ask its owner for.
    """

    name: str
    addresses: tuple[Address, ...]
    request: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How this process connects to those who have bytes.

    Attributes:
        connections: The most for one transfer.
        locals: Addresses of this machine to connect from, one connection after the other; any when empty.
        tls: With what to speak TLS; plain when ``None``.
        sums: Whether every block is checked against its checksum.
        lines: Where connections rest between transfers; ``None`` closes them.
    """

    connections: int = 4
    locals: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None
    sums: bool = True
    lines: Lines | None = None

    def connect(self, address: Address, number: int, *, deadline: Deadline) -> BulkClient:
        """Connect to an address, from the local one that has its turn."""
        return BulkClient.connect(*address, deadline=deadline, local=self._local(number), tls=self.tls)

    def open(
        self, origin: Origin, number: int, *, tables: bool, first: bool = False, deadline: Deadline
    ) -> tuple[BulkClient, OpenedSource]:
        """Open what an origin lends, over a connection that rests or a new one.

        Args:
            number: Of the connection: each has its turn of the addresses on both sides.
            tables: Whether manifest and layout should come.
            first: Whether the first block should come along.

        Raises:
            UnavailableError: If nobody answers; TensorbusError: What the owner raised.
        """
        line, sums = self._line(origin, number), self.sums if first else None
        rested = None if self.lines is None else self.lines.take(line)
        if rested is not None:
            try:
                return rested, rested.open(origin.request, tables=tables, first=sums, deadline=deadline)
            except LostError:  # it was cut while it rested
                rested.close()
            except BaseException:
                rested.close()
                raise
        client = self.connect(line[0], number, deadline=deadline)
        try:
            return client, client.open(origin.request, tables=tables, first=sums, deadline=deadline)
        except BaseException:
            client.close()
            raise

    def rest(self, origin: Origin, number: int, client: BulkClient, source: OpenedSource) -> None:
        """Take a connection back on which all that was asked for has come."""
        if self.lines is not None and client.rest(source.source):
            self.lines.keep(self._line(origin, number), client)
        else:
            client.close()

    @contextmanager
    def borrow(self, origin: Origin, number: int, *, fresh: bool, deadline: Deadline) -> Iterator[BulkClient]:
        """A connection to an origin for requests that need nothing opened; it rests afterwards if all was answered.

        Args:
            fresh: Whether it must not be one that rested, and may have been cut meanwhile.

        Raises:
            UnavailableError: If nobody answers.
        """
        line = self._line(origin, number)
        client = None if self.lines is None or fresh else self.lines.take(line)
        client = client or self.connect(line[0], number, deadline=deadline)
        try:
            yield client
        except BaseException:
            client.close()
            raise
        if self.lines is None:
            client.close()
        else:
            self.lines.keep(line, client)

    def _line(self, origin: Origin, number: int) -> Line:
        return origin.addresses[number % len(origin.addresses)], self._local(number)

    def _local(self, number: int) -> str | None:
        return self.locals[number % len(self.locals)] if self.locals else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """How bytes came here.

    Attributes:
        path: ``shm`` where they were on this host already, ``tcp``, or ``disk``.
        why: Why that way.
        sources: Bytes brought by each worker, by its id.
        nbytes: All of them.
        seconds: From the first request to the last byte.
        retries: Connections and blocks that had to be tried again.
    """

    path: str
    why: str
    sources: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    retries: int = 0


class Transfer:
    """One artifact's blocks on their way into one memory. :meth:`run` once; the other methods may come from any thread.

    Args:
        blocks: What is to come.
        room: Where it goes: each span to the same offset here.
        tables: Names manifest and layout (see :class:`OpenedSource`); an origin with others is not used.
        by_index: Whether the blocks are the source's own, else they are asked for by their spans.
        learn: Told the checksum of each block that came right.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        room: memoryview,
        *,
        tables: str,
        ways: Ways,
        by_index: bool = True,
        learn: Callable[[int, int], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._blocks = blocks
        self._sizes = [block_bytes(block) for block in blocks]
        self._room = room
        self._tables = tables
        self._ways = ways
        self._by_index = by_index
        self._learn = learn
        self._clock = clock or SystemClock()
        self._shares = Shares(self._sizes)
        self._changed = threading.Condition()
        self._clients: dict[Path, BulkClient] = {}
        self._threads: dict[Path, threading.Thread] = {}
        self._spare: deque[Origin] = deque()
        self._retries = 0
        self._over = False
        self._deadline = Deadline(None)
        self.failures: dict[str, TensorbusError] = {}
        """Why an origin was given up, by its name."""

    def run(
        self,
        origins: Sequence[Origin],
        *,
        reserve: Sequence[Origin] = (),
        opened: tuple[BulkClient, OpenedSource] | None = None,
        deadline: Deadline,
    ) -> TransferReport:
        """Bring everything. Blocks; no thread touches the memory any more when it returns or raises.

        Args:
            origins: In the order in which they are tried, if one would do.
            reserve: Who is turned to, one after the other, when those fail.
            opened: A connection to the first of them, with its source; the transfer closes it.
            deadline: For the whole transfer.

        Raises:
            UnavailableError: If no origin could be reached to the end, or it was cancelled; DeadlineExceededError.
            CorruptError: If all that came were other bytes than the sources sent.
            TensorbusError: What all origins answered, if it was the same.
        """
        began_ns = self._clock.now_ns()
        self._deadline = deadline
        self._spare.extend(origins)
        try:
            with self._changed:
                alone = self._begin(len(origins), opened)
                self._spare.extend(reserve)
            if alone is not None:
                alone()
            with self._changed:
                while not (self._over or self._shares.finished):
                    if not self._shares.paths and not self._reserve():
                        break
                    if deadline.left() == 0:
                        raise deadline.error()
                    self._changed.wait(_LOOK_S if deadline.left() is None else min(_LOOK_S, deadline.left() or 0))
        finally:
            self._stop()
        if not self._shares.finished:
            raise self._failure()
        return TransferReport(
            path="tcp",
            why="",
            sources=dict(self._shares.done_bytes),
            nbytes=sum(self._sizes),
            seconds=(self._clock.now_ns() - began_ns) / NS_PER_S,
            retries=self._retries + self._shares.repeated,
        )

    @property
    def nbytes_done(self) -> int:
        """How many bytes have come and were right."""
        with self._changed:
            return sum(self._shares.done_bytes.values())

    def until_came(self, count: int) -> int:
        """Wait until the first ``count`` blocks have come and were right, or the transfer is over.

        Returns:
            How many of the first blocks have come.
        """
        with self._changed:
            while self._shares.leading < count and not self._over:
                self._changed.wait(_LOOK_S)
            return self._shares.leading

    def await_block(self, index: int) -> None:
        """Wait until a block has come and was right.

        Raises:
            NotFoundError: If the transfer ended without it.
        """
        with self._changed:
            while not self._shares.has(index):
                if self._over:
                    raise NotFoundError("what was to be handed on never came here")
                self._changed.wait(_LOOK_S)

    def cancel(self) -> None:
        """End it; :meth:`run` raises."""
        with self._changed:
            self._over = True
            for client in self._clients.values():
                client.interrupt()
            self._changed.notify_all()

    def drop(self, name: str, error: TensorbusError) -> None:
        """Ask no more of an origin, for the reason given."""
        with self._changed:
            self.failures.setdefault(name, error)
            self._spare = deque(origin for origin in self._spare if origin.name != name)
            for path, client in self._clients.items():
                if path.source == name:
                    client.interrupt()
            self._changed.notify_all()

    # -- paths --------------------------------------------------------------------------------------------------------

    def _begin(self, origins: int, opened: tuple[BulkClient, OpenedSource] | None) -> Callable[[], None] | None:
        """Start what carries the blocks; a path that is the only one is given back, for the caller's own thread."""
        most = 1 + max(0, len(self._blocks) - 1) // BLOCKS_PER_CONNECTION
        connections = max(1, min(self._ways.connections, most))
        if connections == 1 and self._spare:
            origin = self._spare.popleft()
            path = self._joined(origin, opened)
            return partial(self._carry, path, origin, 0, opened)
        used = min(origins, connections)
        for _ in range(used):
            self._start(self._spare.popleft(), -(-connections // used), opened)
            opened = None
        return None

    def _reserve(self) -> bool:
        """Turn to an origin that was not needed so far; says whether there was one."""
        if not self._spare:
            return False
        self._start(self._spare.popleft(), self._ways.connections, None)
        return True

    def _start(self, origin: Origin, connections: int, opened: tuple[BulkClient, OpenedSource] | None) -> None:
        for number in range(connections):
            path = self._joined(origin, opened)
            name = f"fetch {origin.name} {number}"
            thread = threading.Thread(target=self._carry, args=(path, origin, number, opened), name=name, daemon=True)
            opened = None
            self._threads[path] = thread
            thread.start()

    def _joined(self, origin: Origin, opened: tuple[BulkClient, OpenedSource] | None) -> Path:
        path = Path(origin.name)
        self._shares.join(path)
        if opened is not None and opened[1].first:
            self._shares.claim(path, self._clock.now_ns())
        return path

    def _stop(self) -> None:
        """Wait for the threads that could touch the memory; one that still connects sees afterwards that it is over."""
        with self._changed:
            self.cancel()
            touching = [self._threads[path] for path in self._clients]
        for thread in touching:
            thread.join()

    def _carry(self, path: Path, origin: Origin, number: int, opened: tuple[BulkClient, OpenedSource] | None) -> None:
        """A connection's life, with all that it is tried again."""
        tries = 0
        try:
            while self._wanted_still(path):
                before = path.brought
                lead, opened = opened, None
                try:
                    self._connected(path, origin, number, lead)
                    return
                except TensorbusError as error:
                    tries = 1 if path.brought != before else tries + 1
                    self._failed(path, error, tries=tries)
                except Exception as error:  # the thread's edge: the transfer goes on without this path
                    log.exception("a path of a transfer failed")
                    self._failed(path, UnavailableError(f"a path failed: {error!r}"), tries=TRIES_MAX)
                if tries >= TRIES_MAX:
                    return
                with self._changed:
                    if not self._over:
                        self._changed.wait(_RETRY_S * 2**tries)
        finally:
            if opened is not None:
                opened[0].close()
            with self._changed:
                self._shares.leave(path)
                self._changed.notify_all()

    def _wanted_still(self, path: Path) -> bool:
        """Whether a path should connect; waits while it is benched."""
        with self._changed:
            while not (self._over or self._shares.finished or path.source in self.failures):
                if not path.benched:
                    return True
                self._changed.wait(_LOOK_S)
            return False

    def _failed(self, path: Path, error: TensorbusError, *, tries: int) -> None:
        with self._changed:
            self._shares.lost(path)
            if self._over or path.benched or path.source in self.failures:
                return
            self._retries += 1
            log.info("a connection to %s failed: %s", path.source, error)
            again = isinstance(error, UnavailableError | RemoteProtocolError | DeadlineExceededError)
            alone = all(other is path or other.source != path.source for other in self._shares.paths)
            if not again or (alone and tries >= TRIES_MAX):
                self.drop(path.source, error)

    def _connected(
        self, path: Path, origin: Origin, number: int, opened: tuple[BulkClient, OpenedSource] | None
    ) -> None:
        client, source = opened or self._open(origin, number)
        done = False
        try:
            with self._changed:
                if self._over or path.source in self.failures:
                    return
                self._clients[path] = client
            self._pump(path, client, source)
            done = True
        finally:
            with self._changed:
                self._clients.pop(path, None)
            if done:
                self._ways.rest(origin, number, client, source)
            else:
                client.close()

    def _open(self, origin: Origin, number: int) -> tuple[BulkClient, OpenedSource]:
        left = self._deadline.left()
        opening = Deadline(CONNECT_S if left is None else min(CONNECT_S, left), what=f"connecting to {origin.name}")
        client, source = self._ways.open(origin, number, tables=False, deadline=opening)
        if source.tables != self._tables:
            client.close()
            raise ConflictError(f"{origin.name} has the same artifact laid out differently")
        return client, source

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _pump(self, path: Path, client: BulkClient, source: OpenedSource) -> None:
        sums, asked = self._ways.sums, deque[tuple[int, Run]]()
        if source.first:
            asked.append((source.first, Run(0, 1)))
        while True:
            for run in self._take(path, idle=not asked):
                asked.append((self._ask(client, source.source, run), run))
            if not asked:
                return
            request, run = asked.popleft()
            for came in client.receive(request, self._wanted(run), sums=sums, deadline=self._deadline):
                self._came(path, came if self._by_index else self._renumbered(run, came))
            with self._changed:
                self._shares.ended(path)
                if self._shares.finished and not asked:
                    self._clients.pop(path, None)  # at rest: whoever ends the transfer need not cut it
                self._changed.notify_all()

    def _take(self, path: Path, *, idle: bool) -> list[Run]:
        """What to ask for now; waits for something if the path has nothing to do, and gives nothing at the end."""
        with self._changed:
            while True:
                now_ns = self._clock.now_ns()
                runs: list[Run] = []
                while (run := self._shares.take(path, now_ns)) is not None:
                    runs.append(run)
                if runs or not idle or self._over or self._shares.finished or path.source in self.failures:
                    return runs
                slow = self._shares.holding_up(path, now_ns)
                if slow is not None and slow in self._clients:
                    log.info("a connection to %s holds up a transfer; others bring its blocks", slow.source)
                    self._clients[slow].interrupt()
                self._changed.wait(_LOOK_S)

    def _ask(self, client: BulkClient, source: int, run: Run) -> int:
        sums, deadline = self._ways.sums, self._deadline
        if self._by_index:
            return client.ask_blocks(source, run.first, run.count, sums=sums, deadline=deadline)
        spans = [span for block in self._blocks[run.first : run.first + run.count] for span in block]
        return client.ask_spans(source, spans, sums=sums, deadline=deadline)

    def _wanted(self, run: Run) -> list[Wanted]:
        first = 0 if self._by_index else run.first
        return [
            Wanted(index - first, [self._room[at : at + size] for at, size in self._blocks[index]], self._sizes[index])
            for index in range(run.first, run.first + run.count)
        ]

    @staticmethod
    def _renumbered(run: Run, came: Came) -> Came:
        return replace(came, index=run.first + came.index)

    def _came(self, path: Path, came: Came) -> None:
        now_ns = self._clock.now_ns()
        with self._changed:
            if came.right:
                self._shares.came(path, came.index, now_ns)
                if self._learn is not None and came.checksum is not None:
                    self._learn(came.index, came.checksum)
                self._changed.notify_all()  # somebody may wait to hand it on
                return
            log.warning("block %d came from %s with other bytes than were sent", came.index, path.source)
            if self._shares.spoilt(path, came.index, came.found or 0, now_ns):
                raise CorruptError(
                    f"block {came.index} comes from {path.source} with other bytes than its checksum's",
                    source=path.source,
                    block=came.index,
                )

    def _failure(self) -> TensorbusError:
        errors = list(self.failures.values())
        if len(errors) == 1:
            return errors[0]
        said = "; ".join(f"{name}: {error}" for name, error in self.failures.items()) or "it was cancelled"
        if errors and all(isinstance(error, type(errors[0])) for error in errors):
            return type(errors[0])(said)
        return UnavailableError(f"the transfer did not come to its end: {said}")
