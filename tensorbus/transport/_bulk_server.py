"""Serving segment bytes over TCP, from threads of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from typing import Final

from tensorbus.clock import NS_PER_S, SystemClock
from tensorbus.errors import DeniedError, TensorbusError, UnavailableError
from tensorbus.transport._bulk import LostError, TlsWire, Wire
from tensorbus.transport._bulk_pages import PageOwner
from tensorbus.transport._bulk_talk import HELLO_BYTES_MAX, BulkOwner, Talk, Times, send_error
from tensorbus.transport._sockets import bound_tcp, tune
from tensorbus.transport._tls import FIRST_BYTE, shake_hands

log = logging.getLogger("tensorbus.transport")

_CLOCK = SystemClock()
_TURN_AWAY_S: Final = 1.0
_RETRY_S: Final = 0.05
_WAITS_MAX: Final = 4


class BulkServer:
    """One accepting thread for each address, and one thread more for each connection.

    Args:
        host: Address to listen at; several with commas.
        port: The same for all; 0 takes a free one for each (see :attr:`address`).
        owner: Asked for sources and sinks.
        pages: Asked for pages; ``None`` has none.
        connections_max: Beyond that a newcomer takes the place of the connection that has asked for nothing for
            longest, and of none if all are at work: then it is told to come again (UnavailableError) and closed.
        spare_s: How long a connection is spared after it was last at work.
        hello_s: A connection that does not greet within that time is closed.
        idle_s: A connection that asks for nothing for so long is closed, which releases what it has open.
        stall_s: A connection that takes or sends nothing for so long within a transfer is closed.
        tls: With what to speak TLS; a plain connection is refused then.

    Raises:
        ConflictError: If the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        owner: BulkOwner,
        *,
        pages: PageOwner | None = None,
        connections_max: int = 256,
        spare_s: float = 1.0,
        hello_s: float = 5.0,
        idle_s: float = 600.0,
        stall_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._owner = owner
        self._pages = pages
        self._connections_max = connections_max
        self._spare_ns = int(spare_s * NS_PER_S)
        self._times = Times(hello_s=hello_s, idle_s=idle_s, stall_s=stall_s)
        self._tls = tls
        self._lock = threading.Lock()
        self._served: dict[_Served, threading.Thread] = {}
        self._ending: list[threading.Thread] = []
        self._closed = False
        self._listeners: list[socket.socket] = []
        try:
            for one in host.split(","):
                self._listeners.append(bound_tcp(one.strip(), port))
        except BaseException:
            self._close_listeners()
            raise
        self.addresses: list[tuple[str, int]] = [sock.getsockname()[:2] for sock in self._listeners]
        self.host, self.port = self.addresses[0]
        self._acceptors = [
            threading.Thread(target=self._accept, args=(sock,), name="bulk accept", daemon=True)
            for sock in self._listeners
        ]
        for thread in self._acceptors:
            thread.start()

    @property
    def address(self) -> str:
        """``host:port``, several with commas."""
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.addresses)

    def close(self) -> None:
        """End all connections and threads, releasing every source. Blocks shortly. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for served in self._served:
                served.abort()
            threads = [*self._served.values(), *self._ending]
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
        for thread in [*self._acceptors, *threads]:
            thread.join()
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, (host, port, *_) = listener.accept()
            except OSError as exc:
                if self._closed:
                    return
                log.warning("bulk accept failed: %s", exc)
                threading.Event().wait(_RETRY_S)  # out of descriptors: the connections that end give some back
                continue
            self._admit(sock, f"{host}:{port}")

    def _admit(self, sock: socket.socket, peer: str) -> None:
        try:
            tune(sock)
        except OSError:
            sock.close()  # gone already
            return
        served = _Served(sock, peer)
        thread = threading.Thread(target=self._serve, args=(served,), name=f"bulk {peer}", daemon=True)
        with self._lock:
            if not self._closed and (len(self._served) < self._connections_max or self._make_room()):
                self._served[served] = thread
                thread.start()
                return
        error = UnavailableError(f"{self._connections_max} connections are at work; come again", busy=True)
        self._turn_away(sock, peer, error)
        sock.close()

    def _make_room(self) -> bool:
        """End the connection that waits for its next request for longest; says whether there was one."""
        idle = [
            (served.idle_since_ns, number, served) for number, served in enumerate(self._served) if served.idle_since_ns
        ]
        if not idle:
            return False
        since_ns, _, served = min(idle)
        if _CLOCK.now_ns() - since_ns < self._spare_ns:
            return False
        self._let_go(served)
        served.abort()
        return True

    def _let_go(self, served: _Served) -> None:
        """Its place is free; its thread is still to be waited for."""
        thread = self._served.pop(served, None)
        if thread is not None:
            self._ending = [*(other for other in self._ending if other.is_alive()), thread]

    def _turn_away(self, sock: socket.socket, peer: str, error: TensorbusError) -> None:
        with contextlib.suppress(TensorbusError, OSError):
            wire = Wire(sock, peer=peer, header_bytes_max=0)
            wire.set_timeout(_TURN_AWAY_S)
            send_error(wire, error)
            wire.abort()

    def _serve(self, served: _Served) -> None:
        try:
            wire = self._secured(served)
            if wire is not None:
                served.talk = Talk(wire, self._owner, times=self._times, clock=_CLOCK, pages=self._pages)
                served.talk.run()
        except LostError as exc:
            log.debug("bulk connection ended: %s", exc)
        except TensorbusError as exc:
            log.info("bulk connection of %s ended: %s", served.peer, exc)
        except Exception:  # the thread's edge: the connection ends, the server goes on
            log.exception("bulk connection of %s failed", served.peer)
        finally:
            if served.talk is not None:
                served.talk.release()
            served.abort()
            served.sock.close()
            with self._lock:
                self._let_go(served)

    def _secured(self, served: _Served) -> Wire | None:
        """The connection as the cluster wants it; ``None`` if the peer does not speak it so."""
        sock, peer = served.sock, served.peer
        try:
            sock.settimeout(self._times.hello_s)
            first = sock.recv(1, socket.MSG_PEEK)
        except OSError:
            return None
        if not first:
            return None
        secure = first[0] == FIRST_BYTE
        if secure != (self._tls is not None):
            wanted = "in the clear" if secure else "over TLS only"
            self._turn_away(sock, peer, DeniedError(f"this side moves bytes {wanted}; see the setting data_tls_cert"))
            return None
        if self._tls is None:
            return Wire(sock, peer=peer, header_bytes_max=HELLO_BYTES_MAX, waits_max=_WAITS_MAX)
        with served.swapping:
            served.sock = secured = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        shake_hands(secured)
        return TlsWire(secured, peer=peer, header_bytes_max=HELLO_BYTES_MAX)


class _Served:
    """A connection and the socket that it has just now."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.talk: Talk | None = None
        self.swapping = threading.Lock()

    @property
    def idle_since_ns(self) -> int:
        return 0 if self.talk is None else self.talk.idle_since_ns

    def abort(self) -> None:
        """Wake the thread that serves it; the descriptor stays."""
        with self.swapping, contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
