"""How things look: tables, sizes, ages and names for people, JSON lines for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Final

from tensorbus.clock import NS_PER_S

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_ID_SHOWN: Final = 20


def emit_json(value: object) -> None:
    """Print one JSON value on one line, at once."""
    print(json.dumps(plain(value)), flush=True)


def plain(value: object) -> object:
    """Records, mappings and sequences as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def size(nbytes: int) -> str:
    """A number of bytes for people: ``256.6 MiB``."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def age(then_ns: int, *, now_ns: int) -> str:
    """How long ago, in one unit: ``12s``, ``3m``, ``7h``, ``4d``."""
    seconds = max(0, now_ns - then_ns) // NS_PER_S
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def stamp(time_ns: int) -> str:
    """A stream time as UTC, to the millisecond."""
    moment = datetime.fromtimestamp(time_ns // NS_PER_S, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{time_ns % NS_PER_S // 1_000_000:03d}Z"


def name(text: str) -> str:
    """A user's text so that it stays on its line and shows what it holds: quoted when it is not plainly printable."""
    if text and text.isprintable() and text == text.strip() and text[0] != '"':
        return text
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character == " " or character.isprintable():
        return character
    return json.dumps(character)[1:-1]


def short_id(text: str) -> str:
    """The beginning of a system id, enough to tell artifacts apart by eye; a given id whole."""
    if text[:4] in ("tb1:", "tbr:", "tbv:") and len(text) > _ID_SHOWN:
        return text[:_ID_SHOWN] + "…"
    return name(text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> None:
    """Print aligned columns.

    Args:
        right: Headers of the columns that are aligned to the right.
    """
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    to_right = [title in set(right) for title in header]
    for line in lines:
        cells = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, to_right, strict=True)
        )
        print("  ".join(cells).rstrip())


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line, values aligned."""
    listed = list(pairs)
    width = max((len(title) for title, _ in listed), default=0)
    for title, value in listed:
        print(f"{title.ljust(width)}  {value}".rstrip())
