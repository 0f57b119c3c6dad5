"""Lending the caller's own memory: tensors of ``bus.empty()`` in place, or a copy of others under a lease."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from tensorbus.clock import Deadline
from tensorbus.errors import CancelledError, CorruptError, InvalidArgumentError, TensorbusError
from tensorbus.model import ALIGN, Layout, Manifest
from tensorbus.sdk._checks import check_flag, check_lease_s
from tensorbus.sdk._core import Core
from tensorbus.sdk._fill import PIECE_BYTES
from tensorbus.sdk._leases import LeaseHandle
from tensorbus.sdk._maps import part_starts
from tensorbus.sdk._owned import Grant
from tensorbus.sdk._put import Collected, PutOptions, address_of, collected, fill, table_of
from tensorbus.sdk._records import ArtifactInfo, parse, position_of
from tensorbus.sdk._tensors import Source
from tensorbus.sdk._threads import in_thread_to_its_end
from tensorbus.transport import default_threads

PARTS_MAX: Final = 16
_ADVICE: Final = "take its memory from bus.empty(), or have it copied with copy=True"


async def register(
    core: Core, content: object, options: PutOptions, *, lease_s: float, copy: bool, sealed: bool, deadline: Deadline
) -> tuple[ArtifactInfo, int, LeaseHandle]:
    """Register tensors under a lease. Gives the artifact, the position at which it is there, and the lease.

    Raises:
        InvalidArgumentError: If a tensor cannot be shared in place; it names it.
    """
    lease_s = check_lease_s(lease_s, "lease_s")
    check_flag(copy, "copy")
    check_flag(sealed, "sealed")
    async with deadline.scope():
        hello = await core.link.connect(deadline)
        if not hello.descriptors:
            raise InvalidArgumentError("register() needs a worker on this host, and the bus speaks to a gateway; put()")
        what = await collected(content)
        if copy:
            return await _register_copy(core, what, options, lease_s=lease_s, sealed=sealed, deadline=deadline)
        grants, layout = place(core, what)
        manifest = what.manifest
        if sealed:
            digests = await in_thread_to_its_end(lambda stop: _digests(what.sources, stop))
            manifest = manifest.with_digests(digests)
        info, position, lease = await _ask(
            core, grants, manifest, layout, options, lease_s=lease_s, sealed=sealed, deadline=deadline
        )
        core.owned.registered(grants)
        return info, position, lease


async def _register_copy(
    core: Core, what: Collected, options: PutOptions, *, lease_s: float, sealed: bool, deadline: Deadline
) -> tuple[ArtifactInfo, int, LeaseHandle]:
    grant = await core.owned.take(what.layout.nbytes, deadline=deadline)
    try:
        manifest = await fill(what, grant, digests=sealed)
        return await _ask(
            core, [grant], manifest, what.layout, options, lease_s=lease_s, sealed=sealed, deadline=deadline
        )
    except BaseException:
        core.owned.give_up(grant)
        raise


async def _ask(
    core: Core,
    grants: Sequence[Grant],
    manifest: Manifest,
    layout: Layout,
    options: PutOptions,
    *,
    lease_s: float,
    sealed: bool,
    deadline: Deadline,
) -> tuple[ArtifactInfo, int, LeaseHandle]:
    reply = await core.ask(
        "register",
        {
            "parts": [[grant.segment, grant.generation] for grant in grants],
            "layout": {"nbytes": layout.nbytes, "offsets": layout.offsets},
            "lease_s": lease_s,
            "sealed": sealed,
            **options.args(),
        },
        body=await table_of(manifest),
        deadline=deadline,
        repeat=False,
        epoch=grants[0].epoch,
    )
    info, position = parse(ArtifactInfo, reply.data.get("artifact")), position_of(reply.data)
    memory = tuple(grant.memory for grant in grants)
    lease = core.leases.hold(reply.data.get("lease"), artifact=info.artifact, ttl_s=lease_s, own=True, memory=memory)
    core.followed.changed_here(info, options.key, position)
    return info, position, lease


def place(core: Core, what: Collected) -> tuple[list[Grant], Layout]:
    """Where the tensors lie in memory that the worker gave this process.

    Raises:
        InvalidArgumentError: If one does not lie there as it is to be read; it names it.
    """
    parts: dict[tuple[int, int], Grant] = {}
    found = [_part_of(core, source) for source in what.sources]
    for grant, _ in found:
        parts.setdefault((grant.segment, grant.generation), grant)
    grants = list(parts.values())
    if len(grants) > PARTS_MAX:
        raise InvalidArgumentError(
            f"the tensors lie in {len(grants)} pieces of memory, the most are {PARTS_MAX}; "
            "cut them out of fewer tensors of bus.empty(), or have them copied with copy=True"
        )
    starts = part_starts([grant.nbytes for grant in grants])
    start_of = dict(zip(parts, starts, strict=True))
    offsets = tuple(start_of[grant.segment, grant.generation] + offset for grant, offset in found)
    layout = Layout(offsets, starts[-1] + grants[-1].nbytes)
    try:
        layout.check(what.manifest)
    except CorruptError as exc:
        raise InvalidArgumentError(f"the tensors cannot be shared in place: {exc}; use copy=True") from exc
    return grants, layout


def _part_of(core: Core, source: Source) -> tuple[Grant, int]:
    view = source.view()
    if view is None:
        why = "it is in a file" if source.waits else "it is not contiguous on the CPU"
        raise _refused(source, why)
    if not source.nbytes:
        raise _refused(source, "it has no bytes")
    address = address_of(view)
    try:
        grant = core.owned.find(address, source.nbytes)
    except TensorbusError as exc:
        raise _refused(source, exc.message, advice="") from exc
    if grant is None:
        raise _refused(source, "its memory is not of this bus's worker")
    offset = address - core.owned.address_of(grant)
    if offset % ALIGN:
        raise _refused(source, f"it begins at {offset} bytes into its memory, which is no multiple of {ALIGN}")
    return grant, offset


def _refused(source: Source, why: str, *, advice: str = f"; {_ADVICE}") -> InvalidArgumentError:
    return InvalidArgumentError(
        f"tensor {source.name!r:.80} cannot be shared in place: {why}{advice}", tensor=source.name[:1024]
    )


def _digests(sources: Sequence[Source], stop: threading.Event) -> list[bytes]:
    digests = []
    for source in sources:
        hasher, view = blake3(max_threads=default_threads()), source.view() or memoryview(b"")
        for start in range(0, len(view), PIECE_BYTES):
            if stop.is_set():
                raise CancelledError("the register was given up")
            hasher.update(view[start : start + PIECE_BYTES])
        digests.append(hasher.digest())
    return digests
