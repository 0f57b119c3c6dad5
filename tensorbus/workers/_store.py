"""The artifacts whose bytes this worker holds, and the segments they lie in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from blake3 import blake3

from tensorbus.events import Tier
from tensorbus.ids import ArtifactId, LeaseId
from tensorbus.model import Layout, Manifest
from tensorbus.transport import BlockTable, Segment, SourceTables, Span, TransferReport, page_round
from tensorbus.workers._core import manifest_body, off_loop

Where = tuple[str, ArtifactId]

_TABLES = threading.Lock()
"""Two readers that come at once must share what they learn of the blocks."""


def spans_of(manifest: Manifest, layout: Layout) -> list[Span]:
    """Where the tensors' bytes lie, in the manifest's order."""
    return [(offset, spec.nbytes) for spec, offset in zip(manifest, layout.offsets, strict=True)]


@dataclass(eq=False, slots=True)
class Held:
    """One artifact's bytes here.

    Attributes:
        parts: The segments, laid end to end, each rounded up to whole pages; the layout's offsets run over them.
        lease: The caller's lease that it stands and falls with, or ``None`` if the worker owns the bytes.
        life: The sequence at which the artifact's life began whose bytes these are; an id may come back after its end.
        joined: Whether another put of the same bytes was answered with these: they are no longer the first one's alone.
        wrong: Whether the bytes were found not to be the artifact's.
        blocks: The pieces in which it travels, with their checksums as far as they are known; made when needed.
        came: How the bytes came here, if from another host.
        settling: Whether the log lost its tail, and it is not yet known again of which life these are the bytes.
    """

    tenant: str
    artifact: ArtifactId
    parts: tuple[Segment, ...]
    layout: Layout
    manifest: Manifest
    lease: LeaseId | None = None
    tier: Tier = Tier.DRAM
    life: int = 0
    joined: bool = False
    settling: bool = False
    wrong: bool = False
    blocks: BlockTable | None = None
    came: TransferReport | None = None
    _tables: tuple[Manifest, SourceTables] | None = None
    _json: tuple[Manifest, bytes] | None = None

    async def manifest_json(self) -> bytes:
        """The manifest as it travels, made once."""
        known = self._json
        if known is None or known[0] is not self.manifest:
            manifest = self.manifest
            known = self._json = (manifest, await off_loop(manifest_body, manifest, weight=len(manifest)))
        return known[1]

    def tables(self) -> SourceTables:
        """What a reader on another host needs to know, made once. May be asked from any thread; hashes the layout."""
        with _TABLES:
            known = self._tables
            if known is None or known[0] is not self.manifest:
                manifest = self.manifest
                known = self._tables = (manifest, self._make_tables(manifest))
                self.blocks = known[1].blocks
            return known[1]

    def _make_tables(self, manifest: Manifest) -> SourceTables:
        layout = self.layout.to_json()
        blocks = self.blocks or BlockTable(spans_of(manifest, self.layout))
        # Whoever has this artifact has these tensors, so that the layout alone tells where they lie.
        name = blake3(layout.encode()).hexdigest(length=16)
        return SourceTables(manifest=manifest.to_json(), layout=layout, name=name, blocks=blocks)

    @property
    def where(self) -> Where:
        return self.tenant, self.artifact

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the first part to the end of the last."""
        return sum(page_round(part.nbytes) for part in self.parts[:-1]) + self.parts[-1].nbytes

    @property
    def valid(self) -> bool:
        """Whether every segment still belongs to this use of it."""
        return all(part.valid() for part in self.parts)

    @contextmanager
    def reading(self) -> Iterator[list[memoryview]]:
        """The parts' bytes for a copy within this process; they are not used again before the end of the body."""
        with ExitStack() as stack:
            yield [stack.enter_context(part.lease()) for part in self.parts]

    def part_of(self, offset: int) -> tuple[int, int]:
        """The part that an offset lies in, and the offset within it."""
        for index, part in enumerate(self.parts[:-1]):
            size = page_round(part.nbytes)
            if offset < size:
                return index, offset
            offset -= size
        return len(self.parts) - 1, offset

    def release(self) -> None:
        """Give the memory back; it is used again once its last reader is gone."""
        for part in self.parts:
            part.release()


class Store:
    """What is held, by tenant and artifact id. Lives on the worker's loop.

    Bytes whose birth is still to be decided are *expected*: another's bytes may win their id, so nobody may read them
    under it before the fold says whose it is.
    """

    def __init__(self) -> None:
        self._held: dict[Where, Held] = {}
        self.on_added: Callable[[Held], None] = lambda _held: None
        self.on_used: Callable[[Where], None] = lambda _where: None
        self.on_dropped: Callable[[Where], None] = lambda _where: None
        self._expected: dict[Where, tuple[Held, tuple[int, int]]] = {}
        self._aside: dict[Where, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, tenant: str, artifact: ArtifactId) -> Held | None:
        return self._held.get((tenant, artifact))

    def all(self) -> list[Held]:
        return list(self._held.values())

    def add(self, held: Held, *, life: int) -> None:
        """Hold the bytes of the life of an artifact that began at a position."""
        held.life = life
        for part in held.parts:
            part.label = held.artifact
        self._held[held.where] = held
        self.on_added(held)

    def used(self, where: Where) -> None:
        """Somebody reads what is held."""
        self.on_used(where)

    def expect(self, held: Held, *, after: tuple[int, int]) -> None:
        """Bytes that a fact beyond a position may make an artifact.

        Args:
            after: How often the state was replaced, and its sequence.
        """
        self._expected[held.where] = held, after

    def expected(self, where: Where) -> Held | None:
        return self._expected.get(where, (None, None))[0]

    def expected_with(self, parts: tuple[Segment, ...]) -> Held | None:
        """What is expected in that memory."""
        return next((held for held, _ in self._expected.values() if held.parts == parts), None)

    def forget(self, held: Held) -> None:
        """Its birth did not come to be; the memory stays with who expected it."""
        if self.expected(held.where) is held:
            del self._expected[held.where]

    def born(self, where: Where, *, at: tuple[int, int]) -> None:
        """The fold kept a birth by this worker: what was expected is the artifact's bytes from now on."""
        held, after = self._expected.get(where, (None, at))
        if held is not None and at > after:
            del self._expected[where]
            self.drop(*where)  # the same bytes, if the log had lost their artifact
            self.add(held, life=at[1])

    def set_aside(self, held: Held) -> None:
        """Hold bytes that nobody is to read any more, until it is said that they are wrong."""
        if self._held.get(held.where) is held:
            held.wrong = True
            del self._held[held.where]
            self._aside[held.where] = held
            self.on_dropped(held.where)

    def is_aside(self, where: Where) -> bool:
        return where in self._aside

    def give_up(self, held: Held) -> None:
        """Give the memory back of what was set aside."""
        if self._aside.get(held.where) is held:
            del self._aside[held.where]
            held.release()

    def owns(self, parts: tuple[Segment, ...]) -> bool:
        """Whether memory is that of something held."""
        return any(held.parts == parts for held in self._held.values())

    def drop(self, tenant: str, artifact: ArtifactId) -> Held | None:
        """Forget an artifact and give its memory back."""
        held = self._held.pop((tenant, artifact), None)
        if held is not None:
            self.on_dropped(held.where)
            held.release()
        return held
