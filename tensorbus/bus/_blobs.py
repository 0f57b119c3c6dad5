"""Bodies too large for a fact: compressed chunks in a stream, named by the digest of the whole."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Final

from blake3 import blake3

from tensorbus.bus._port import Stream
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError
from tensorbus.events import MSG_ID, BlobRef
from tensorbus.ids import WorkerId

CHUNK_BYTES: Final = 512 * 1024
_STEP_BYTES: Final = 256 * 1024
"""How much is (de)compressed before others get their turn on the loop: a few milliseconds' worth."""

Body = bytes | Iterable[bytes] | AsyncIterable[bytes]


async def put_blob(stream: Stream, data: Body, *, author: WorkerId, deadline: Deadline) -> BlobRef:
    """Store a body, to be named by a fact that follows. A repetition within the dedup window stores nothing new.

    Args:
        data: The body, or its pieces in order. Of pieces, only the compressed form is ever in memory as a whole.

    Raises:
        OutOfSpaceError, UnavailableError, DeadlineExceededError, DeniedError: As for a publish.
    """
    digest, nbytes, chunks = await _pack(data)
    for n, chunk in enumerate(chunks):
        headers = {MSG_ID: f"blob-{digest}-{n}-{author}"}
        subject = stream.subjects.blob(digest, n, author, stream=stream.name)
        await stream.publish(subject, chunk, headers=headers, deadline=deadline)
    return BlobRef(digest=digest, nbytes=nbytes, chunks=len(chunks), author=author)


async def get_blob(stream: Stream, ref: BlobRef, *, deadline: Deadline) -> bytes:
    """Fetch and verify a body.

    Raises:
        NotFoundError: If a chunk is not in the log; CorruptError: If the bytes are not those of the digest.
    """
    out = bytearray()
    async for piece in read_blob(stream, ref, deadline=deadline):
        out += piece
    return bytes(out)


async def read_blob(stream: Stream, ref: BlobRef, *, deadline: Deadline) -> AsyncIterator[bytes]:
    """Fetch a body piece by piece. It is verified at its end: what came before may not be relied on until then.

    Raises:
        NotFoundError: If a chunk is not in the log; CorruptError: If the bytes are not those of the digest.
    """
    unpack, digest, nbytes = zlib.decompressobj(), blake3(), 0
    for n in range(ref.chunks):
        subject = stream.subjects.blob(ref.digest, n, ref.author, stream=stream.name)
        message = await stream.last_on(subject, deadline=deadline)
        if message is None:
            raise NotFoundError(f"chunk {n} of {ref.chunks} of blob {ref.digest} is not in the log", digest=ref.digest)
        packed = message.data
        while packed:
            piece = _unpack(unpack, packed, room=ref.nbytes - nbytes, ref=ref)
            packed = unpack.unconsumed_tail
            digest.update(piece)
            nbytes += len(piece)
            if piece:
                yield piece
            await asyncio.sleep(0)
    if nbytes != ref.nbytes or digest.hexdigest() != ref.digest:
        raise CorruptError(f"blob {ref.digest} does not have the bytes of its digest", digest=ref.digest)


async def _pack(data: Body) -> tuple[str, int, list[bytes]]:
    """Digest and size of a body, and its compressed form in chunks."""
    pack, digest, nbytes = zlib.compressobj(level=1), blake3(), 0
    chunks: list[bytes] = []
    out = bytearray()
    async for step in _steps(data):
        digest.update(step)
        nbytes += len(step)
        out += pack.compress(step)
        while len(out) > CHUNK_BYTES:
            chunks.append(bytes(out[:CHUNK_BYTES]))
            del out[:CHUNK_BYTES]
        await asyncio.sleep(0)
    out += pack.flush()
    chunks += [bytes(out[at : at + CHUNK_BYTES]) for at in range(0, len(out), CHUNK_BYTES)]
    return digest.hexdigest(), nbytes, chunks


async def _steps(data: Body) -> AsyncIterator[memoryview]:
    if isinstance(data, AsyncIterable):
        async for piece in data:
            for step in _cut(piece):
                yield step
        return
    for piece in (data,) if isinstance(data, bytes) else data:
        for step in _cut(piece):
            yield step


def _cut(piece: bytes) -> Iterable[memoryview]:
    view = memoryview(piece)
    return (view[at : at + _STEP_BYTES] for at in range(0, len(view), _STEP_BYTES))


def _unpack(unpack: zlib._Decompress, packed: bytes, *, room: int, ref: BlobRef) -> bytes:
    """The next bytes of a blob, never more than it says it has: a small chunk can unpack to gigabytes."""
    try:
        piece = unpack.decompress(packed, min(room + 1, _STEP_BYTES))
    except zlib.error as exc:
        raise CorruptError(f"blob {ref.digest} cannot be unpacked: {exc}", digest=ref.digest) from exc
    if len(piece) > room:
        raise CorruptError(f"blob {ref.digest} is longer than the {ref.nbytes} bytes it says", digest=ref.digest)
    return piece
