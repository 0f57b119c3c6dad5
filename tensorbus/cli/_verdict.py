"""What a check of `tensorbus doctor` says."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


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


def command(*words: str | Path) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(str(word) for word in words)
