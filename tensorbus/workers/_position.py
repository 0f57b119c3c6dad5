"""How far a worker has read the log, kept in its home: its next life sees whether the log lost something meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Final

from tensorbus.feeds import DirectoryFeed, Remembered
from tensorbus.ids import EventId

log = logging.getLogger("tensorbus.workers")

KEEP_S: Final = 1.0


class PositionFile:
    """``<worker>.position`` in a home's run directory. It is an aid: nothing fails when it cannot be written.

    Args:
        stream: The log's name; what was kept of another log is not looked at.
    """

    def __init__(self, directory: Path, worker: str, *, stream: str) -> None:
        self._path = directory / f"{worker}.position"
        self._stream = stream
        self._kept: Remembered | None = None
        self._failed = False

    def read(self) -> Remembered | None:
        """What an earlier life read last, ``None`` if nothing is known of it. Blocks."""
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if data["stream"] != self._stream:
                return None
            return Remembered(
                int(data["seq"]), EventId(str(data["event_id"])), int(data["time_ns"]), bool(data["snapshot"])
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the position of an earlier life cannot be read: file=%s reason=%s", self._path, error)
            return None

    async def keep(self, feed: DirectoryFeed) -> None:
        """Keep up with a feed, about once a second, for ever."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self.write(feed.remembered)

    async def write(self, remembered: Remembered | None) -> None:
        """Keep a position, if it is another one than the last."""
        if remembered is None or remembered == self._kept:
            return
        try:
            await asyncio.to_thread(self._replace, remembered)
        except OSError as error:
            if not self._failed:
                log.warning("the position cannot be kept: file=%s reason=%s", self._path, error)
            self._failed = True
        else:
            self._kept, self._failed = remembered, False

    def _replace(self, remembered: Remembered) -> None:
        data = {
            "stream": self._stream,
            "seq": remembered.seq,
            "event_id": remembered.event_id,
            "time_ns": remembered.time_ns,
            "snapshot": remembered.snapshot,
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(data), encoding="utf-8")
        new.replace(self._path)
