"""Permits: tokens by which a worker knows who may read from it, or send to it, over bulk connections.

They are asked for over the bus, whose permissions say who is a worker, and presented on the connection, where nobody's
word counts. Each is for one artifact, or one put, of one tenant. A worker that reads asks once for a key, and signs a
permit of its own for each read: the way over the bus would be a third of a small read.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Annotated, Final, Literal

from blake3 import blake3
from pydantic import Field, TypeAdapter, ValidationError

from tensorbus.clock import NS_PER_S, Clock, Deadline
from tensorbus.errors import CorruptError, DeniedError, InvalidArgumentError, OutOfSpaceError, TensorbusError
from tensorbus.ids import IdSource, Incarnation, WorkerId, prefixed
from tensorbus.workers import _requests as ask
from tensorbus.workers._core import Core

PERMIT_S: Final = 3600.0
"""As long as a transfer may take: with its permit it comes again after a lost connection."""
KEY_S: Final = 2 * PERMIT_S
"""The worker that gave a key knows it for so long; who has it signs with it for the first half."""
PERMITS_MAX: Final = 100_000
KEYS_MAX: Final = 10_000
SECRET_BYTES: Final = 32
TENANT_PATTERN: Final = r"^[A-Za-z0-9_.-]{1,64}$"
ASK_S: Final = 5.0
AGAIN_S: Final = 0.02


class PermitAsk(ask.Ask):
    """A permit that is asked for at ``<prefix>.rpc.permit.<worker>``."""

    op: Literal["read", "put", "pages"]
    tenant: str = Field(pattern=TENANT_PATTERN)
    artifact: Annotated[str, Field(max_length=4096)] = ""
    principal: Annotated[str, Field(max_length=256)] = ""


class KeyAsk(ask.Ask):
    """A key to sign permits with, asked for at the same place by workers for their own reads."""

    op: Literal["key"]


class SignedPermit(ask.Ask):
    """A permit to read that the reader made with a key of the worker that it reads from.

    Attributes:
        op: Whether it is for an artifact, or for the tenant's pages.
        key: Names the key.
        mac: BLAKE3 of what it is for, under that key.
    """

    op: Literal["read", "pages"] = "read"
    key: Annotated[str, Field(max_length=64)]
    tenant: str = Field(pattern=TENANT_PATTERN)
    artifact: Annotated[str, Field(max_length=4096)]
    mac: Annotated[str, Field(max_length=64)]


_QUESTION: Final[TypeAdapter[PermitAsk | KeyAsk]] = TypeAdapter(PermitAsk | KeyAsk)


def _mac(secret: bytes, op: str, tenant: str, artifact: str) -> str:
    return blake3(prefixed(op, tenant, artifact), key=secret).hexdigest(length=16)


@dataclass(frozen=True, slots=True)
class Key:
    """What a worker gives another, to sign permits with. The secret is 32 bytes."""

    id: str
    secret: bytes
    until_ns: int

    def sign(self, asked: PermitAsk) -> dict[str, object]:
        """A permit to read, as it is presented."""
        mac = _mac(self.secret, asked.op, asked.tenant, asked.artifact)
        signed = {"key": self.id, "tenant": asked.tenant, "artifact": asked.artifact, "mac": mac}
        return {**signed, "op": asked.op} if asked.op != "read" else {**signed}


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
        self._keys: OrderedDict[str, Key] = OrderedDict()

    def issue(self, asked: PermitAsk) -> str:
        """A new token."""
        now_ns = self._clock.now_ns()
        while self._permits and (len(self._permits) >= PERMITS_MAX or self._oldest().until_ns <= now_ns):
            self._permits.popitem(last=False)
        token = self._ids.hex(16)
        self._permits[token] = Permit(asked, now_ns + int(PERMIT_S * NS_PER_S))
        return token

    def issue_key(self) -> Key:
        """A new key, for a worker."""
        now_ns = self._clock.now_ns()
        while self._keys and (len(self._keys) >= KEYS_MAX or next(iter(self._keys.values())).until_ns <= now_ns):
            self._keys.popitem(last=False)
        key = Key(self._ids.hex(8), bytes.fromhex(self._ids.hex(SECRET_BYTES)), now_ns + int(KEY_S * NS_PER_S))
        self._keys[key.id] = key
        return key

    def check(self, token: object, op: str) -> PermitAsk:
        """What the token allows.

        Raises:
            DeniedError: If nobody was given it, it is for something else, or its time is over.
        """
        if isinstance(token, Mapping):
            return self._check_signed(token, op)
        permit = self._permits.get(token) if isinstance(token, str) else None
        if permit is None or permit.ask.op != op or permit.until_ns <= self._clock.now_ns():
            raise _denied(op)
        return permit.ask

    def _check_signed(self, token: Mapping[str, object], op: str) -> PermitAsk:
        try:
            signed = SignedPermit.model_validate(token)
        except ValidationError as exc:
            raise _denied(op) from exc
        key = self._keys.get(signed.key)
        if key is None or signed.op != op or key.until_ns <= self._clock.now_ns():
            raise _denied(op)
        mac = _mac(key.secret, signed.op, signed.tenant, signed.artifact)
        if not compare_digest(signed.mac.encode(), mac.encode()):
            raise _denied(op)
        return PermitAsk(op=signed.op, tenant=signed.tenant, artifact=signed.artifact)

    def _oldest(self) -> Permit:
        return next(iter(self._permits.values()))


def _denied(op: str) -> DeniedError:
    return DeniedError(f"this worker gave no such permit to {op}, or it ran out")


def parse_ask(data: bytes) -> PermitAsk | KeyAsk:
    """What came over the bus.

    Raises:
        InvalidArgumentError: If it cannot be read.
    """
    try:
        return _QUESTION.validate_json(data)
    except ValidationError as exc:
        raise InvalidArgumentError(f"the question for a permit cannot be read: {exc.errors()[0]['msg']}") from exc


class Keys:
    """The keys that this worker has of others. Lives on its loop."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._keys: dict[WorkerId, tuple[Incarnation, Key]] = {}

    async def sign(self, worker: WorkerId, incarnation: Incarnation, asked: PermitAsk, *, deadline: Deadline) -> object:
        """A permit to read from a worker; asks it for a key if there is none.

        Raises:
            UnavailableError: If it does not answer; DeadlineExceededError: If it does not in time.
        """
        now_ns = self._core.clock.now_ns()
        known = self._keys.get(worker)
        if known is None or known[0] != incarnation or known[1].until_ns <= now_ns:
            data = await _ask(self._core, worker, KeyAsk(op="key"), deadline)
            known = self._keys[worker] = incarnation, _key_of(data, worker, now_ns + int(PERMIT_S * NS_PER_S))
        return known[1].sign(asked)

    async def sign_all(
        self, workers: Mapping[WorkerId, Incarnation], asked: PermitAsk, *, deadline: Deadline
    ) -> dict[WorkerId, object]:
        """Permits of those that answer."""

        async def one(worker: WorkerId, incarnation: Incarnation) -> object:
            try:
                return await self.sign(worker, incarnation, asked, deadline=deadline)
            except TensorbusError:
                return None

        permits = await asyncio.gather(*(one(*each) for each in workers.items()))
        return {worker: permit for worker, permit in zip(workers, permits, strict=True) if permit is not None}

    def forget(self, worker: WorkerId) -> bool:
        """A worker does not know its key any more; says whether there was one."""
        return self._keys.pop(worker, None) is not None


