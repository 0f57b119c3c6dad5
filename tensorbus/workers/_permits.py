"""Permits: tokens that a worker issues to who may read from it, or send to it, over bulk connections.

They are asked for over the bus, whose permissions say who is a worker, and presented on the connection, where nobody's
word counts. Each is for one artifact, or one put, of one tenant.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from tensorbus.clock import NS_PER_S, Clock, Deadline
from tensorbus.errors import CorruptError, DeniedError, InvalidArgumentError, OutOfSpaceError, TensorbusError
from tensorbus.ids import IdSource, WorkerId
from tensorbus.workers import _requests as ask
from tensorbus.workers._core import Core

PERMIT_S: Final = 3600.0
"""As long as a transfer may take: with its permit it comes again after a lost connection."""
PERMITS_MAX: Final = 100_000
ASK_S: Final = 5.0
AGAIN_S: Final = 0.02


class PermitAsk(ask.Ask):
    """What is asked at ``<prefix>.rpc.permit.<worker>``."""

    op: Literal["read", "put"]
    tenant: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    artifact: Annotated[str, Field(max_length=4096)] = ""
    principal: Annotated[str, Field(max_length=256)] = ""


@dataclass(frozen=True, slots=True)
class Permit:
    """What a token allows."""

    ask: PermitAsk
    until_ns: int


class Permits:
    """The permits of one worker. Lives on its loop."""

    def __init__(self, ids: IdSource, clock: Clock) -> None:
        self._ids = ids
        self._clock = clock
        self._permits: OrderedDict[str, Permit] = OrderedDict()

    def issue(self, asked: PermitAsk) -> str:
        """A new token."""
        now_ns = self._clock.now_ns()
        while self._permits and (len(self._permits) >= PERMITS_MAX or self._oldest().until_ns <= now_ns):
            self._permits.popitem(last=False)
        token = self._ids.hex(16)
        self._permits[token] = Permit(asked, now_ns + int(PERMIT_S * NS_PER_S))
        return token

    def check(self, token: object, op: str) -> PermitAsk:
        """What the token allows.

        Raises:
            DeniedError: If nobody was given it, it is for something else, or its time is over.
        """
        permit = self._permits.get(token) if isinstance(token, str) else None
        if permit is None or permit.ask.op != op or permit.until_ns <= self._clock.now_ns():
            raise DeniedError(f"this worker gave no such permit to {op}, or it ran out")
        return permit.ask

    def _oldest(self) -> Permit:
        return next(iter(self._permits.values()))


def parse_ask(data: bytes) -> PermitAsk:
    """What came over the bus.

    Raises:
        InvalidArgumentError: If it cannot be read.
    """
    try:
        return PermitAsk.model_validate_json(data)
    except ValidationError as exc:
        raise InvalidArgumentError(f"the question for a permit cannot be read: {exc.errors()[0]['msg']}") from exc


async def ask_permit(core: Core, worker: WorkerId, asked: PermitAsk, *, deadline: Deadline) -> str:
    """Ask a worker for a permit.

    Raises:
        NotFoundError: If it does not have the artifact; UnavailableError: If it does not answer.
    """
    left = deadline.left()
    limit = Deadline(ASK_S if left is None else min(ASK_S, left), what=f"asking worker {worker} for a permit")
    subject = core.bus.subjects.rpc(f"permit.{worker}")
    data = await _asked(core, subject, asked.model_dump_json().encode(), limit)
    try:
        token = json.loads(data)["token"]
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptError(f"worker {worker} gave a permit that cannot be read") from exc
    return str(token)


async def _asked(core: Core, subject: str, question: bytes, deadline: Deadline) -> bytes:
    while True:
        try:
            return await core.bus.ask(subject, question, deadline=deadline)
        except OutOfSpaceError:  # many ask it just now
            if deadline.left() == 0:
                raise
            await asyncio.sleep(AGAIN_S)


async def ask_permits(
    core: Core, workers: Sequence[WorkerId], asked: PermitAsk, *, deadline: Deadline
) -> dict[WorkerId, str | TensorbusError]:
    """Ask several at once; of each its permit, or why there is none."""

    async def one(worker: WorkerId) -> str | TensorbusError:
        try:
            return await ask_permit(core, worker, asked, deadline=deadline)
        except TensorbusError as error:
            return error

    return dict(zip(workers, await asyncio.gather(*map(one, workers)), strict=True))
