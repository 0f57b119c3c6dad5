"""Segments of the worker's pool that this process fills: taking them, and the memory behind ``bus.empty()``."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, InvalidArgumentError, OutOfSpaceError, UnavailableError
from tensorbus.transport import PinnedMap

if TYPE_CHECKING:
    from tensorbus.sdk._core import Core

MEMORY_BYTES_MAX: Final = (1 << 48) - 1
Purpose: TypeAlias = Literal["put", "empty"]

_RETIRING_S: Final = 2.0
_RETRY_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Grant:
    """A segment that is this process's until it is committed, registered or given up.

    Attributes:
        epoch: The connection that it was granted on; it ends with it.
        warm: Whether it was mapped here before, so that its pages are there.
    """

    segment: int
    generation: int
    nbytes: int
    memory: PinnedMap
    epoch: int
    warm: bool = False


@dataclass(eq=False, slots=True)
class _Empty:
    """Memory that a caller fills by itself; the caller's tensors keep it alive."""

    segment: int
    generation: int
    nbytes: int
    address: int
    memory: weakref.ref[PinnedMap]
    epoch: int
    spent: bool = False


class Owned:
    """The segments that the worker granted to this process."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._empties: dict[tuple[int, int], _Empty] = {}

    async def take(self, nbytes: int, *, deadline: Deadline, purpose: Purpose = "put") -> Grant:
        """A writable segment of the worker's pool.

        Args:
            purpose: ``"empty"`` for memory that goes to the caller's hands, and is not used for another put.

        Raises:
            OutOfSpaceError: If the pool is full; says who holds it.
            InvalidArgumentError: If no worker can have that much.
        """
        if nbytes > MEMORY_BYTES_MAX:
            raise InvalidArgumentError(
                f"no worker has memory of {nbytes} bytes; the most that can be asked for is 256 TiB"
            )
        core = self._core
        fresh = False
        patience = Deadline(_RETIRING_S)
        while True:
            try:
                args = {"nbytes": nbytes, "purpose": purpose, "fresh": fresh}
                reply = await core.ask("alloc", args, deadline=deadline)
            except OutOfSpaceError as exc:
                if core.writes.drop():
                    continue  # what this process kept warm was perhaps what was missing
                if not exc.details.get("retiring_bytes") or not patience.left():
                    raise
                await asyncio.sleep(_RETRY_S)  # other callers were asked to unmap what they keep warm
                continue
            segment, generation = _number(reply.data, "segment"), _number(reply.data, "generation")
            epoch = core.link.epoch
            try:
                memory = core.writes.take(segment, reply)
            except BaseException:
                core.tidy("abort", {"segment": segment, "generation": generation})
                raise
            if memory is not None:
                return Grant(segment, generation, nbytes, memory, epoch, warm=reply.data.get("mapped") is True)
            core.tidy("abort", {"segment": segment, "generation": generation})
            fresh = True  # the worker offered what was unmapped here a moment ago

    def give_up(self, grant: Grant) -> None:
        """The segment is not needed after all."""
        if grant.epoch == self._core.link.epoch:
            self._core.tidy("abort", {"segment": grant.segment, "generation": grant.generation})
            self.keep_warm(grant)

    def keep_warm(self, grant: Grant) -> None:
        """The mapping may serve again, once the worker offers the segment again."""
        if grant.epoch == self._core.link.epoch and self._core.link.connected:
            self._core.writes.give_back(grant.segment, grant.memory)

    def lend(self, grant: Grant) -> None:
        """The segment's memory goes to the caller, who fills it and registers it, or drops it."""
        core, key, epoch = self._core, (grant.segment, grant.generation), grant.epoch

        def dropped(_: object) -> None:  # without a hold on the grant, which has one on the memory
            core.later(lambda: self._dropped(key, epoch))

        self._empties[key] = _Empty(
            segment=grant.segment,
            generation=grant.generation,
            nbytes=grant.nbytes,
            address=np.frombuffer(grant.memory, np.uint8).ctypes.data,
            memory=weakref.ref(grant.memory, dropped),
            epoch=grant.epoch,
        )

    def find(self, address: int, nbytes: int) -> Grant | None:
        """The lent segment that holds those bytes, if it can be registered.

        Raises:
            UnavailableError: If the connection that granted it was lost; InvalidArgumentError: If it was registered.
        """
        for empty in self._empties.values():
            if not (empty.address <= address and address + nbytes <= empty.address + max(empty.nbytes, 1)):
                continue
            memory = empty.memory()
            if memory is None:
                continue
            if empty.spent:
                raise InvalidArgumentError("its memory was registered before; take new memory from bus.empty()")
            if empty.epoch != self._core.link.epoch:
                raise UnavailableError("the worker that gave its memory was lost meanwhile; take new memory")
            return Grant(empty.segment, empty.generation, empty.nbytes, memory, empty.epoch)
        return None

    def address_of(self, grant: Grant) -> int:
        return self._empties[grant.segment, grant.generation].address

    def registered(self, grants: list[Grant]) -> None:
        """The lease on these has them now."""
        for grant in grants:
            self._empties[grant.segment, grant.generation].spent = True

    def lost(self) -> None:
        """The connection went, and the grants with it; the memory stays readable as long as tensors lie over it."""
        for key in [key for key, empty in self._empties.items() if empty.memory() is None]:
            del self._empties[key]

    def _dropped(self, key: tuple[int, int], epoch: int) -> None:
        empty = self._empties.pop(key, None)
        if empty is None or epoch != self._core.link.epoch:
            return
        if not empty.spent:
            self._core.tidy("abort", {"segment": empty.segment, "generation": empty.generation})


def _number(data: dict[str, object], name: str) -> int:
    value = data.get(name)
    if type(value) is not int:
        raise CorruptError(f"the worker's answer has no {name}")
    return value
