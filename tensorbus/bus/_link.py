"""One connection to NATS that comes back by itself, and synchronous delivery of what arrives on it.

nats-py reconnects on its own; what makes it give up for good (an authorization error, say) is answered with a new
client here. Nothing is buffered while the connection is down: who sends waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import BadHeaderError, BadSubjectError, MaxPayloadError
from nats.errors import Error as NatsError

from tensorbus.bus._auth import NatsAuth, inbox_prefix
from tensorbus.clock import Deadline
from tensorbus.errors import DeniedError, InvalidArgumentError, TensorbusError, UnavailableError

log = logging.getLogger(__name__)

SERVER_MIN: Final = (2, 14)
RECONNECT_WAIT_S: Final = 0.1
CONNECT_TIMEOUT_S: Final = 2
PING_INTERVAL_S: Final = 10
CLOSE_S: Final = 1.0
_GAVE_UP_POLL_S: Final = 0.5
_REFUSED = re.compile(r"(?i)permissions violation for (publish|subscription) to \"?([^\" ]+)")
_RAW_ERROR = re.compile(rb"-ERR[ \t]+'([^\r\n]*)'")


@dataclass(frozen=True, slots=True)
class Refused:
    """The server does not allow this connection a subject.

    Attributes:
        exact: Whether the subject's case is known.
    """

    subject: str
    exact: bool

    def means(self, subject: str) -> bool:
        """Whether it is about a subject."""
        return subject == self.subject if self.exact else subject.lower() == self.subject.lower()


class Listener(Protocol):
    """Who wants to know what happens to the connection. Called on the loop, must not wait."""

    def on_lost(self) -> None:
        """What was sent and not answered may or may not have arrived."""
        ...

    def on_refused(self, refused: Refused) -> None:
        """The server refused a publish to, or a subscription of, a subject."""
        ...


class _Tap:
    """Stands in for the future of a subscription, so that messages are handed over at once, in the socket's order.

    nats-py gives a message to ``future`` if there is one and else to a queue that a task of its own reads.
    """

    def __init__(self, callback: Callable[[Msg], None]) -> None:
        self.set_result = callback

    def cancelled(self) -> bool:
        return False


class _Client(Client):
    """Refuses to go on in the clear where TLS was asked for: nats-py alone would let the server decide."""

    encrypts = False

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        server = self._current_server
        wanted = self.encrypts or (server is not None and server.uri.scheme == "tls")
        if initial_connection and wanted and not info.get("tls_required") and not info.get("tls_available"):
            raise _PlainError("nats: TLS was asked for, and the server does not offer it")
        if wanted and initial_connection:
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)


class _PlainError(NatsError):
    pass


class Link:
    """A connection that is either up, or on its way up again until it is closed.

    Args:
        url: One or more ``nats://`` or ``tls://`` URLs, separated by commas.
        auth: As whom to connect, and whom to trust.
        name: How the server calls this connection, and the first token of its inboxes (after ``_INBOX_``).
    """

    def __init__(self, url: str, *, auth: NatsAuth, name: str) -> None:
        self._servers = [part.strip() for part in url.split(",") if part.strip()]
        if not self._servers:
            raise InvalidArgumentError("the bus needs a URL such as nats://127.0.0.1:4222")
        self._auth = auth
        self._context: ssl.SSLContext | None = None
        self._name = name
        self._nc: Client | None = None
        self._up = asyncio.Event()
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None
        self._last_error: BaseException | None = None
        self._listeners: dict[Listener, None] = {}
        self.generation = 0
        """Counts the clients: subscriptions of an older one are gone."""

    @property
    def up(self) -> bool:
        return self._up.is_set()

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def client(self) -> Client:
        """The client in use, connected or not.

        Raises:
            UnavailableError: If the link was closed or never opened.
        """
        if self._nc is None or self._closing:
            raise UnavailableError("the bus is closed")
        return self._nc

    @property
    def without_jetstream(self) -> bool:
        """Whether the server said, as it does to whoever connects, that it has no JetStream itself."""
        said: Mapping[str, object] = getattr(self.client, "_server_info", {})
        return bool(said) and not said.get("jetstream")

    async def open(self, deadline: Deadline) -> None:
        """Connect for the first time.

        Raises:
            UnavailableError: If nothing answered within the deadline.
            DeniedError: If the server refuses the credentials.
            InvalidArgumentError: If the server is too old, or the URL or credentials cannot be used.
        """
        self._auth.check()
        try:
            async with deadline.scope():
                await self._establish(first=True)
        except TimeoutError as exc:
            raise self._unreachable() from (self._last_error or exc)
        self._keeper = asyncio.create_task(self._keep(), name="bus-link")

    async def close(self) -> None:
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        self._up.set()  # wakes who waits for it, to find the link closed
        await asyncio.sleep(0)
        self._lost()
        if self._nc is not None:
            await _close_client(self._nc)

    def listen(self, listener: Listener) -> None:
        self._listeners[listener] = None

    def forget(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)

    async def wait_up(self, deadline: Deadline) -> None:
        """Return as soon as the connection is up.

        Raises:
            UnavailableError: If it is not within the deadline, or the link is closed.
        """
        try:
            async with deadline.scope():
                while not self._up.is_set() and not self._closing:
                    await self._up.wait()
        except TimeoutError as exc:
            raise self._unreachable() from exc
        if self._closing:
            raise UnavailableError("the bus is closed")

    async def subscribe(self, subject: str, callback: Callable[[Msg], None], *, queue: str = "") -> Subscription:
        """Hand over each message of a subject synchronously, control messages too.

        Args:
            queue: Share the messages with the other subscriptions of that queue, each gets some.
        """
        tap = cast("asyncio.Future[Msg]", _Tap(callback))
        return await self.client.subscribe(subject, queue=queue, future=tap)

    async def unsubscribe(self, subscription: Subscription) -> None:
        if not self._closing:
            with contextlib.suppress(NatsError, OSError):
                await subscription.unsubscribe()

    async def send(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Send without waiting; ``False`` if the connection is down, when nothing was sent."""
        if not self._up.is_set():
            return False
        try:
            await self.client.publish(subject, data, reply=reply, headers=cast("dict[str, Any] | None", headers))
        except (BadSubjectError, BadHeaderError, MaxPayloadError) as exc:
            raise InvalidArgumentError(f"NATS does not take a message on {subject!r}: {exc}", subject=subject) from exc
        except (NatsError, OSError) as exc:
            self._last_error = exc
            return False
        return True

    def _where(self) -> str:
        return ", ".join(_without_password(server) for server in self._servers)

    def _unreachable(self) -> UnavailableError:
        where = self._where()
        return UnavailableError(f"no NATS server answers at {where}: {self._last_error or 'no answer'}", url=where)

    async def _establish(self, *, first: bool) -> None:
        """Try until a client is connected. At the first time what no retry can heal is raised."""
        while True:
            nc = _Client()
            try:
                await self._connect(nc)
                _check_version(nc)
            except (OSError, NatsError, TimeoutError, TensorbusError) as exc:
                await _close_client(nc)
                self._last_error = exc
                if first:
                    _raise_if_final(exc)
                await asyncio.sleep(RECONNECT_WAIT_S)
            except BaseException:
                await _close_client(nc)
                raise
            else:
                self._nc = nc
                self.generation += 1
                self._up.set()
                return

    async def _connect(self, nc: _Client) -> None:
        auth = self._auth
        nc.encrypts = auth.encrypts
        self._context = auth.context() if auth.encrypts else None
        try:
            await nc.connect(
                servers=self._servers,
                name=self._name,
                user_credentials=None if auth.creds is None else str(auth.creds),
                nkeys_seed_str=auth.seed(),
                tls=self._context,
                inbox_prefix=inbox_prefix(self._name),
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=cast("int", RECONNECT_WAIT_S),
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=PING_INTERVAL_S,
                pending_size=0,  # never wait inside nats-py: it swallows cancellation there
            )
        except ssl.SSLError:
            raise  # one of them is a ValueError too
        except ValueError as exc:
            raise InvalidArgumentError(f"the bus cannot use {self._where()} with these credentials: {exc}") from exc
        # The first attempt must fail at once where a retry cannot help; from now on every loss is followed by retries.
        nc.options.update(allow_reconnect=True, max_reconnect_attempts=-1)

    async def _keep(self) -> None:
        """Replace a client that has given up."""
        while True:
            await asyncio.sleep(_GAVE_UP_POLL_S)
            if self._nc is not None and self._nc.is_closed:
                self._lost()
                await self._establish(first=False)

    def _lost(self) -> None:
        self._up.clear()
        for listener in tuple(self._listeners):
            listener.on_lost()

    async def _on_disconnected(self) -> None:
        self._lost()
        if self._context is not None:
            try:
                self._auth.renew(self._context)
            except InvalidArgumentError as exc:
                self._last_error = exc  # the old one may still do

    async def _on_reconnected(self) -> None:
        if not self._closing:
            self._up.set()

    async def _on_error(self, exc: Exception) -> None:
        self._last_error = exc
        if self._nc is not None and not self._nc.is_connected:
            _close_transport(self._nc)
        sent = self._as_sent()
        refused = _REFUSED.search(sent or str(exc))
        if refused is None:
            log.debug("nats: %s", exc)
            return
        told = Refused(refused[2].strip("'\""), exact=sent is not None)
        for listener in tuple(self._listeners):
            listener.on_refused(told)

    def _as_sent(self) -> str | None:
        """The server's error as it sent it, if it is still there: nats-py gives it in lower case, as it takes it out of
        its parser's buffer, and ``w1`` and ``W1`` are two workers."""
        buffer = getattr(getattr(self._nc, "_ps", None), "buf", b"")
        found = _RAW_ERROR.match(buffer)
        return None if found is None else found[1].decode("utf-8", "replace")


