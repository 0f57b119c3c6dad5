"""Telling a worker that bytes which came from it were wrong: a hint, which that worker looks into itself."""

from __future__ import annotations

import logging
from typing import Annotated, Final

from pydantic import Field

from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError
from tensorbus.ids import WorkerId
from tensorbus.workers import _requests as ask
from tensorbus.workers._core import Core
from tensorbus.workers._permits import TENANT_PATTERN
from tensorbus.workers._store import Where

log = logging.getLogger("tensorbus.workers")

TELL_S: Final = 5.0


class CheckAsk(ask.Ask):
    """What is asked at ``<prefix>.rpc.check.<worker>``."""

    tenant: str = Field(pattern=TENANT_PATTERN)
    artifact: Annotated[str, Field(max_length=4096)]


async def complain(core: Core, worker: WorkerId, where: Where) -> None:
    """Have a worker look at its copies of an artifact; whether it does is its own affair."""
    bus, (tenant, artifact) = core.bus, where
    question = CheckAsk(tenant=tenant, artifact=artifact).model_dump_json().encode()
    deadline = Deadline(TELL_S, what=f"telling worker {worker} of wrong bytes")
    try:
        await bus.ask(bus.subjects.rpc(f"check.{worker}"), question, deadline=deadline)
    except TensorbusError as error:
        log.info("worker %s was not told of wrong bytes: artifact=%s reason=%s", worker, artifact, error)
