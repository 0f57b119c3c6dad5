"""Our names for element types: one table, and what torch, numpy and safetensors call each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tensorbus.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: Our name; it enters artifact ids and never changes.
        itemsize: Bytes per element, little-endian.
        torch: Attribute of the torch module. An older torch may lack it.
        numpy: Name of the numpy dtype, or ``None`` where numpy has none.
        safetensors: Name in a safetensors header, or ``None`` where the format has none.
        aliases: Other accepted spellings; none that means different widths to torch and numpy (``float``, ``int``).
        packed: Elements of the format's own count that one of ours holds (safetensors counts F4 one by one).
    """

    name: str
    itemsize: int
    torch: str
    numpy: str | None
    safetensors: str | None
    aliases: tuple[str, ...] = ()
    packed: int = 1

    def __str__(self) -> str:
        return self.name


DTYPES: Final[tuple[DType, ...]] = (
    DType("f64", 8, "float64", "float64", "F64", ("<f8",)),
    DType("f32", 4, "float32", "float32", "F32", ("<f4",)),
    DType("f16", 2, "float16", "float16", "F16", ("<f2",)),
    DType("bf16", 2, "bfloat16", None, "BF16"),
    DType("f8_e4m3fn", 1, "float8_e4m3fn", None, "F8_E4M3", ("fp8_e4m3", "f8_e4m3")),
    DType("f8_e5m2", 1, "float8_e5m2", None, "F8_E5M2", ("fp8_e5m2",)),
    DType("f8_e4m3fnuz", 1, "float8_e4m3fnuz", None, "F8_E4M3FNUZ"),
    DType("f8_e5m2fnuz", 1, "float8_e5m2fnuz", None, "F8_E5M2FNUZ"),
    DType("f8_e8m0fnu", 1, "float8_e8m0fnu", None, "F8_E8M0"),
    DType("f4_e2m1fn_x2", 1, "float4_e2m1fn_x2", None, "F4", packed=2),
    DType("i8", 1, "int8", "int8", "I8", ("|i1",)),
    DType("i16", 2, "int16", "int16", "I16", ("<i2",)),
    DType("i32", 4, "int32", "int32", "I32", ("<i4",)),
    DType("i64", 8, "int64", "int64", "I64", ("<i8",)),
    DType("u8", 1, "uint8", "uint8", "U8", ("|u1",)),
    DType("u16", 2, "uint16", "uint16", "U16", ("<u2",)),
    DType("u32", 4, "uint32", "uint32", "U32", ("<u4",)),
    DType("u64", 8, "uint64", "uint64", "U64", ("<u8",)),
    DType("bool", 1, "bool", "bool", "BOOL", ("|b1",)),
    DType("c32", 4, "complex32", None, None),
    DType("c64", 8, "complex64", "complex64", "C64", ("<c8",)),
    DType("c128", 16, "complex128", "complex128", None, ("<c16",)),
)

_SUB_BYTE: Final = "torch has no copy of it; store its bytes with .view(torch.uint8)"
_QUANTISED: Final = "its scale and zero point lie outside the bytes; store int_repr(), q_scale() and q_zero_point()"
_BITS: Final = "opaque bits without a meaning of their own; store them with .view(torch.uint8)"
REFUSED: Final[dict[str, str]] = {
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), _SUB_BYTE),
    **dict.fromkeys(("qint8", "quint8", "qint32", "quint4x2", "quint2x4"), _QUANTISED),
    **dict.fromkeys(("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"), _BITS),
}
"""torch's names of the types that are not taken -> why, and what to do."""


def _spellings(known: DType) -> tuple[str, ...]:
    names = (known.name, known.torch, known.numpy, known.safetensors, *known.aliases)
    return tuple(name for name in names if name is not None)


_BY_NAME: Final[dict[str, DType]] = {known.name: known for known in DTYPES}
_BY_SPELLING: Final[dict[str, DType]] = {name: known for known in DTYPES for name in _spellings(known)}


def dtype(spelling: object) -> DType:
    """The element type of that name.

    Args:
        spelling: Our name (``"bf16"``), torch's (``torch.bfloat16`` or ``"torch.bfloat16"``), numpy's (``"float32"``,
            ``numpy.dtype("float32")``) or that of safetensors (``"BF16"``).

    Raises:
        InvalidArgumentError: If there is none; it says why a type is refused, else which exist.
    """
    text = spelling if type(spelling) is str and spelling in _BY_SPELLING else _text(spelling)
    found = _BY_SPELLING.get(text)
    if found is not None:
        return found
    if text in REFUSED:
        raise InvalidArgumentError(f"dtype {text} is not taken: {REFUSED[text]}", dtype=text)
    raise InvalidArgumentError(
        f"there is no dtype {text[:40]!r}; there are {', '.join(known.name for known in DTYPES)}", dtype=text[:40]
    )


def is_dtype_name(text: str) -> bool:
    """Whether it is one of our own names; aliases are not."""
    return text in _BY_NAME


def itemsize(name: str) -> int:
    """Bytes per element of the type with that name of ours."""
    return _BY_NAME[name].itemsize


def _text(spelling: object) -> str:
    if isinstance(spelling, DType):
        return spelling.name
    if isinstance(spelling, type):  # the class numpy.float32, say
        return spelling.__name__
    return str(spelling).removeprefix("torch.")
