"""What a check of `tensorbus doctor` or `tensorbus bus check` says."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from tensorbus.cli._output import emit_json


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    Attributes:
        advice: What to do, empty if nothing.
    """

    check: str
    state: State
    found: str
    advice: str = ""


_MARKS: Final = {State.OK: "ok   ", State.WARNING: "note ", State.WRONG: "WRONG"}


def show(verdict: Verdict, *, as_json: bool) -> None:
    """Print it, for people or as JSON."""
    if as_json:
        emit_json(verdict)
        return
    print(f"{_MARKS[verdict.state]}  {verdict.check:10}  {verdict.found}")
    if verdict.advice:
        print(f"{'':19}-> {verdict.advice}")


def command(*words: str | Path) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(str(word) for word in words)
