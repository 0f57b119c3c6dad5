"""The table of an artifact's tensors, its canonical bytes and the content id they give. See ``docs/spec/ids.md``."""

from __future__ import annotations

import json
import math
import re
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Final

from blake3 import blake3

from tensorbus.errors import CorruptError, InvalidArgumentError, NotFoundError
from tensorbus.ids import CONTENT_PREFIX, ArtifactId, check_tensor_name
from tensorbus.model._dtypes import DTYPES, dtype, is_dtype_name, itemsize

MANIFEST_MAGIC: Final = b"TBM1"
MANIFEST_VERSION: Final = 1
NDIM_MAX: Final = 64
NBYTES_MAX: Final = 2**63 - 1
DIGEST_BYTES: Final = 32
EMPTY_DIGEST: Final = blake3(b"").hexdigest()

_is_digest = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}").fullmatch
_DTYPE_HEADS = {known.name: bytes([len(known.name)]) + known.name.encode("ascii") for known in DTYPES}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an artifact: what it is, not where it lies.

    Attributes:
        name: Its name within the artifact; empty for a bare tensor.
        dtype: Our name of the element type.
        shape: Sizes of the dimensions, outermost first; ``()`` is one element.
        digest: BLAKE3-256 of its logical C-order little-endian bytes in lower-case hex, or ``None`` until known.

    Raises:
        InvalidArgumentError: If any of it cannot be.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str | None = None

    def __post_init__(self) -> None:
        check_tensor_name(self.name)
        # A caller's alias becomes our name, so that no alias gets into an id.
        object.__setattr__(self, "dtype", dtype(self.dtype).name)
        _check_shape(self)
        if self.digest is not None:
            _check_digest(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in C order."""
        return itemsize(self.dtype) * math.prod(self.shape)


_name_of = attrgetter("name")


def _check_shape(spec: TensorSpec) -> None:
    shape = spec.shape
    if type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
        raise InvalidArgumentError(
            f"tensor {spec.name[:80]!r}: a shape is a tuple of whole numbers from 0 on, not {str(shape)[:80]}"
        )
    # The product without the zeros bounds every dimension, also where a zero hides it from nbytes.
    extent = itemsize(spec.dtype) * math.prod(size or 1 for size in shape)
    if len(shape) > NDIM_MAX or extent > NBYTES_MAX:
        raise InvalidArgumentError(
            f"tensor {spec.name[:80]!r} has {len(shape)} dimensions and {extent} bytes;"
            f" the most are {NDIM_MAX} and 2**63 - 1"
        )


def _check_digest(spec: TensorSpec) -> None:
    digest: object = spec.digest
    if not isinstance(digest, str) or _is_digest(digest) is None:
        raise InvalidArgumentError(f"tensor {spec.name[:80]!r}: a digest is 64 lower-case hexadecimal digits")
    if 0 in spec.shape and digest != EMPTY_DIGEST:
        raise InvalidArgumentError(f"tensor {spec.name[:80]!r} has no bytes; its digest can only be that of none")


@dataclass(frozen=True)
class Manifest:
    """The tensors of an artifact, in the order of the bytes of their names; at least one, no name twice.

    Raises:
        InvalidArgumentError: If it is empty or a name comes twice.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        # str compares by code point, which is the order of the UTF-8 bytes.
        ordered = tuple(sorted(self.tensors, key=_name_of))
        if not ordered:
            raise InvalidArgumentError("an artifact has at least one tensor; there is none")
        for one, other in pairwise(ordered):
            if one.name == other.name:
                raise InvalidArgumentError(f"two tensors have the name {one.name[:80]!r}")
        object.__setattr__(self, "tensors", ordered)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return self._place(name) is not None

    @cached_property
    def nbytes(self) -> int:
        """Sum of the tensors' sizes, each counted once per name."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.tensors)

    @property
    def digested(self) -> bool:
        """Whether every tensor's digest is known."""
        return all(spec.digest is not None for spec in self.tensors)

    def index(self, name: str) -> int:
        """The tensor's place in the order.

        Raises:
            NotFoundError: If there is none of that name.
        """
        place = self._place(name)
        if place is None:
            some = ", ".join(repr(spec.name[:40]) for spec in self.tensors[:5])
            raise NotFoundError(
                f"there is no tensor {name!r:.80}; there are {len(self.tensors)}: {some}"
                f"{', …' if len(self.tensors) > 5 else ''}",
                tensor=str(name)[:1024],
            )
        return place

    def find(self, name: str) -> TensorSpec:
        """The tensor of that name.

        Raises:
            NotFoundError: If there is none.
        """
        return self.tensors[self.index(name)]

    def _place(self, name: object) -> int | None:
        if not isinstance(name, str):
            return None
        place = bisect_left(self.tensors, name, key=_name_of)
        return place if place < len(self.tensors) and self.tensors[place].name == name else None

    def with_digests(self, digests: Iterable[bytes | str]) -> Manifest:
        """The same with digests (raw or hex) in this order."""
        texts = (digest if isinstance(digest, str) else digest.hex() for digest in digests)
        pairs = zip(self.tensors, texts, strict=True)
        return Manifest(tuple(replace(spec, digest=digest) for spec, digest in pairs))

    def canonical(self) -> bytes:
        """The bytes that the content id is the digest of.

        Raises:
            InvalidArgumentError: If a tensor's digest is not known yet.
        """
        out = bytearray(MANIFEST_MAGIC + len(self.tensors).to_bytes(8, "little"))
        for spec in self.tensors:
            if spec.digest is None:
                raise InvalidArgumentError(f"the digest of tensor {spec.name[:80]!r} is not known yet")
            name, ndim = spec.name.encode("utf-8"), len(spec.shape)
            out += len(name).to_bytes(4, "little") + name + _DTYPE_HEADS[spec.dtype]
            out += struct.pack(f"<B{ndim}Q", ndim, *spec.shape) + bytes.fromhex(spec.digest)
        return bytes(out)

    def content_id(self) -> ArtifactId:
        """``tb1:`` and the BLAKE3-256 of :meth:`canonical` in lower-case hex.

        Raises:
            InvalidArgumentError: If a tensor's digest is not known yet.
        """
        return ArtifactId(CONTENT_PREFIX + blake3(self.canonical()).hexdigest())

    def to_json(self) -> str:
        """Compact JSON: ``{"v":1,"tensors":[[name,dtype,shape,digest],…]}``."""
        rows = [(spec.name, spec.dtype, spec.shape, spec.digest) for spec in self.tensors]
        return json.dumps({"v": MANIFEST_VERSION, "tensors": rows}, ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def from_json(data: str | bytes | memoryview) -> Manifest:
        """What :meth:`to_json` wrote.

        Raises:
            CorruptError: If it is anything else.
        """
        rows = _rows(load_json(data, what="manifest"))
        try:
            tensors = tuple(map(_spec_of_row, rows))
            manifest = Manifest(tensors)
        except InvalidArgumentError as exc:
            raise CorruptError(f"the manifest is not valid: {exc}") from exc
        if manifest.tensors != tensors:
            raise CorruptError("the manifest is not valid: its tensors are not in the order of their names")
        return manifest


def load_json(data: str | bytes | memoryview, *, what: str) -> object:
    """The JSON value.

    Raises:
        CorruptError: If it is none.
    """
    try:
        return json.loads(bytes(data) if isinstance(data, memoryview) else data)
    except (ValueError, RecursionError) as exc:
        raise CorruptError(f"the {what} is not JSON: {exc}") from exc


def _rows(body: object) -> list[object]:
    if not isinstance(body, dict) or body.keys() != {"v", "tensors"}:
        raise CorruptError('the manifest is not valid: it is not {"v", "tensors"}')
    version, rows = body["v"], body["tensors"]
    if type(version) is not int or version != MANIFEST_VERSION or not isinstance(rows, list):
        raise CorruptError(f"the manifest is not valid: version {str(version)[:20]}, known is {MANIFEST_VERSION}")
    return rows


def _spec_of_row(row: object) -> TensorSpec:
    if not isinstance(row, list) or len(row) != 4:
        raise CorruptError(f"the manifest is not valid: {str(row)[:80]} is not [name, dtype, shape, digest]")
    name, kind, shape, digest = row
    if not isinstance(kind, str) or not is_dtype_name(kind) or not isinstance(shape, list):
        raise CorruptError(f"the manifest is not valid: dtype {str(kind)[:40]!r} and shape {str(shape)[:40]}")
    return TensorSpec(name, kind, tuple(shape), digest)
