"""Getting an artifact's bytes into this process: mapped from the local worker, or read from where they are."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping
from typing import Any, Final

from tensorbus.clock import Deadline
from tensorbus.errors import (
    CorruptError,
    DeadlineExceededError,
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.model import Manifest, TensorSpec, TensorView, ViewSpec
from tensorbus.sdk._core import Core
from tensorbus.sdk._into import fill_into
from tensorbus.sdk._maps import Opened, map_reply
from tensorbus.sdk._plain import Buffer, a_type
from tensorbus.sdk._records import ArtifactInfo
from tensorbus.sdk._remote import open_remote
from tensorbus.sdk._sources import collect
from tensorbus.sdk._tensors import check_framework
from tensorbus.sdk._threads import in_thread, in_thread_to_its_end
from tensorbus.transport import hash_bytes

_NEAR: Final = 3
_NAMES_LOOKED_AT: Final = 2000


async def open_artifact(core: Core, info: ArtifactInfo, *, view: ViewSpec | None, deadline: Deadline) -> Opened:
    """The artifact's bytes in this process, shared with whoever has them open here.

    Without a worker on this host, or if that has no room for them, only those that the view needs, and then for this
    handle alone.

    Raises:
        NotFoundError: If it has ended; UnavailableError: If no replica can be reached.
        OutOfSpaceError: If the worker has no room, and they cannot be read without it either.
    """
    life = (info.artifact, info.born)
    there = core.reads.find(life)
    if there is not None:
        return there
    opened, whole = await _open_anew(core, info, view=view, deadline=deadline)
    return core.reads.keep(life, opened) if whole else opened


async def _open_anew(
    core: Core, info: ArtifactInfo, *, view: ViewSpec | None, deadline: Deadline
) -> tuple[Opened, bool]:
    """The artifact's bytes in memory that nobody else here has, and whether they are all there."""
    async with deadline.scope():
        hello = await core.link.connect(deadline)
        if not hello.descriptors:
            why = "no worker on this host"
            return await open_remote(core, info, view=view, why=why, deadline=deadline), view is None
        try:
            reply = await core.ask("open", {"artifact": info.artifact}, deadline=deadline)
        except OutOfSpaceError as full:
            return await _read_through(core, info, full, view=view, deadline=deadline), view is None
        try:
            return await map_reply(reply), True
        finally:
            reply.fds.close()


async def _read_through(
    core: Core, info: ArtifactInfo, full: OutOfSpaceError, *, view: ViewSpec | None, deadline: Deadline
) -> Opened:
    """Read into memory of this process what the worker has no room for.

    Raises:
        OutOfSpaceError: If that cannot be either; it names who holds the worker's memory.
    """
    try:
        why = f"worker {core.link.hello.worker} has no room in memory" if core.link.hello else "no room in memory"
        return await open_remote(core, info, view=view, why=why, deadline=deadline)
    except (UnavailableError, DeniedError, NotFoundError) as exc:
        raise OutOfSpaceError(f"{full.message}; nor can it be read without: {exc.message}", **full.details) from exc


async def open_unwritten(
    core: Core, info: ArtifactInfo, opened: Opened, contents: Contents, *, deadline: Deadline
) -> Opened:
    """The artifact's own bytes, though tensors over what is open were given out and may have been written to.

    Raises:
        CorruptError: If it cannot be opened again, and what is open is not what its digests say, or has none.
        DeadlineExceededError: If the time ran out.
    """
    if not opened.lent.yes:
        return opened
    try:
        fresh, _ = await _open_anew(core, info, view=contents.view, deadline=deadline)
        return fresh
    except DeadlineExceededError:
        raise
    except TensorbusError as exc:  # it has ended, or nobody can be reached: then what is here has to do
        spoilt = await in_thread_to_its_end(lambda stop: contents.spoilt(opened, stop))
        if spoilt is None:
            return opened
        raise CorruptError(
            f"tensor {spoilt.name[:80]!r} of {info.artifact} cannot be written out: this process may have changed its "
            f"mapped copy, and the artifact's own bytes cannot be had again ({exc})",
            artifact=info.artifact,
            tensor=spoilt.name[:1024],
        ) from exc


