"""Errors that a worker answers, said so that the caller knows what to do."""

from __future__ import annotations

from tensorbus.errors import NotFoundError
from tensorbus.ids import VIEW_PREFIX


def explained(exc: NotFoundError, text: str) -> NotFoundError:
    """The same error; of an id that only a definition makes known it says so."""
    if not text.startswith(VIEW_PREFIX):
        return exc
    return NotFoundError(
        f"{text[:80]} is the id of a view, and nobody has defined it: whoever has its base calls "
        "base.view(…).define(); a pickled handle needs no definition",
        **exc.details,
    )
