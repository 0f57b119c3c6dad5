"""Taking a caller's tensors in: collected, laid out, copied and hashed in one pass, committed by the worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from tensorbus.clock import Deadline
from tensorbus.errors import InvalidArgumentError
from tensorbus.ids import check_name
from tensorbus.model import Layout, Manifest, plan_layout
from tensorbus.sdk._checks import check_flag
from tensorbus.sdk._core import Core
from tensorbus.sdk._files import open_files
from tensorbus.sdk._fill import Filling, Progress
from tensorbus.sdk._link import ConnectionLostError
from tensorbus.sdk._owned import Grant
from tensorbus.sdk._records import ArtifactInfo, parse, position_of
from tensorbus.sdk._remote import put_remote
from tensorbus.sdk._tensors import Source, collect, manifest_of
from tensorbus.sdk._threads import in_thread, in_thread_to_its_end

Digest: TypeAlias = Literal["now", "later"]
Disk: TypeAlias = Literal["must", "should", "may"]

_INLINE_BYTES: Final = 1 << 20  # less work than the way to a thread and back
_INLINE_TENSORS: Final = 64
_TABLE_INLINE_TENSORS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """How a put is to be named and hashed.

    Raises:
        InvalidArgumentError: If a name cannot be, or ``digest`` or ``disk`` is none of its words.
    """

    id: str | None = None
    key: str | None = None
    rebind: bool = False
    digest: Digest = "now"
    disk: Disk = "may"

    def __post_init__(self) -> None:
        for what, name in (("id", self.id), ("key", self.key)):
            if name is not None:
                check_name(name, what=what)
        check_flag(self.rebind, "rebind")
        if self.digest not in ("now", "later"):
            raise InvalidArgumentError(f'digest must be "now" or "later", not {self.digest!r:.80}')
        if self.disk not in ("must", "should", "may"):
            raise InvalidArgumentError(f'disk must be "must", "should" or "may", not {self.disk!r:.80}')

    @property
    def repeatable(self) -> bool:
        """Whether doing it twice gives one artifact: its id is given, or follows from its content."""
        return self.id is not None or self.digest == "now"

    def args(self) -> dict[str, object]:
        named: dict[str, object] = {"id": self.id, "key": self.key, "rebind": self.rebind}
        return named if self.disk == "may" else {**named, "disk": self.disk}


@dataclass(frozen=True, slots=True)
class Collected:
    """What is to be taken in, and where each tensor will lie."""

    sources: Sequence[Source]
    manifest: Manifest
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Bytes to copy; tied tensors count once."""
        return sum(source.nbytes for source, _ in self.distinct())

    def distinct(self) -> Iterator[tuple[Source, int]]:
        """Each tensor that has a place of its own, and the place."""
        seen: set[tuple[int, int]] = set()
        for source, offset in zip(self.sources, self.layout.offsets, strict=True):
            if (offset, source.nbytes) not in seen:
                seen.add((offset, source.nbytes))
                yield source, offset

    def spread(self, digests: Sequence[bytes | None]) -> Manifest:
        """The manifest with the digests of :meth:`distinct`."""
        known = {
            (offset, source.nbytes): digest
            for (source, offset), digest in zip(self.distinct(), digests, strict=True)
            if digest is not None
        }
        places = zip(self.sources, self.layout.offsets, strict=True)
        return self.manifest.with_digests(known[offset, source.nbytes] for source, offset in places)


def gather(content: object) -> Collected:
    """The tensors of a dict, a bare tensor, or a safetensors file or directory. Reads headers; call it off the loop.

    Raises:
        InvalidArgumentError: If it is none of these; NotFoundError: If there is no such file;
            CorruptError: If the file is no safetensors.
    """
    sources = open_files(content) if isinstance(content, str | os.PathLike) else collect(content)
    manifest = manifest_of(sources)
    return Collected(sources, manifest, plan_layout(manifest, [source.alias for source in sources]))


async def collected(content: object) -> Collected:
    """What :func:`gather` gives, off the loop if it takes longer than the way there."""
    if not isinstance(content, str | os.PathLike) and (
        not isinstance(content, dict) or len(content) <= _INLINE_TENSORS
    ):
        return gather(content)
    return await in_thread(lambda: gather(content))


async def put(
    core: Core, content: object, options: PutOptions, *, progress: Progress | None, deadline: Deadline
) -> tuple[ArtifactInfo, int]:
    """Take tensors in. A lost connection starts it over, if that gives the same artifact.

    Returns:
        The artifact, and the position at which it is there.
    """
    async with deadline.scope():
        what = await collected(content)
        while True:
            try:
                return await _put_once(core, what, options, progress=progress, deadline=deadline)
            except ConnectionLostError:
                if not options.repeatable:
                    raise


async def _put_once(
    core: Core, what: Collected, options: PutOptions, *, progress: Progress | None, deadline: Deadline
) -> tuple[ArtifactInfo, int]:
    hello = await core.link.connect(deadline)
    if not hello.descriptors:
        return await put_remote(core, what, options, progress=progress, deadline=deadline)
    grant = await core.owned.take(what.layout.nbytes, deadline=deadline)
    try:
        manifest = await fill(what, grant, digests=options.digest == "now", progress=progress)
        reply = await core.ask(
            "commit",
            {
                "segment": grant.segment,
                "generation": grant.generation,
                "layout": {"nbytes": what.layout.nbytes, "offsets": what.layout.offsets},
                "digest": options.digest,
                **options.args(),
            },
            body=await table_of(manifest),
            deadline=deadline,
            repeat=False,
            epoch=grant.epoch,
        )
    except BaseException:
        core.owned.give_up(grant)
        raise
    core.owned.keep_warm(grant)
    info, position = parse(ArtifactInfo, reply.data.get("artifact")), position_of(reply.data)
    core.followed.changed_here(info, options.key, position)
    return info, position


async def fill(what: Collected, grant: Grant, *, digests: bool, progress: Progress | None = None) -> Manifest:
    """Copy the tensors into a segment, in a thread. Gives the manifest, with digests if they are wanted.

    A cancelled caller waits for the piece that is being copied: the segment must be still when it is given up.
    """

    def work(stop: threading.Event) -> Manifest:
        filling = Filling(grant.memory, warm=grant.warm, digests=digests, stop=stop)
        taken = filling.run(list(what.distinct()), progress=progress)
        return what.spread(taken) if digests else what.manifest

    small = what.layout.nbytes <= _INLINE_BYTES and len(what.sources) <= _INLINE_TENSORS
    if small and not any(source.waits for source in what.sources):
        return work(threading.Event())
    return await in_thread_to_its_end(work)


async def table_of(manifest: Manifest) -> bytes:
    """The manifest's JSON; a large one is written off the loop."""
    if len(manifest) <= _TABLE_INLINE_TENSORS:
        return manifest.to_json().encode()
    return await in_thread(lambda: manifest.to_json().encode())


def address_of(view: memoryview) -> int:
    """Where a buffer begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