async def read_manifest(core: Core, info: ArtifactInfo, *, deadline: Deadline) -> Manifest:
    """The artifact's table of tensors, without its bytes."""
    there = core.reads.find((info.artifact, info.born))
    if there is not None:
        return there.manifest
    reply = await core.ask("manifest", {"artifact": info.artifact}, deadline=deadline)
    raw = bytes(reply.body)
    return await in_thread(lambda: Manifest.from_json(raw)) if len(raw) > 1 << 18 else Manifest.from_json(raw)


def find_spec(manifest: Manifest, name: object) -> TensorSpec:
    """The tensor of that name.

    Raises:
        NotFoundError: If there is none; tells which are near.
    """
    if not isinstance(name, str):
        raise InvalidArgumentError(f"a tensor's name is a str, not {a_type(name)}")
    if name in manifest:
        return manifest.find(name)
    near = difflib.get_close_matches(name[:200], manifest.names[:_NAMES_LOOKED_AT], n=_NEAR)
    some = near or manifest.names[:_NEAR]
    hint = "did you mean" if near else "there are"
    raise NotFoundError(
        f"there is no tensor {name!r:.80}; {hint} {', '.join(f'{one!r:.80}' for one in some)}"
        f"{'' if near or len(manifest) <= _NEAR else f' and {len(manifest) - _NEAR} more'}",
        tensor=name[:1024],
        near=[one[:1024] for one in near],
    )


class Contents:
    """What a handle shows: all of an artifact, or a view of it.

    Args:
        base: The artifact's own table.
        view: What is selected of it; ``None`` for all.
    """

    __slots__ = ("base", "manifest", "view", "views")

    def __init__(self, base: Manifest, view: ViewSpec | None) -> None:
        self.base = base
        self.view = view
        self.manifest = base if view is None else view.manifest_of(base)
        self.views: Mapping[str, TensorView] = {} if view is None else dict(view.tensors)

    def tensor(self, opened: Opened, name: object, framework: str | None) -> Any:
        """One tensor, without a copy."""
        spec = find_spec(self.manifest, name)
        part = self.views.get(spec.name)
        if part is None:
            return opened.tensor(spec, framework)
        return part.apply(opened.tensor(self.base.find(spec.name), framework))

    def tensors(self, opened: Opened, framework: str | None) -> dict[str, Any]:
        """All tensors, without a copy."""
        kind = check_framework(framework)
        if self.view is None:
            return opened.tensors(kind)
        return {spec.name: self.tensor(opened, spec.name, kind) for spec in self.manifest}

    def fill(self, opened: Opened, target: Mapping[str, object], stop: threading.Event) -> None:
        """Copy all into the caller's own; nothing is written if one does not fit. Blocks; call it off the loop."""
        fill_into(target, self.all_octets(opened), stop=stop)

    def all_octets(self, opened: Opened) -> list[tuple[TensorSpec, Buffer]]:
        """Each tensor and its bytes in C order. Blocks where something is selected of one."""
        return [(spec, self.octets(opened, spec)) for spec in self.manifest]

    def spoilt(self, opened: Opened, stop: threading.Event) -> TensorSpec | None:
        """The first tensor whose memory cannot be shown to hold the artifact's bytes, if there is one."""
        for spec in self.manifest:
            whole = self.base.find(spec.name)
            if stop.is_set() or not whole.nbytes:
                continue
            if whole.digest is None or hash_bytes(opened.octets(whole)).hex() != whole.digest:
                return spec
        return None

    def octets(self, opened: Opened, spec: TensorSpec) -> memoryview:
        """A tensor's bytes in C order; without a copy where memory holds them so."""
        part = self.views.get(spec.name)
        if part is None:
            return opened.octets(spec)
        source = collect(part.apply(opened.look(self.base.find(spec.name), None)))[0]
        plain = source.view()
        if plain is not None:
            return plain
        room = memoryview(bytearray(spec.nbytes))
        source.write_into(room)
        return room
