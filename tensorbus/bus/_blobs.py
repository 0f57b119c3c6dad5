"""Bodies too large for a fact: compressed chunks in the log stream, named by the digest of the whole."""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from blake3 import blake3

from tensorbus.bus._port import Bus
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError
from tensorbus.events import MSG_ID, BlobRef
from tensorbus.ids import WorkerId

CHUNK_BYTES: Final = 512 * 1024
_STEP_BYTES: Final = 256 * 1024
"""How much is (de)compressed before others get their turn on the loop: a few milliseconds' worth."""


async def put_blob(bus: Bus, data: bytes, *, author: WorkerId, deadline: Deadline) -> BlobRef:
    """Store a body, to be named by a fact that follows. A repetition within the dedup window stores nothing new.

    Raises:
        OutOfSpaceError, UnavailableError, DeadlineExceededError, DeniedError: As for a publish.
    """
    digest = blake3(data).hexdigest()
    packed = await _compress(data)
    chunks = [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]
    for n, chunk in enumerate(chunks):
        headers = {MSG_ID: f"blob-{digest}-{n}-{author}"}
        await bus.publish(bus.subjects.blob(digest, n, author), chunk, headers=headers, deadline=deadline)
    return BlobRef(digest=digest, nbytes=len(data), chunks=len(chunks), author=author)


async def get_blob(bus: Bus, ref: BlobRef, *, deadline: Deadline) -> bytes:
    """Fetch and verify a body.

    Raises:
        NotFoundError: If a chunk is not in the log; CorruptError: If the bytes are not those of the digest.
    """
    unpack = zlib.decompressobj()
    out = bytearray()
    for n in range(ref.chunks):
        message = await bus.last_on(bus.subjects.blob(ref.digest, n, ref.author), deadline=deadline)
        if message is None:
            raise NotFoundError(f"chunk {n} of {ref.chunks} of blob {ref.digest} is not in the log", digest=ref.digest)
        await _decompress(unpack, message.data, out, ref)
    if len(out) != ref.nbytes or blake3(out).hexdigest() != ref.digest:
        raise CorruptError(f"blob {ref.digest} does not have the bytes of its digest", digest=ref.digest)
    return bytes(out)


async def _compress(data: bytes) -> bytes:
    pack, out = zlib.compressobj(level=1), bytearray()
    for at in range(0, len(data), _STEP_BYTES):
        out += pack.compress(data[at : at + _STEP_BYTES])
        await asyncio.sleep(0)
    return bytes(out + pack.flush())


async def _decompress(unpack: zlib._Decompress, packed: bytes, out: bytearray, ref: BlobRef) -> None:
    """Add a chunk's bytes to ``out``, never more than the blob says it has: a small chunk can unpack to gigabytes."""
    while packed:
        room = ref.nbytes + 1 - len(out)
        if room <= 0:
            raise CorruptError(f"blob {ref.digest} is longer than the {ref.nbytes} bytes it says", digest=ref.digest)
        try:
            out += unpack.decompress(packed, min(room, _STEP_BYTES))
        except zlib.error as exc:
            raise CorruptError(f"blob {ref.digest} cannot be unpacked: {exc}", digest=ref.digest) from exc
        packed = unpack.unconsumed_tail
        await asyncio.sleep(0)
