"""What an operator does with the streams: make them, look at them, and (in ``_migrate``) move them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tensorbus.bus._auth import NatsAuth
from tensorbus.bus._link import Link
from tensorbus.bus._nats import CONNECT_S, NatsBus
from tensorbus.bus._nats_stream import parse_time
from tensorbus.bus._port import StreamLimits
from tensorbus.bus._requests import NoStreamError, Requests, nobody_there
from tensorbus.bus._streams import ensure_live, ensure_log, ensure_pages, mismatch, wanted_config
from tensorbus.clock import Clock, Deadline, SystemClock
from tensorbus.errors import InvalidArgumentError, TensorbusError, UnavailableError
from tensorbus.events import Subjects
from tensorbus.ids import IdSource, SystemIds

USER_INFO_S: Final = 2.0
REQUESTS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCopy:
    """One server's copy of a stream, as its leader sees it.

    Attributes:
        lag: Operations that it is behind.
    """

    server: str
    current: bool
    offline: bool
    lag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """A stream as it is.

    Attributes:
        problem: Why the log cannot live with its settings, empty if it can.
        replicas: How many servers are to keep a copy.
        leader: The server that leads it; empty on a single server.
        copies: Those beside the leader's.
        made: Whether it was made just now.
    """

    name: str
    problem: str
    replicas: int
    leader: str
    copies: tuple[StreamCopy, ...]
    messages: int
    nbytes: int
    bytes_max: int
    first_seq: int
    last_seq: int
    made: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UserReport:
    """As whom the servers see this connection.

    Attributes:
        publish_allow, subscribe_allow: Subjects; ``None`` where nothing is restricted.
        publish_deny, subscribe_deny: What of that is forbidden.
        answers: Whether questions may be answered at the inbox that they name, whatever may be published.
    """

    user: str
    account: str
    publish_allow: tuple[str, ...] | None
    subscribe_allow: tuple[str, ...] | None
    publish_deny: tuple[str, ...] = ()
    subscribe_deny: tuple[str, ...] = ()
    answers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BusReport:
    """What a look at the servers found.

    Attributes:
        storage_bytes, storage_bytes_max: What the account uses and may use on disk; ``None`` without a limit.
        streams: Those that are there.
        missing: Names of those that are not.
        user: ``None`` if the server does not tell.
        ahead_ns: How much the server's clock is ahead of this machine's; ``None`` if no stream told the time.
    """

    server: str
    version: str
    cluster: str
    encrypted: bool
    api_level: int
    storage_bytes: int
    storage_bytes_max: int | None
    streams: tuple[StreamReport, ...]
    missing: tuple[str, ...]
    user: UserReport | None
    ahead_ns: int | None


@dataclass(slots=True)
class BusAdmin:
    """An operator's connection. Made by :meth:`connect`; belongs to the event loop that made it.

    Attributes:
        bus: The same connection as a bus.
    """

    link: Link
    requests: Requests
    bus: NatsBus
    subjects: Subjects
    clock: Clock = field(default_factory=SystemClock)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        subjects: Subjects | None = None,
        auth: NatsAuth | None = None,
        name: str = "tensorbus",
        deadline: Deadline | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> BusAdmin:
        """Connect to servers. Arguments and errors are those of :meth:`tensorbus.bus.NatsBus.connect`."""
        subjects, clock = subjects or Subjects(), clock or SystemClock()
        link = Link(url, auth=auth or NatsAuth(), name=name)
        await link.open(deadline or Deadline(CONNECT_S, what="connecting to NATS"))
        bus = NatsBus(link, subjects=subjects, clock=clock, ids=ids or SystemIds(), pending_max=REQUESTS_MAX)
        return cls(link, Requests(link, appends_max=REQUESTS_MAX), bus, subjects, clock)

    async def close(self) -> None:
        await self.link.close()

    async def init(
        self, limits: StreamLimits, *, remembered_seq: int = 0, after_loss: bool = False, deadline: Deadline
    ) -> tuple[StreamReport, ...]:
        """Make the streams that are missing; those that are there stay as they are.

        Args:
            remembered_seq: A sequence that the log is known to have reached, so that a new one begins above it.
            after_loss: Whether to make the log anew although ``remembered_seq`` says that there was one.

        Raises:
            ConflictError, DeniedError, InvalidArgumentError, OutOfSpaceError, UnavailableError: As for
                :func:`tensorbus.bus.provision`.
        """
        before = {name for name in self.subjects.streams if await self.stream(name, deadline=deadline) is not None}
        await ensure_log(
            self.requests,
            self.subjects,
            limits,
            clock=self.clock,
            remembered_seq=remembered_seq,
            allow_recreate=after_loss,
            deadline=deadline,
        )
        for ensure in (ensure_pages, ensure_live):
            await ensure(self.requests, self.subjects, limits, clock=self.clock, remembered_seq=0, deadline=deadline)
        found = []
        for name in self.subjects.streams:
            info = await self.requests.api(f"STREAM.INFO.{name}", deadline=deadline)
            found.append(self._report(info, made=name not in before))
        return tuple(found)

    async def stream(self, name: str, *, deadline: Deadline) -> StreamReport | None:
        """A stream of the system as it is, ``None`` if it is not there."""
        try:
            info = await self.requests.api(f"STREAM.INFO.{name}", deadline=deadline)
        except NoStreamError:
            return None
        return self._report(info)

    async def check(self, *, deadline: Deadline) -> BusReport:
        """Look at the servers and the streams; changes nothing.

        Raises:
            UnavailableError: If JetStream does not answer; DeniedError: If this user may not look.
        """
        said: Mapping[str, Any] = getattr(self.link.client, "_server_info", {})
        account = await self.requests.api("INFO", deadline=deadline)
        streams, missing, ahead_ns = [], [], None
        for name in self.subjects.streams:
            began_ns = self.clock.wall_ns()
            try:
                info = await self.requests.api(f"STREAM.INFO.{name}", deadline=deadline)
            except NoStreamError:
                missing.append(name)
                continue
            streams.append(self._report(info))
            if "ts" in info:
                ahead_ns = parse_time(info["ts"]) - (began_ns + self.clock.wall_ns()) // 2
        most = int(account.get("limits", {}).get("max_storage", -1))
        return BusReport(
            server=str(said.get("server_name", "")),
            version=str(said.get("version", "")),
            cluster=str(said.get("cluster", "")),
            encrypted=bool(said.get("tls_required")),
            api_level=int(account.get("api", {}).get("level", 0)),
            storage_bytes=int(account.get("storage", 0)),
            storage_bytes_max=None if most < 0 else most,
            streams=tuple(streams),
            missing=tuple(missing),
            user=await self._user(deadline),
            ahead_ns=ahead_ns,
        )

    async def _user(self, deadline: Deadline) -> UserReport | None:
        left = deadline.left()
        soon = Deadline(USER_INFO_S if left is None else min(left, USER_INFO_S), what="asking who we are")
        try:
            reply = await self.requests.request("$SYS.REQ.USER.INFO", b"", deadline=soon)
            found = {} if nobody_there(reply) else json.loads(reply.data).get("data", {})
        except (TensorbusError, ValueError):
            return None
        if not found:
            return None
        allowed = found.get("permissions") or {}
        return UserReport(
            user=str(found.get("user", "")),
            account=str(found.get("account_name") or found.get("account", "")),
            publish_allow=_allowed(allowed.get("publish")),
            subscribe_allow=_allowed(allowed.get("subscribe")),
            publish_deny=_denied(allowed.get("publish")),
            subscribe_deny=_denied(allowed.get("subscribe")),
            answers=bool(allowed.get("responses")),
        )

    def _report(self, info: Mapping[str, Any], *, made: bool = False) -> StreamReport:
        config, state, cluster = info["config"], info["state"], info.get("cluster") or {}
        wanted = wanted_config(self.subjects, config["name"], clock=self.clock)
        copies = (
            StreamCopy(
                server=str(each.get("name", "")),
                current=bool(each.get("current")),
                offline=bool(each.get("offline")),
                lag=int(each.get("lag", 0)),
            )
            for each in cluster.get("replicas") or ()
        )
        return StreamReport(
            name=config["name"],
            problem=mismatch(config, wanted) or "",
            replicas=int(config["num_replicas"]),
            leader=str(cluster.get("leader", "")),
            copies=tuple(sorted(copies, key=lambda copy: copy.server)),
            messages=int(state["messages"]),
            nbytes=int(state["bytes"]),
            bytes_max=int(config.get("max_bytes", -1)),
            first_seq=int(state["first_seq"]),
            last_seq=int(state["last_seq"]),
            made=made,
        )

    async def set_replicas(self, name: str, replicas: int, *, deadline: Deadline) -> StreamReport:
        """Have a stream kept by that many servers, and wait until all have it.

        Raises:
            InvalidArgumentError: If there are not as many servers; DeadlineExceededError: If they do not catch up.
        """
        info = await self.requests.api(f"STREAM.INFO.{name}", deadline=deadline)
        config = user_config(info["config"]) | {"num_replicas": replicas}
        try:
            await self.requests.api(f"STREAM.UPDATE.{name}", config, deadline=deadline)
        except TensorbusError as exc:
            if isinstance(exc, UnavailableError) and not exc.details:
                raise
            text = f"stream {name} cannot be kept by {replicas} servers: {exc}"
            raise InvalidArgumentError(text, stream=name, replicas=replicas) from exc
        while True:
            found = await self.stream(name, deadline=deadline)
            if found is not None and len(found.copies) == replicas - 1 and all(copy.current for copy in found.copies):
                return found
            await self.requests.pause(deadline, deadline.error())


def user_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stream's settings without the notes that servers add for themselves."""
    notes = {key: value for key, value in (config.get("metadata") or {}).items() if not key.startswith("_nats.")}
    return {**config, "metadata": notes}


def _allowed(rule: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    return None if rule is None or rule.get("allow") is None else tuple(map(str, rule["allow"]))


def _denied(rule: Mapping[str, Any] | None) -> tuple[str, ...]:
    return tuple(map(str, (rule or {}).get("deny") or ()))
