"""Writes the pages under docs/ that are made from the code; ``--check`` only says whether they are up to date."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from tensorbus import events
from tensorbus.config import ENV_PREFIX, Settings
from tensorbus.events import (
    EVENT_TYPES,
    FACT_BYTES_MAX,
    PAGE_EVENT_TYPES,
    SCHEMA_VERSION,
    SHARD_FENCED,
    Aggregate,
    Subjects,
    aggregate,
    aggregate_of,
)

DOCS = Path(__file__).resolve().parents[1] / "docs"
MADE = "<!-- Made by `make docs` from {source}; change it there. -->\n"
ROLE = re.compile(r":\w+:`(?:~?[\w.]*\.)?(\w+)`")


def plain(text: str) -> str:
    """A docstring's text as Markdown."""
    return ROLE.sub(r"`\1`", text).replace("``", "`")


def summary(cls: type) -> str:
    return plain(inspect.cleandoc(cls.__doc__ or "").partition("\n\nAttributes:")[0])


def attributes(cls: type) -> dict[str, str]:
    """What the docstring's ``Attributes:`` section says about each field."""
    found: dict[str, str] = {}
    section = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    for line in section.splitlines():
        match = re.match(r"    (\w+): (.*)", line)
        if match:
            found[match[1]] = match[2]
        elif found and line.strip():
            found[next(reversed(found))] += " " + line.strip()
    return {name: plain(text) for name, text in found.items()}


def type_name(hint: Any) -> str:
    """A type as a reader of JSON wants it: ids by their name, records and choices by link."""
    if isinstance(hint, typing.NewType):
        return f"{hint.__name__} ({type_name(hint.__supertype__)})"
    if isinstance(hint, types.UnionType):
        return " or ".join("null" if arg is types.NoneType else type_name(arg) for arg in hint.__args__)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f'"{choice}"' for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if isinstance(hint, type) and (issubclass(hint, StrEnum) or dataclasses.is_dataclass(hint)):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return str(getattr(hint, "__name__", hint))


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [header, ("---",) * len(header), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join("| " + " | ".join(row) + " |\n" for row in cells)


def field_table(cls: type) -> str:
    hints, told = typing.get_type_hints(cls), attributes(cls)
    rows = [(f"`{name}`", type_name(hint), told.get(name, "")) for name, hint in hints.items() if name != "type"]
    return table(("field", "type", "meaning"), rows)


def about(cls: Any) -> tuple[Aggregate, str]:
    """The aggregate of such a fact, and the field that names it, found by asking with a sample.

    Of a fact about the whole cluster there is one aggregate, whose token stands where the field's name would.
    """
    sample = {field.name: f"<{field.name}>" for field in dataclasses.fields(cls) if field.name != "type"}
    found = aggregate_of(cls(**sample))
    for name, value in sample.items():
        named = {aggregate(found.kind, tenant, value) for tenant in ("", sample.get("tenant", ""))}
        if found in {*named, Aggregate(found.kind, value)}:
            return found, name
    if found.kind == "cluster":
        return found, found.token
    raise ValueError(f"no field of {cls.__name__} names its aggregate")


def parts(cls: type) -> Iterator[type]:
    """Records and choices that the type's fields use, each after what uses it."""
    for hint in typing.get_type_hints(cls).values():
        for arg in (hint, *typing.get_args(hint)):
            if isinstance(arg, type) and issubclass(arg, StrEnum):
                yield arg
            elif isinstance(arg, type) and dataclasses.is_dataclass(arg):
                yield arg
                yield from parts(arg)


def event_section(cls: type) -> str:
    found, name = about(cls)
    token = name if name == found.token else f"<{name}>"
    place = Subjects().fence(Aggregate(found.kind, token)).removesuffix(".*")
    written = f"of one author: `{place}.<author>`"
    if found.contested:
        written = f"contested: compared and appended on `{place}.*`"
    elif found.fenced:
        written = f"only by who has the role: `{place}.<author>`, appended on `tb.ev.role.store.*` under its token"
    elif found.kind in SHARD_FENCED:
        written = f"only by the shard's home: `{place}.<author>`, appended on `tb.lease.<{name}>.*` under its token"
    return f"## {cls.__name__}\n\n{summary(cls)}\n\nKind `{found.kind}`, {written}\n\n{field_table(cls)}\n"


def part_section(cls: type) -> str:
    head = f"### {cls.__name__}\n\n{summary(cls)}\n\n"
    if issubclass(cls, StrEnum):
        return head + "One of " + ", ".join(f"`{choice}`" for choice in cls) + ".\n\n"
    return head + field_table(cls) + "\n"


def events_page() -> str:
    rows = []
    for cls in (*EVENT_TYPES, *PAGE_EVENT_TYPES):
        found, _ = about(cls)
        rows.append((f"[{cls.__name__}](#{cls.__name__.lower()})", f"`{found.kind}`", summary(cls).replace("\n", " ")))
    used = dict.fromkeys(part for cls in (*EVENT_TYPES, *PAGE_EVENT_TYPES) for part in parts(cls))
    told = plain(inspect.cleandoc(sys.modules[events.Tier.__module__].__doc__ or ""))
    intro = (
        f"# Facts\n\n{MADE.format(source='`tensorbus/events`')}\nSchema version {SCHEMA_VERSION}. {told}\n\n"
        f"A fact is JSON of at most {FACT_BYTES_MAX // 1024} KiB on `tb.ev.<kind>.<id>.<author>`; `<id>` is a hash of\n"
        "tenant and name ([ids](spec/ids.md)). A *contested* kind has several authors: each append names the last\n"
        "sequence that its author knew, and only one of two wins.\n\n"
    )
    body = "".join(event_section(cls) for cls in EVENT_TYPES)
    body += "# Page facts\n\nThey are in the stream `TB_PAGES`; their `<id>` is the number of the shard.\n\n"
    body += "".join(event_section(cls) for cls in PAGE_EVENT_TYPES)
    shared = "".join(part_section(part) for part in used)
    return (
        f"{intro}{table(('fact', 'kind', 'what happened'), rows)}\n{body}## Parts of facts\n\n{shared}".rstrip() + "\n"
    )


def settings_page() -> str:
    rows = []
    for name, field in Settings.model_fields.items():
        computed = field.default_factory is not None
        default = "" if computed or field.default is None else f"`{field.default}`"
        rows.append((f"`{name}`", f"`{ENV_PREFIX}{name.upper()}`", default, field.description or ""))
    return (
        f"# Settings\n\n{MADE.format(source='`tensorbus/config.py`')}\n"
        "A flag wins over the environment, that over the file, that over the default; `tensorbus config` shows the\n"
        "values in force and where each came from. The file is TOML: `$TENSORBUS_CONFIG`, or `config.toml` in the\n"
        "home.\n\n" + table(("name", "environment", "default", "meaning"), rows)
    )


def pages() -> dict[Path, str]:
    """Path and text of every generated page."""
    return {DOCS / "events.md": events_page(), DOCS / "settings.md": settings_page()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
        print(f"{'out of date' if check else 'written'}: {path.relative_to(DOCS.parent)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
