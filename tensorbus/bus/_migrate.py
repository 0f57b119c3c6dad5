"""One server becomes three: the log is copied as the server itself keeps it, so that every sequence stays.

The source is only read. Writers must have left before, since what they append afterwards would not be in the copy;
that nothing was appended meanwhile is checked at the end. Heartbeats are not moved: they are in memory and short. Nor
are page facts: the pages went with the workers' sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tensorbus.bus._admin import BusAdmin, StreamReport, user_config
from tensorbus.bus._link import Link, Refused
from tensorbus.bus._port import StreamLimits
from tensorbus.bus._requests import NAME_IN_USE, NoStreamError, nobody_there, translate
from tensorbus.bus._streams import ensure_pages
from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import MSG_ID, SessionEnded, SessionOpened, decode

CHUNK_BYTES: Final = 128 * 1024
SILENCE_S: Final = 60.0
"""How long a server may take for its next word; the last one comes when it has put the whole stream together."""
CLEANUP_S: Final = 15.0
ABSENT_S: Final = 5.0
RESTORE_AGAIN_S: Final = 1.0
ABSENT_PAUSE_S: Final = 0.02
WAITING_MAX: Final = 1024
_RESTORE_IN_USE: Final = 10130
_END_OK: Final = frozenset({"", "204"})

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """What is at the target now.

    Attributes:
        last_id: The event id of the last message, the same as at the source; empty if the log is.
    """

    stream: str
    messages: int
    nbytes: int
    first_seq: int
    last_seq: int
    last_id: str
    replicas: int


async def migrate(
    source: BusAdmin,
    target: BusAdmin,
    *,
    replicas: int,
    force: bool = False,
    progress: Progress | None = None,
    deadline: Deadline,
) -> Migrated:
    """Copy the log to other servers, with its sequences, and have it kept by several of them.

    When it fails, what it made at the target is removed; the source is never changed.

    Args:
        replicas: How many of the target's servers are to keep the log.
        force: Go on although sessions were not ended, where their workers are known to be dead. One that still sends
            heartbeats is refused all the same.
        progress: Called with the bytes that were copied and, as an upper bound, those of the log.

    Raises:
        ConflictError: If the target has the log already, workers have not left, or somebody wrote meanwhile.
        NotFoundError: If the source has no log.
        InvalidArgumentError: If the target has not as many servers.
        CorruptError: If the copy is not what the source has.
        UnavailableError, DeadlineExceededError: If a server went away or took too long.
        DeniedError: If one of the users may not do that.
    """
    name = source.subjects.log_stream
    before = await source.stream(name, deadline=deadline)
    if before is None:
        raise NotFoundError(f"the source has no stream {name}", stream=name)
    if await target.stream(name, deadline=deadline) is not None:
        raise ConflictError(f"the target has a stream {name} already; nothing was changed", stream=name)
    await _no_writers(source, force=force, deadline=deadline)
    try:
        await _copied(source, target, name, nbytes=before.nbytes, progress=progress, deadline=deadline)
        after = await source.stream(name, deadline=deadline)
        if after is None or (after.messages, after.last_seq) != (before.messages, before.last_seq):
            raise ConflictError(f"somebody wrote to stream {name} while it was copied; stop all workers", stream=name)
        last_id = await _verified(source, target, before, deadline)
        found = await target.set_replicas(name, replicas, deadline=deadline) if replicas > 1 else before
        await _verified(source, target, before, deadline)
        await _with_pages(source, target, replicas, deadline)
    except _TakenError:
        raise  # somebody else made one there just now
    except BaseException:
        with contextlib.suppress(TensorbusError):
            await _remove(target, name)
        raise
    return Migrated(
        stream=name,
        messages=before.messages,
        nbytes=found.nbytes,
        first_seq=before.first_seq,
        last_seq=before.last_seq,
        last_id=last_id,
        replicas=replicas,
    )


# -- who writes ------------------------------------------------------------------------------------------------------


async def open_sessions(admin: BusAdmin, *, deadline: Deadline) -> list[str]:
    """The workers whose last word about their session is not its end."""
    sessions: dict[str, str] = {}
    pattern = f"{admin.subjects.prefix}.ev.session.*.*"
    async with admin.bus.read(pattern, after=0) as reader, deadline.scope():
        if await admin.bus.last_on(pattern, deadline=deadline) is None:
            return []
        async for batch in reader:
            for message in batch:
                fact = decode(
                    seq=message.seq,
                    time_ns=message.time_ns,
                    subject=message.subject,
                    headers=message.headers,
                    data=message.data,
                ).event
                if isinstance(fact, SessionOpened):
                    sessions[fact.worker] = fact.incarnation
                elif isinstance(fact, SessionEnded) and sessions.get(fact.worker) == fact.incarnation:
                    del sessions[fact.worker]
            if reader.caught_up.is_set():
                break
    return sorted(sessions)


async def _no_writers(source: BusAdmin, *, force: bool, deadline: Deadline) -> None:
    beating = await _beating(source, deadline)
    if beating:
        raise ConflictError(f"these workers still run: {', '.join(beating)}; stop them first", workers=beating)
    waiting = await open_sessions(source, deadline=deadline)
    if waiting and not force:
        raise ConflictError(
            f"these workers have not left: {', '.join(waiting)}. Stop them (SIGTERM), wait until a gateway has ended "
            "the sessions of those that died, or force it where they are known to be dead",
            workers=waiting,
        )


async def _beating(source: BusAdmin, deadline: Deadline) -> list[str]:
    """Workers that sent a heartbeat which has not run out."""
    verb = f"STREAM.INFO.{source.subjects.live_stream}"
    try:
        info = await source.requests.api(verb, {"subjects_filter": ">"}, deadline=deadline)
    except NoStreamError:
        return []
    subjects = (info["state"].get("subjects") or {}).keys()
    return sorted({source.subjects.parse_live(subject)[1] for subject in subjects})


# -- the copy --------------------------------------------------------------------------------------------------------


async def _copied(
    source: BusAdmin, target: BusAdmin, name: str, *, nbytes: int, progress: Progress | None, deadline: Deadline
) -> None:
    """Copy; a restore that was interrupted a moment ago keeps the name taken at the target until its server notices."""
    while True:
        try:
            return await _copy(source, target, name, nbytes=nbytes, progress=progress, deadline=deadline)
        except InvalidArgumentError as exc:
            there = await target.stream(name, deadline=deadline)
            if exc.details.get("code") != _RESTORE_IN_USE or there is not None:
                raise
        async with deadline.scope():
            await asyncio.sleep(RESTORE_AGAIN_S)


async def _copy(
    source: BusAdmin, target: BusAdmin, name: str, *, nbytes: int, progress: Progress | None, deadline: Deadline
) -> None:
    async with _Talk(source.link, "the source") as chunks, _Talk(target.link, "the target") as accepted:
        question = {"deliver_subject": chunks.inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES, "jsck": True}
        async with _Talk(source.link, "the source") as asked:
            snapshot = await asked.api(f"STREAM.SNAPSHOT.{name}", question, deadline)
        config = user_config(snapshot["config"]) | {"num_replicas": 1}
        restore = {"config": config, "state": snapshot["state"]}
        where = str((await accepted.api(f"STREAM.RESTORE.{name}", restore, deadline))["deliver_subject"])
        done = 0
        try:
            while (chunk := await chunks.hear(deadline)).data:
                refusal = await accepted.tell(where, chunk.data, deadline)
                if refusal:
                    _raise_error(refusal, f"stream {name} at the target")
                done += len(chunk.data)
                if chunk.reply:
                    await source.link.send(chunk.reply)
                if progress is not None:
                    progress(done, max(nbytes, done))
        except BaseException:
            await target.link.send(where)  # the end, too early: the target gives up at once what it holds for this
            raise
        said = (chunk.headers or {}).get("Status", "")
        if said not in _END_OK:
            text = (chunk.headers or {}).get("Description", "")
            raise UnavailableError(f"the source gave up its snapshot of {name}: {said} {text}".strip(), stream=name)
        _raise_error(await accepted.tell(where, b"", deadline), f"stream {name} at the target")


def _raise_error(answer: bytes, subject: str) -> None:
    try:
        error: Mapping[str, Any] | None = json.loads(answer).get("error")
    except ValueError:
        error = {"description": answer.decode("utf-8", "replace")}
    if error is not None:
        raise translate(error, subject=subject)


class _TakenError(ConflictError):
    pass


class _Talk:
    """Says each thing once, and hears what comes to an inbox of its own. A lost connection ends it: what was under way
    would have to begin anew."""

    def __init__(self, link: Link, who: str) -> None:
        self._link = link
        self._who = who
        self._said = ""
        self._problem: TensorbusError | None = None
        self._heard: asyncio.Queue[Msg | None] = asyncio.Queue(WAITING_MAX)
        self._subscription: Subscription | None = None
        self.inbox = ""

    async def __aenter__(self) -> _Talk:
        self._link.listen(self)
        self.inbox = self._link.client.new_inbox()
        self._subscription = await self._link.subscribe(self.inbox, self._put)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._link.forget(self)
        if self._subscription is not None:
            await self._link.unsubscribe(self._subscription)

    def on_lost(self) -> None:
        self._fail(UnavailableError(f"the connection to {self._who} was lost"))

    def on_refused(self, refused: Refused) -> None:
        if refused.means(self.inbox) or refused.means(self._said):
            self._fail(DeniedError(f"{self._who} refuses {refused.subject}", subject=refused.subject))

    async def say(self, subject: str, data: bytes) -> None:
        self._said = subject
        if not await self._link.send(subject, data, reply=self.inbox):
            raise UnavailableError(f"the connection to {self._who} was lost")

    async def hear(self, deadline: Deadline) -> Msg:
        """The next message.

        Raises:
            UnavailableError: If none comes for a long time, or the connection was lost.
        """
        left = deadline.left()
        try:
            async with asyncio.timeout(SILENCE_S if left is None else min(left, SILENCE_S)):
                message = None if self._problem is not None else await self._heard.get()
        except TimeoutError as exc:
            if deadline.left() == 0.0:
                raise deadline.error() from exc
            raise UnavailableError(f"{self._who} fell silent") from exc
        if message is None:
            assert self._problem is not None
            raise self._problem
        return message

    async def tell(self, subject: str, data: bytes, deadline: Deadline) -> bytes:
        """Say something and hear the answer. In a cluster it takes a moment until all servers know who listens."""
        silence = Deadline(ABSENT_S, what="finding who listens")
        while True:
            await self.say(subject, data)
            reply = await self.hear(deadline)
            if not nobody_there(reply):
                return reply.data
            if silence.left() == 0.0:
                raise UnavailableError(f"{self._who} does not listen to what it asked for")
            await asyncio.sleep(ABSENT_PAUSE_S)

    async def api(self, verb: str, body: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """A question to JetStream that must not be repeated."""
        await self.say(f"$JS.API.{verb}", json.dumps(body).encode())
        reply = await self.hear(deadline)
        if nobody_there(reply):
            raise UnavailableError(f"{self._who} has no JetStream that answers")
        answer: dict[str, Any] = json.loads(reply.data)
        error = answer.get("error")
        if error is None:
            return answer
        if error.get("err_code") in (_RESTORE_IN_USE, NAME_IN_USE):
            raise _TakenError(f"{self._who}: {error.get('description')}")
        raise translate(error, subject=verb)

    def _put(self, message: Msg) -> None:
        try:
            self._heard.put_nowait(message)
        except asyncio.QueueFull:
            self._fail(OutOfSpaceError(f"{self._who} sends faster than the rest can take"))

    def _fail(self, problem: TensorbusError) -> None:
        if self._problem is None:
            self._problem = problem
            with contextlib.suppress(asyncio.QueueFull):
                self._heard.put_nowait(None)


# -- afterwards ------------------------------------------------------------------------------------------------------


async def _verified(source: BusAdmin, target: BusAdmin, wanted: StreamReport, deadline: Deadline) -> str:
    """The event id of the last message, once the target has the same one and as many."""
    found = await target.stream(wanted.name, deadline=deadline)
    if found is None:
        raise UnavailableError(f"stream {wanted.name} is not at the target", stream=wanted.name)
    ours = (wanted.messages, wanted.first_seq, wanted.last_seq)
    theirs = (found.messages, found.first_seq, found.last_seq)
    if ours != theirs:
        text = f"stream {wanted.name} has messages, first and last sequence {ours}; its copy {theirs}"
        raise CorruptError(text, stream=wanted.name)
    if not wanted.messages:
        return ""
    one = await source.bus.get(wanted.last_seq, deadline=deadline)
    two = await target.bus.get(wanted.last_seq, deadline=deadline)
    if one != two or one is None:
        text = f"the last message of stream {wanted.name}, {wanted.last_seq}, is another one in its copy"
        raise CorruptError(text, stream=wanted.name, seq=wanted.last_seq)
    return one.headers.get(MSG_ID, "")


async def _with_pages(source: BusAdmin, target: BusAdmin, replicas: int, deadline: Deadline) -> None:
    """Make the target's stream of page facts, above all sequences of the source's: a fencing token only grows."""
    found = await source.stream(source.subjects.pages_stream, deadline=deadline)
    limits = StreamLimits(replicas=replicas)
    if found is not None and found.bytes_max > 0:
        limits = replace(limits, pages_bytes_max=found.bytes_max)
    await ensure_pages(
        target.requests,
        target.subjects,
        limits,
        clock=target.clock,
        remembered_seq=0 if found is None else found.last_seq,
        deadline=deadline,
    )


async def _remove(target: BusAdmin, name: str) -> None:
    """Remove what we began. A copy that was not completed is no stream yet: its server forgets it by itself."""
    deadline = Deadline(CLEANUP_S, what="removing the copy")
    with contextlib.suppress(NoStreamError):
        await target.requests.api(f"STREAM.DELETE.{name}", deadline=deadline)
