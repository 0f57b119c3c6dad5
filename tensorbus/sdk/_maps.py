"""Mapped memory in this process: what is read, shared while any tensor over it lives; what is filled, kept warm."""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, TypeAlias

from tensorbus.errors import CorruptError
from tensorbus.model import Layout, Manifest, TensorSpec
from tensorbus.sdk._tensors import rebuild
from tensorbus.sdk._threads import in_thread
from tensorbus.transport import PinnedMap, Reply, TransferReport, map_private, map_shared

PART_ALIGN: Final = 4096
WARM_BYTES_MAX: Final = 4 << 30
_LARGE_BYTES: Final = 256 * 1024

Lifetime: TypeAlias = tuple[str, int]
"""An artifact id and the sequence of its birth: bytes that never change."""


@dataclass(slots=True)
class Lent:
    """A note that is shared by all who have the same memory open."""

    yes: bool = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Opened:
    """An artifact's bytes as this process has them.

    Attributes:
        parts: Memory of the parts, which the layout lays end to end, each rounded up to 4,096 bytes.
        path: How the bytes come here: ``shm`` or ``tcp``.
        why: Why that way.
        report: The same with figures, if the bytes came from elsewhere.
        lent: Whether tensors over this memory were given out, so that the caller may have written to it.
    """

    manifest: Manifest
    layout: Layout
    parts: tuple[mmap.mmap, ...]
    starts: tuple[int, ...]
    path: str
    why: str
    lent: Lent = field(default_factory=Lent)
    report: TransferReport | None = None

    def place(self, index: int) -> tuple[mmap.mmap, int]:
        """The memory and the offset within it where the tensor at ``index`` of the manifest begins."""
        offset = self.layout.offsets[index]
        part = max(0, bisect_right(self.starts, offset) - 1)
        return self.parts[part], offset - self.starts[part]

    def tensor(self, spec: TensorSpec, framework: str | None) -> Any:
        """The whole tensor for the caller's hands, without a copy."""
        self.lent.yes = True
        return self.look(spec, framework)

    def look(self, spec: TensorSpec, framework: str | None) -> Any:
        """The whole tensor, without a copy; only to read here."""
        memory, offset = self.place(self.manifest.index(spec.name))
        return rebuild(memory, offset, spec, framework)

    def tensors(self, framework: str | None) -> dict[str, Any]:
        """All of them whole, for the caller's hands, without a copy."""
        self.lent.yes = True
        found = {}
        for index, spec in enumerate(self.manifest):
            memory, offset = self.place(index)
            found[spec.name] = rebuild(memory, offset, spec, framework)
        return found

    def octets(self, spec: TensorSpec) -> memoryview:
        """The tensor's bytes, without a copy."""
        memory, offset = self.place(self.manifest.index(spec.name))
        return memoryview(memory)[offset : offset + spec.nbytes]


