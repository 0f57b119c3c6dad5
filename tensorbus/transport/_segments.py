"""The system calls behind a pool's memory: memfds, seals, pins. No accounting here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

import numpy as np

from tensorbus.errors import OutOfSpaceError, TensorbusError, UnavailableError

PAGE_BYTES = mmap.PAGESIZE

_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x01, 0x02, 0x04, 0x10
_MADV_POPULATE_WRITE = 23
_HUGE_BYTES = 2 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def page_round(nbytes: int) -> int:
    """The size of the memory behind ``nbytes``: whole pages, at least one."""
    return max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)


def populate_pages(address: int, nbytes: int) -> None:
    """Have the pages of mapped memory backed now; ``address`` is that of a page.

    Raises:
        OutOfSpaceError: If the machine has no memory for it.
    """
    if _LIBC.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # before Linux 5.14: pages come at their first touch
            return
        raise _translate(OSError(code, os.strerror(code)), nbytes)


class Memory:
    """A memfd and this process's writable mapping of it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.size_fixed = False
        self.write_sealed = False
        try:
            self.fd = os.memfd_create("tensorbus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as exc:
            raise _translate(exc, nbytes) from exc
        try:
            os.ftruncate(self.fd, nbytes)
            self.map = self._mapped(nbytes)
        except OSError as exc:
            os.close(self.fd)
            raise _translate(exc, nbytes) from exc

    def prefault(self) -> None:
        """Have every page backed now. Blocks for about 0.7 s per GiB of new memory, without the interpreter's lock.

        Raises:
            OutOfSpaceError: If the machine has no memory for it.
        """
        populate_pages(np.frombuffer(self.map, dtype=np.uint8).ctypes.data, self.nbytes)

    def shrink(self, nbytes: int) -> None:
        """Give the end back to the machine and keep the warm beginning. Only before the size is fixed."""
        self.map.close()
        os.ftruncate(self.fd, nbytes)
        self.map = self._mapped(nbytes)
        self.nbytes = nbytes

    def _mapped(self, nbytes: int) -> mmap.mmap:
        mapping = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED)
        if nbytes >= _HUGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without them; most have them switched off for shared memory
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def fix_size(self) -> None:
        """From now on nobody can change the size: a shrunk file would kill whoever touches the lost pages."""
        if not self.size_fixed:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self.size_fixed = True

    def seal(self) -> None:
        """From now on no new writable shared mapping, and no write, can be made by anyone; old mappings stay."""
        if not self.write_sealed:
            self.fix_size()
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL)
            self.write_sealed = True

    def reopen(self, *, writable: bool) -> int:
        """A new descriptor of the same memory, with an access mode of its own."""
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            return os.open(f"/proc/self/fd/{self.fd}", mode | os.O_CLOEXEC)
        except OSError as exc:
            raise _translate(exc, 0) from exc

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last view of it."""
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # somebody reads it still; it is unmapped with the last view
            self.map.close()


def new_pin() -> tuple[int, int]:
    """A pipe whose read end hangs up once every copy of its write end is closed, in whatever process."""
    try:
        return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise _translate(exc, 0) from exc


def _translate(exc: OSError, nbytes: int) -> TensorbusError:
    if exc.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
        return OutOfSpaceError(f"the machine has no memory for a segment of {nbytes} bytes", asked_bytes=nbytes)
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        return OutOfSpaceError("no descriptors left; raise the limit of open files (ulimit -n)", asked_bytes=nbytes)
    return UnavailableError(f"cannot make a segment of {nbytes} bytes: {exc.strerror}")