async def _close_client(nc: Client) -> None:
    """Close in an orderly way, or, where the server does not read, without its consent."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await nc.close()
    except (TimeoutError, OSError, NatsError, AttributeError):
        writer = getattr(getattr(nc, "_transport", None), "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


def _close_transport(nc: Client) -> None:
    """Close the socket of an attempt that failed: nats-py replaces it with the next one's and forgets it."""
    transport = getattr(nc, "_transport", None)
    if transport is not None:
        transport.close()


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url)


def _check_version(nc: Client) -> None:
    version = nc.connected_server_version
    if (version.major, version.minor) < SERVER_MIN:
        wanted = ".".join(map(str, SERVER_MIN))
        raise InvalidArgumentError(
            f"the NATS server is {version.major}.{version.minor}.{version.patch}; tensorbus needs {wanted} or newer"
        )


def _raise_if_final(exc: BaseException) -> None:
    if isinstance(exc, TensorbusError):
        raise exc
    if isinstance(exc, ssl.SSLCertVerificationError):
        raise DeniedError(f"the NATS server's certificate is not trusted: {exc.verify_message}") from exc
    if isinstance(exc, _PlainError):
        raise DeniedError("TLS was asked for, and the NATS server does not offer it") from exc
    if "authorization" in str(exc).lower() or "authentication" in str(exc).lower():
        raise DeniedError(f"the NATS server refuses the credentials: {exc}") from exc
