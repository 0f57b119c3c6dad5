"""Where the tensors lie in a replica's segment."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.model._manifest import NBYTES_MAX, Manifest, load_json

ALIGN: Final = 64
"""Bytes; a cache line, and enough for every element type."""
PAGE_ALIGN: Final = 4096
PAGE_ALIGN_FROM: Final = 64 * 1024
"""Tensors of that many bytes begin on a page, so that each can be mapped or registered by itself."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets within a segment.

    Attributes:
        offsets: Bytes from the segment's start, in the manifest's order; tied tensors have the same.
        nbytes: Size of the segment.
    """

    offsets: tuple[int, ...]
    nbytes: int

    def to_json(self) -> str:
        """Compact JSON: ``{"nbytes":…,"offsets":[…]}``."""
        return json.dumps(self.to_value(), separators=(",", ":"))

    def to_value(self) -> dict[str, object]:
        """The same before it is text, to be a part of other JSON."""
        return {"nbytes": self.nbytes, "offsets": self.offsets}

    @staticmethod
    def from_json(data: str | bytes | memoryview, manifest: Manifest) -> Layout:
        """What :meth:`to_json` wrote for an artifact of that manifest.

        Raises:
            CorruptError: If it is anything else, or does not fit the manifest.
        """
        return Layout.from_value(load_json(data, what="layout"), manifest)

    @staticmethod
    def from_value(body: object, manifest: Manifest) -> Layout:
        """The same of what :meth:`to_value` gave, read from JSON.

        Raises:
            CorruptError: If it is no layout, or does not fit the manifest.
        """
        if not isinstance(body, dict) or body.keys() != {"nbytes", "offsets"} or not isinstance(body["offsets"], list):
            raise CorruptError('the layout is not valid: it is not {"nbytes", "offsets"}')
        nbytes, offsets = body["nbytes"], tuple(body["offsets"])
        if any(type(number) is not int or not 0 <= number <= NBYTES_MAX for number in (nbytes, *offsets)):
            raise CorruptError("the layout is not valid: an offset or size is not a whole number from 0 on")
        layout = Layout(offsets, nbytes)
        layout.check(manifest)
        return layout

    def check(self, manifest: Manifest) -> None:
        """See that every tensor lies inside, is aligned, and overlaps none but its own equals.

        Raises:
            CorruptError: If not.
        """
        if len(self.offsets) != len(manifest):
            raise CorruptError(f"the layout has {len(self.offsets)} tensors, the manifest {len(manifest)}")
        placed = sorted((offset, spec.nbytes) for offset, spec in zip(self.offsets, manifest, strict=True))
        before = (0, 0)
        for here in placed:
            offset, size = here
            if offset % ALIGN or offset + size > self.nbytes:
                raise CorruptError(f"the layout is not valid: {size} bytes at {offset} of {self.nbytes}")
            if size == 0:
                continue
            if here != before and offset < sum(before):
                raise CorruptError(f"the layout is not valid: tensors overlap at {offset}")
            before = here


def plan_layout(manifest: Manifest, aliases: Sequence[Hashable | None] | None = None) -> Layout:
    """Place the tensors one after the other: 64-byte aligned, those of 64 KiB or more on a page of their own start.

    Args:
        manifest: The tensors.
        aliases: In the manifest's order: equal keys say that the tensors are the same memory and are stored once;
            ``None`` ties with nothing.

    Raises:
        InvalidArgumentError: If there is not one alias per tensor, or tied tensors differ in size.
    """
    keys = (None,) * len(manifest) if aliases is None else tuple(aliases)
    if len(keys) != len(manifest):
        raise InvalidArgumentError(f"{len(keys)} alias keys for {len(manifest)} tensors")
    seen: dict[Hashable, tuple[int, int]] = {}
    offsets: list[int] = []
    end = 0
    for spec, key in zip(manifest, keys, strict=True):
        size = spec.nbytes
        if key is not None and key in seen:
            offset, tied = seen[key]
            if tied != size:
                raise InvalidArgumentError(f"tensor {spec.name[:80]!r} of {size} bytes is tied to one of {tied}")
        else:
            offset = _aligned(end, PAGE_ALIGN if size >= PAGE_ALIGN_FROM else ALIGN)
            end = offset + size if size else end
            if key is not None:
                seen[key] = (offset, size)
        offsets.append(offset)
    return Layout(tuple(offsets), max(end, max(offsets)))


def _aligned(offset: int, to: int) -> int:
    return -(-offset // to) * to
