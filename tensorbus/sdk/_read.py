"""Getting an artifact's bytes into this process: mapped from the local worker, or read from where they are."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from typing import Any, Final

from tensorbus.clock import Deadline
from tensorbus.errors import InvalidArgumentError, NotFoundError
from tensorbus.model import Manifest, TensorSpec, TensorView, ViewSpec
from tensorbus.sdk._core import Core
from tensorbus.sdk._maps import Opened, map_reply
from tensorbus.sdk._records import ArtifactInfo
from tensorbus.sdk._remote import open_remote
from tensorbus.sdk._sources import collect
from tensorbus.sdk._tensors import check_framework, fill_into

_NEAR: Final = 3
_NAMES_LOOKED_AT: Final = 2000


async def open_artifact(core: Core, info: ArtifactInfo, *, view: ViewSpec | None, deadline: Deadline) -> Opened:
    """The artifact's bytes in this process, shared with whoever has them open here.

    Without a worker on this host only those that the view needs, and then for this handle alone.

    Raises:
        NotFoundError: If it has ended; UnavailableError: If no replica can be reached.
        OutOfSpaceError: If the worker has no room to fetch it to.
    """
    life = (info.artifact, info.born)
    there = core.reads.find(life)
    if there is not None:
        return there
    async with deadline.scope():
        hello = await core.link.connect(deadline)
        if not hello.descriptors:
            came = await open_remote(core, info, view=view, deadline=deadline)
            return came if view is not None else core.reads.keep(life, came)
        reply = await core.ask("open", {"artifact": info.artifact}, deadline=deadline)
        try:
            opened = await map_reply(reply)
        finally:
            reply.fds.close()
    return core.reads.keep(life, opened)


async def read_manifest(core: Core, info: ArtifactInfo, *, deadline: Deadline) -> Manifest:
    """The artifact's table of tensors, without its bytes."""
    there = core.reads.find((info.artifact, info.born))
    if there is not None:
        return there.manifest
    reply = await core.ask("manifest", {"artifact": info.artifact}, deadline=deadline)
    raw = bytes(reply.body)
    return await asyncio.to_thread(Manifest.from_json, raw) if len(raw) > 1 << 18 else Manifest.from_json(raw)


def find_spec(manifest: Manifest, name: object) -> TensorSpec:
    """The tensor of that name.

    Raises:
        NotFoundError: If there is none; tells which are near.
    """
    if not isinstance(name, str):
        raise InvalidArgumentError(f"a tensor's name is a str, not {type(name).__name__}")
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
        return {spec.name: self.tensor(opened, spec.name, kind) for spec in self.manifest}

    def fill(self, opened: Opened, target: Mapping[str, object]) -> None:
        """Copy all into the caller's own; nothing is written if one does not fit. Blocks; call it off the loop."""
        fill_into(target, [(spec, self.octets(opened, spec)) for spec in self.manifest])

    def octets(self, opened: Opened, spec: TensorSpec) -> memoryview:
        """A tensor's bytes in C order; without a copy where nothing is selected of it."""
        part = self.views.get(spec.name)
        if part is None:
            return opened.octets(spec)
        source = collect(part.apply(opened.tensor(self.base.find(spec.name), None)))[0]
        room = memoryview(bytearray(spec.nbytes))
        source.write_into(room)
        return room
