"""What `tensorbus up` prints while it runs."""

from __future__ import annotations

import sys

from tensorbus.cli._output import emit_json


class Say:
    """Lines for people, or one JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json

    def event(self, kind: str, text: str, **data: object) -> None:
        """Something that goes as planned."""
        if self._json:
            emit_json({"event": kind, **data})
        elif text:
            print(text, flush=True)

    def trouble(self, kind: str, text: str, **data: object) -> None:
        """Something that a person should look at."""
        if self._json:
            emit_json({"event": kind, "message": text, **data})
        else:
            print(f"tensorbus up: {text}", file=sys.stderr, flush=True)
