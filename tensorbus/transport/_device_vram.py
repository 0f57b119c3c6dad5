"""Allocations of a GPU's memory: each buffer's own, kept for its tenant's next, wiped before another may see them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from tensorbus.errors import OutOfSpaceError
from tensorbus.transport._device_runtime import Runtime, translated

GRAIN_BYTES: Final = 2 << 20
"""Smaller allocations may lie together in one piece of memory of the driver's, which a handle would open as a whole."""
_WASTE_SHARE: Final = 8


@dataclass(eq=False, slots=True)
class Vram:
    """One allocation.

    Attributes:
        shared: Whether it was ever exported.
    """

    address: int
    nbytes: int
    tenant: str
    shared: bool = False


class VramPool:
    """The runtime's memory of one device, with what is kept of it. The device is the calling thread's own already.

    Args:
        keep_bytes: So much freed memory is kept, the newest: allocating anew stops the GPU's work.
    """

    def __init__(self, runtime: Runtime, *, keep_bytes: int) -> None:
        self._runtime = runtime
        self._keep_bytes = keep_bytes
        self._idle: list[Vram] = []
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            return sum(memory.nbytes for memory in self._idle)

    def take(self, nbytes: int, tenant: str, *, stream: int) -> Vram:
        """Memory of at least that size; the stream is used, and waited for, to wipe it.

        Raises:
            OutOfSpaceError: If there is none, also not after giving back what was kept.
        """
        size = max(GRAIN_BYTES, -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES)
        found = self._reuse(size, tenant)
        if found is not None:
            return found
        made = Vram(self._malloc(size), size, tenant)
        try:
            with translated("wiping new memory"):  # within a process the driver hands out what was freed as it is
                self._runtime.memsetAsync(made.address, 0, size, stream)
                self._runtime.streamSynchronize(stream)
        except BaseException:
            self.give_back(made)
            raise
        return made

    def put(self, memory: Vram) -> None:
        """Take memory that nothing uses any more."""
        # What was exported is not used again: a reader that was forgotten would see what comes next.
        if memory.shared or memory.nbytes > self._keep_bytes:
            self.give_back(memory)
            return
        with self._lock:
            self._idle.append(memory)
            over = sum(idle.nbytes for idle in self._idle) - self._keep_bytes
            oldest: list[Vram] = []
            while over > 0:
                oldest.append(self._idle.pop(0))
                over -= oldest[-1].nbytes
        for one in oldest:
            self.give_back(one)

    def trim(self) -> bool:
        """Give back all that is kept; says whether there was any."""
        with self._lock:
            idle, self._idle = self._idle, []
        for memory in idle:
            self.give_back(memory)
        return bool(idle)

    def give_back(self, memory: Vram) -> None:
        """Give memory back to the runtime, which waits for the GPU to be idle."""
        with translated("freeing memory"):
            self._runtime.free(memory.address)

    def _reuse(self, size: int, tenant: str) -> Vram | None:
        most = size + size // _WASTE_SHARE
        with self._lock:
            fit = [memory for memory in self._idle if memory.tenant == tenant and size <= memory.nbytes <= most]
            if not fit:
                return None
            best = min(fit, key=lambda memory: memory.nbytes)
            self._idle.remove(best)
            return best

    def _malloc(self, size: int) -> int:
        while True:
            try:
                with translated("allocating", asked_bytes=size):
                    return self._runtime.malloc(size)
            except OutOfSpaceError:
                if not self.trim():
                    raise