def part_starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each part begins when they are laid end to end."""
    return tuple(accumulate((-(-size // PART_ALIGN) * PART_ALIGN for size in sizes[:-1]), initial=0))


async def map_reply(reply: Reply) -> Opened:
    """Map what the worker's answer to ``open`` hands over.

    Raises:
        CorruptError: If the answer is not valid; UnavailableError: If the kernel refuses the mapping.
    """
    manifest, layout = await decode_tables(reply.body, reply.data.get("layout"))
    sizes = _part_sizes(reply.data.get("parts"))
    if len(reply.fds) != 2 * len(sizes):
        raise CorruptError(f"{len(reply.fds)} descriptors came for {len(sizes)} parts")
    starts = part_starts(sizes)
    if layout.nbytes > starts[-1] + sizes[-1]:
        raise CorruptError(f"the layout of {layout.nbytes} bytes is larger than its parts")
    fds = reply.fds.take()
    pairs = list(zip(fds[::2], fds[1::2], strict=True))
    parts = tuple(map_private(fd, size, pin) for (fd, pin), size in zip(pairs, sizes, strict=True))
    report = _report(reply.data.get("transfer"))
    return Opened(
        manifest=manifest, layout=layout, parts=parts, starts=starts, path=report.path, why=report.why, report=report
    )


def _report(data: object) -> TransferReport:
    said = data if isinstance(data, dict) else {}
    sources = said.get("sources")
    return TransferReport(
        path=str(said.get("path", "shm")),
        why=str(said.get("why", "")),
        sources={str(name): int(nbytes) for name, nbytes in sources.items()} if isinstance(sources, dict) else {},
        nbytes=int(said.get("nbytes", 0)),
        seconds=float(said.get("seconds", 0.0)),
        retries=int(said.get("retries", 0)),
    )


async def decode_tables(manifest: bytes | bytearray | memoryview, layout: object) -> tuple[Manifest, Layout]:
    """The tables in an answer; large ones off the loop.

    Raises:
        CorruptError: If they are not valid.
    """
    raw = bytes(manifest)
    if len(raw) < _LARGE_BYTES:
        return _decode_tables(raw, layout)
    return await in_thread(lambda: _decode_tables(raw, layout))


def _decode_tables(raw: bytes, layout: object) -> tuple[Manifest, Layout]:
    manifest = Manifest.from_json(raw)
    return manifest, Layout.from_value(layout, manifest)


def _part_sizes(parts: object) -> list[int]:
    items = parts if isinstance(parts, list) else []
    sizes = [part["nbytes"] for part in items if isinstance(part, dict) and type(part.get("nbytes")) is int]
    if not sizes or len(sizes) != len(items) or min(sizes) < 0:
        raise CorruptError("the worker's answer names no parts")
    return sizes


class ReadMaps:
    """What this process has open, so that reading an artifact again shares its memory. Keeps nothing alive."""

    def __init__(self) -> None:
        self._tables: dict[Lifetime, _Tables] = {}

    def find(self, life: Lifetime) -> Opened | None:
        """What is open, if all of it still is."""
        tables = self._tables.get(life)
        return None if tables is None else tables.opened()

    def keep(self, life: Lifetime, opened: Opened) -> Opened:
        """Note what was opened; gives what another opened meanwhile, if that is so."""
        there = self.find(life)
        if there is not None:
            return there
        self._tables[life] = tables = _Tables(opened)
        # The tables go with the first part.
        weakref.finalize(opened.parts[0], _forget, weakref.ref(self), life, tables).atexit = False
        return opened

    def forget(self, life: Lifetime, tables: _Tables) -> None:
        if self._tables.get(life) is tables:
            self._tables.pop(life, None)


class _Tables:
    """An :class:`Opened` without the hold on its memory."""

    __slots__ = ("layout", "lent", "manifest", "parts", "path", "report", "starts", "why")

    def __init__(self, opened: Opened) -> None:
        self.manifest, self.layout, self.starts = opened.manifest, opened.layout, opened.starts
        self.path, self.why, self.lent, self.report = opened.path, opened.why, opened.lent, opened.report
        self.parts = [weakref.ref(part) for part in opened.parts]

    def opened(self) -> Opened | None:
        parts = [part() for part in self.parts]
        alive = tuple(part for part in parts if part is not None)
        if len(alive) != len(parts):
            return None
        return Opened(
            manifest=self.manifest,
            layout=self.layout,
            parts=alive,
            starts=self.starts,
            path=self.path,
            why=self.why,
            lent=self.lent,
            report=self.report,
        )


def _forget(maps: weakref.ref[ReadMaps], life: Lifetime, tables: _Tables) -> None:
    owner = maps()
    if owner is not None:
        owner.forget(life, tables)


class WriteMaps:
    """Segments that this process has mapped to fill them; the worker hands them out again while they are warm.

    Args:
        limit_bytes: How much may stay mapped between puts.
    """

    def __init__(self, *, limit_bytes: int = WARM_BYTES_MAX) -> None:
        self._limit_bytes = limit_bytes
        self._maps: OrderedDict[int, PinnedMap] = OrderedDict()
        self._nbytes = 0

    def take(self, segment: int, reply: Reply) -> PinnedMap | None:
        """The writable memory that an answer to ``alloc`` grants.

        Gives ``None`` if the answer counts on a mapping that is not kept any more.

        Raises:
            CorruptError: If the answer has no descriptors; UnavailableError: If the kernel refuses the mapping.
        """
        warm = self._pop(segment)
        if reply.data.get("mapped") is True:
            return warm
        if len(reply.fds) != 2:
            raise CorruptError(f"{len(reply.fds)} descriptors came for a segment to fill")
        fd, pin = reply.fds.take()
        # All of it: a later, larger put may be offered the same segment.
        capacity = reply.data.get("capacity", reply.data.get("nbytes"))
        return map_shared(fd, capacity if isinstance(capacity, int) else 0, pin)

    def give_back(self, segment: int, mapping: PinnedMap) -> None:
        """Keep a mapping warm for the worker's next offer; the oldest are unmapped to make room."""
        self._maps[segment] = mapping
        self._nbytes += len(mapping)
        while self._nbytes > self._limit_bytes and self._maps:
            self._pop(next(iter(self._maps)))

    def drop(self, segments: Sequence[int] | None = None) -> int:
        """Unmap those segments, or all, that wait here; their memory is the worker's again. Gives their count."""
        wanted = list(self._maps) if segments is None else segments
        return sum(self._pop(segment) is not None for segment in wanted)

    def _pop(self, segment: int) -> PinnedMap | None:
        mapping = self._maps.pop(segment, None)
        if mapping is not None:
            self._nbytes -= len(mapping)
        return mapping
