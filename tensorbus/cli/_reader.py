"""Whether anybody still reads what is printed."""

from __future__ import annotations

import asyncio
import errno
import select
import sys
from collections.abc import Coroutine
from typing import Any, Final

LOOK_S: Final = 0.3


async def while_read(work: Coroutine[Any, Any, None]) -> None:
    """Do work that may print nothing for long, but not beyond the moment when the reader of standard output has gone.

    Raises:
        BrokenPipeError: If it has gone.
    """
    main, watch = asyncio.create_task(work, name="printing"), asyncio.create_task(_gone(), name="reader")
    try:
        await asyncio.wait({main, watch}, return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            await main
        else:
            raise BrokenPipeError(errno.EPIPE, "whoever read the output has gone")
    finally:
        for task in (main, watch):
            task.cancel()
        await asyncio.wait({main, watch})


async def _gone() -> None:
    """Return when the other end of standard output is closed; of a file, never."""
    poller = select.poll()
    try:
        poller.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # it is no real file
        await asyncio.Event().wait()
    while not poller.poll(0):
        await asyncio.sleep(LOOK_S)
