"""A store that answers the query protocol (``docs/spec/query.md``) with the rows that a test gives it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tensorbus.errors import ExpiredError

Ask = dict[str, Any]


def rows(**columns: list[object]) -> pa.Table:
    return pa.table(columns)


class FakeStore:
    """Answers with ``tables[op]``, a table or what makes one of the question; errors are raised."""

    def __init__(self, worker: str = "s1", *, piece_bytes: int = 512) -> None:
        self.worker = worker
        self.piece_bytes = piece_bytes
        self.tables: dict[str, pa.Table | Callable[[Ask], pa.Table]] = {}
        self.asked: list[Ask] = []
        self.cursors: dict[str, list[bytes]] = {}
        self.truncated = False

    @property
    def last(self) -> Ask:
        """The last question that was none about an answer."""
        return next(asked for asked in reversed(self.asked) if asked["op"] not in ("next", "close"))

    async def handle(self, data: bytes) -> bytes:
        asked: Ask = json.loads(data)
        self.asked.append(asked)
        match asked["op"]:
            case "next":
                if asked["cursor"] not in self.cursors:
                    raise ExpiredError(f"there is no cursor {asked['cursor']}")
                return self._answer(asked["cursor"], asked["piece"])
            case "close":
                self.cursors.pop(asked["cursor"], None)
                return self._line("none", 0, 0)
            case op:
                found = self.tables[op]
                data = stream(found(asked) if callable(found) else found)
                cursor = f"c{len(self.asked)}"
                step = self.piece_bytes
                self.cursors[cursor] = [data[at : at + step] for at in range(0, len(data), step)]
                return self._answer(cursor, 0)

    def _answer(self, cursor: str, number: int) -> bytes:
        pieces = self.cursors[cursor]
        if len(pieces) == 1:
            del self.cursors[cursor]
        return self._line(cursor, number, len(pieces) - 1) + pieces[number]

    def _line(self, cursor: str, number: int, last: int) -> bytes:
        done = number == last
        line = {
            "store": self.worker,
            "cursor": None if done else cursor,
            "piece": number,
            "position": 42,
            "first": 0,
            "rows": 0,
            "truncated": self.truncated and done,
            "done": done,
        }
        return json.dumps(line).encode() + b"\n"


def stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return sink.getvalue()