def _key_of(data: bytes, worker: WorkerId, until_ns: int) -> Key:
    try:
        said = json.loads(data)
        key = Key(str(said["key"]), bytes.fromhex(said["secret"]), until_ns)
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptError(f"worker {worker} gave a key that cannot be read") from exc
    if len(key.secret) != SECRET_BYTES:
        raise CorruptError(f"worker {worker} gave a key that cannot be read")
    return key


async def ask_permit(core: Core, worker: WorkerId, asked: PermitAsk, *, deadline: Deadline) -> str:
    """Ask a worker for a permit.

    Raises:
        NotFoundError: If it does not have the artifact; UnavailableError: If it does not answer.
    """
    data = await _ask(core, worker, asked, deadline)
    try:
        token = json.loads(data)["token"]
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptError(f"worker {worker} gave a permit that cannot be read") from exc
    return str(token)


async def _ask(core: Core, worker: WorkerId, question: PermitAsk | KeyAsk, deadline: Deadline) -> bytes:
    left = deadline.left()
    limit = Deadline(ASK_S if left is None else min(ASK_S, left), what=f"asking worker {worker} for a permit")
    subject = core.bus.subjects.rpc(f"permit.{worker}")
    return await _asked(core, subject, question.model_dump_json().encode(), limit)


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
