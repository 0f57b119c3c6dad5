"""Blocks: the pieces in which an artifact's bytes travel, cut the same way by whoever sends and whoever receives.

A block is up to :data:`BLOCK_BYTES` in up to :data:`SPANS_MAX` spans, and has a checksum: XXH3-64 of its bytes, one
span after the other. Pure: bytes and numbers, no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import xxhash

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport._segments import page_round

BLOCK_BYTES: Final = 4 << 20
SPANS_MAX: Final = 512

Span: TypeAlias = tuple[int, int]
"""An offset within a source, and a number of bytes from there."""
Block: TypeAlias = tuple[Span, ...]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The spans in order of their offsets, each once, those that touch joined, the empty ones left out."""
    found: list[Span] = []
    for offset, nbytes in sorted(set(spans)):
        if not nbytes:
            continue
        if found and offset <= sum(found[-1]):
            start, before = found[-1]
            found[-1] = (start, max(before, offset + nbytes - start))
        else:
            found.append((offset, nbytes))
    return found


def cut(spans: Iterable[Span]) -> list[Block]:
    """The spans, in the order given, as blocks: each as full as it can be. Empty spans are left out."""
    blocks: list[Block] = []
    block: list[Span] = []
    room = BLOCK_BYTES
    for offset, nbytes in spans:
        while nbytes:
            piece = min(nbytes, room)
            block.append((offset, piece))
            offset, nbytes, room = offset + piece, nbytes - piece, room - piece
            if not room or len(block) == SPANS_MAX:
                blocks.append(tuple(block))
                block, room = [], BLOCK_BYTES
    if block:
        blocks.append(tuple(block))
    return blocks


def block_bytes(block: Block) -> int:
    """How many bytes a block has."""
    return sum(nbytes for _, nbytes in block)


def checksum(views: Sequence[memoryview]) -> int:
    """XXH3-64 of the views' bytes, one after the other. Lets other threads run while it reads large ones."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


class BlockTable:
    """A source's blocks, and the checksum of each as far as it is known.

    What is learned stays: bytes that change afterwards no longer fit, wherever they are read. Safe to use from several
    threads.

    Args:
        spans: Where the source's bytes lie; the rest of its memory never travels as a block.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.blocks = cut(merged(spans))
        self.nbytes = sum(block_bytes(block) for block in self.blocks)
        self._sums = array("Q", bytes(8 * len(self.blocks)))
        self._known = bytearray(len(self.blocks))

    def __len__(self) -> int:
        return len(self.blocks)

    def sum_of(self, index: int) -> int | None:
        return self._sums[index] if self._known[index] else None

    def learn(self, index: int, checksum: int) -> None:
        """Note the checksum of a block whose bytes are known to be right."""
        self._sums[index] = checksum
        self._known[index] = True

    def changed(self, parts: Sequence[memoryview]) -> list[int]:
        """The blocks whose bytes are not what they were when their checksum was learned."""
        found: list[int] = []
        for index, block in enumerate(self.blocks):
            known = self.sum_of(index)
            if known is not None:
                views = [view for offset, nbytes in block for view in pieces(parts, offset, nbytes)]
                if checksum(views) != known:
                    found.append(index)
        return found


def pieces(parts: Sequence[memoryview], offset: int, nbytes: int) -> list[memoryview]:
    """The bytes of a span over parts that are laid end to end, each rounded up to whole pages.

    What lies between the end of a part and its last page's end is given as zeros.

    Raises:
        InvalidArgumentError: If the span is not within the parts.
    """
    found: list[memoryview] = []
    start, end = 0, offset + nbytes
    for index, part in enumerate(parts):
        size = len(part) if index == len(parts) - 1 else page_round(len(part))
        low, high = max(offset, start), min(end, start + size)
        if low < high:
            data = part[low - start : high - start]
            found.append(data)
            if len(data) < high - low:
                found.append(memoryview(bytes(high - low - len(data))))
        start += size
    if offset < 0 or nbytes < 0 or end > start:
        raise InvalidArgumentError(f"range {offset}+{nbytes} is not within {start} bytes")
    return found
