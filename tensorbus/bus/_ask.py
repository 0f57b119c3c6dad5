"""Questions and answers, whatever carries them: what who answers does with a question, and what goes over the wire."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tensorbus.clock import Deadline
from tensorbus.errors import InvalidArgumentError, OutOfSpaceError, TensorbusError, from_wire, to_wire

log = logging.getLogger(__name__)

Handler = Callable[[bytes], Coroutine[Any, Any, bytes]]

ANSWERS_MAX: Final = 16
"""Questions that one who answers works on at once; further ones are told that there is no room."""
REFUSALS_MAX: Final = 256
WORKING_S: Final = 0.5
"""How often a question that takes long is told that somebody works on it; silence means that it must be asked again."""
ABSENT_S: Final = 0.5
"""How long nobody may listen: who answers may be on its way from one server to another."""
RETURN_S: Final = 5.0
"""The same after the own connection was lost: then that of who answers was too, probably."""
HEADERS_BYTES: Final = 1024
"""Room for headers, which count against the server's limit for a message."""
BUSY_PAUSE_S: Final = 0.02
BUSY_PAUSE_S_MAX: Final = 0.5
ERROR: Final = "Tb-Error"
BUSY: Final = "Tb-Busy"
WORKING: Final = "Tb-Working"
TIMEOUT: Final = "Tb-Timeout-Ms"


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes back to a question: the handler's bytes, an error, or the word that somebody works on it."""

    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_error(cls, error: TensorbusError, *, busy: bool = False) -> Answer:
        """An error; ``busy`` if the same question may well be answered a moment later."""
        headers = {ERROR: str(error.kind)} | ({BUSY: "1"} if busy else {})
        return cls(json.dumps(to_wire(error), default=str).encode(), headers)

    def value(self, subject: str) -> bytes:
        """The handler's bytes.

        Raises:
            TensorbusError: The error that the handler raised, as the same class.
        """
        if ERROR not in self.headers:
            return self.data
        try:
            error = from_wire(json.loads(self.data))
        except (ValueError, AttributeError) as exc:
            raise TensorbusError(f"who answers at {subject} gave an error that cannot be read") from exc
        raise error


class Turn:
    """Waits for a turn with one who has no place for a question, at growing intervals."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._pause_s = BUSY_PAUSE_S

    async def comes(self, answer: Answer) -> bool:
        """Wait, if there was no place; whether to ask again. When the time does not suffice, the refusal stands."""
        left_s = self._deadline.left()
        if BUSY not in answer.headers or (left_s is not None and left_s <= self._pause_s):
            return False
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, BUSY_PAUSE_S_MAX)
        return True


STILL_WORKING: Final = Answer(b"", {WORKING: "1"})
Reply = Callable[[Answer], Coroutine[Any, Any, None]]


def question_headers(deadline: Deadline) -> dict[str, str]:
    """Tells who answers after what time nobody waits any more."""
    left_s = deadline.left()
    return {} if left_s is None else {TIMEOUT: str(max(1, int(left_s * 1000)))}


def seconds_left(headers: Mapping[str, str] | None) -> float | None:
    given = (headers or {}).get(TIMEOUT, "")
    return int(given) / 1000 if given.isdecimal() else None


def check_size(what: str, subject: str, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise InvalidArgumentError(
            f"{what} at {subject} has {nbytes} bytes, more than the {limit} that the bus carries at once",
            nbytes=nbytes,
            limit=limit,
        )


class Desk:
    """Runs a handler for the questions that arrive, a bounded number at once. Owns the tasks until :meth:`close`.

    Args:
        subject: Where the questions come in; named in errors.
        bytes_max: Size of the largest answer that the bus carries, asked for each time.
    """

    def __init__(self, subject: str, handler: Handler, *, bytes_max: Callable[[], int]) -> None:
        self._subject = subject
        self._handler = handler
        self._bytes_max = bytes_max
        self._working: dict[str, asyncio.Task[None]] = {}
        self._refusing: set[asyncio.Task[None]] = set()

    def accept(self, question: bytes, *, key: str, left_s: float | None, reply: Reply) -> None:
        """Begin to work on a question. ``key`` tells a repetition of one that is being worked on, which is ignored."""
        if key in self._working:
            return
        if len(self._working) >= ANSWERS_MAX:
            self._refuse(reply)
            return
        task = asyncio.create_task(self._work(question, left_s, reply), name=f"answer/{self._subject}")
        self._working[key] = task
        task.add_done_callback(lambda _task: self._working.pop(key, None))

    async def close(self) -> None:
        """Stop working. Who asked hears nothing more, and asks again."""
        tasks = {*self._working.values(), *self._refusing}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _refuse(self, reply: Reply) -> None:
        if len(self._refusing) >= REFUSALS_MAX:
            return  # who asked hears nothing, and asks again
        error = OutOfSpaceError(
            f"who answers that works on {ANSWERS_MAX} questions already and takes no more: ask again later",
            limit=ANSWERS_MAX,
        )
        task = asyncio.create_task(reply(Answer.of_error(error, busy=True)), name=f"refuse/{self._subject}")
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)

    async def _work(self, question: bytes, left_s: float | None, reply: Reply) -> None:
        work = asyncio.create_task(self._outcome(question, left_s), name=f"handle/{self._subject}")
        try:
            while not (await asyncio.wait({work}, timeout=WORKING_S))[0]:
                await reply(STILL_WORKING)
            await reply(work.result())
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait({work})

    async def _outcome(self, question: bytes, left_s: float | None) -> Answer:
        try:
            async with Deadline(left_s, what="the answer").scope():
                data = await self._handler(question)
            check_size("an answer", self._subject, len(data), self._bytes_max())
        except TensorbusError as exc:
            return Answer.of_error(exc)
        except Exception as exc:  # the task's outermost edge: who asked must hear of it
            log.exception("the handler of %s failed", self._subject)
            return Answer.of_error(TensorbusError(f"who answers that failed: {exc!r}"))
        return Answer(data)
