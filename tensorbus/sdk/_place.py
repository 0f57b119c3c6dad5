"""Where a bus speaks: a home and a host id, or a gateway's address; and who is there to speak to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tensorbus.config import Settings, load
from tensorbus.errors import InvalidArgumentError, UnavailableError
from tensorbus.transport import TlsFiles, Ways, WorkerCard, living_workers, tls_files

_BUS_URL_FILE: Final = "bus.url"
"""In a home: the URL of its embedded server, as long as that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a bus was connected with. Equal places reach the same artifacts; handles are pickled with theirs.

    Attributes:
        url: A gateway's address; with it, home and host id only name the caller's side.
        timeout_s: Seconds that a call may take when it names no timeout.
        tls: With what to show other hosts' workers who this process is, where the cluster's bytes go over TLS.
        connections: The most that one transfer from other hosts uses.
    """

    home: Path
    host_id: str
    url: str | None
    tenant: str
    timeout_s: float
    tls: TlsFiles | None = None
    connections: int = 4

    def ways(self) -> Ways:
        """How bytes are read from workers on other hosts."""
        tls = None if self.tls is None else self.tls.context(server=False)
        return Ways(connections=self.connections, tls=tls)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusAddress:
    """Where the bus itself is: NATS URLs, and the settings that say as whom to connect."""

    url: str
    settings: Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A worker to connect to: a unix socket's path, or a host and port."""

    worker: str
    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else f"{self.host}:{self.port}"


def resolve_place(flags: Mapping[str, object]) -> Place:
    """The place that flags, environment and settings file name.

    Raises:
        InvalidArgumentError: For a setting that cannot be.
    """
    found = load(flags).settings
    url = found.url
    if flags.get("url") is None and flags.get("home") is not None:
        url = None  # who names a home means that one, whatever gateway the environment names
    return Place(
        home=found.home,
        host_id=found.host_id,
        url=url,
        tenant=found.tenant,
        timeout_s=found.timeout_s,
        tls=tls_files(found),
        connections=found.data_connections,
    )


def bus_address(flags: Mapping[str, object]) -> BusAddress:
    """The bus of the place that flags, environment and settings file name: the operator's, else the home's own.

    Raises:
        UnavailableError: If the home has none; InvalidArgumentError: If only a gateway is named.
    """
    found = load(flags).settings
    if found.nats_url is not None:
        return BusAddress(url=found.nats_url, settings=found)
    if found.url is not None and flags.get("home") is None:
        raise InvalidArgumentError(
            f'directory="full" reads the bus itself, of which the gateway {found.url} does not tell; '
            "set TENSORBUS_NATS_URL"
        )
    try:
        url = (found.home / _BUS_URL_FILE).read_text(encoding="ascii").strip()
    except OSError as exc:
        raise UnavailableError(
            f'directory="full" reads the bus itself, and home {found.home} has none: start one with '
            f"`tensorbus up --home {_typed(found.home)}`, or set TENSORBUS_NATS_URL",
            home=str(found.home),
        ) from exc
    return BusAddress(url=url, settings=found)


def _typed(word: str | Path) -> str:
    """A word so that a shell takes it as one."""
    return shlex.quote(str(word))


def addresses(place: Place) -> list[Address]:
    """Whom to connect to, best first: the worker of the same host, another one there, else a gateway of the home.

    On the same host a gateway or store is spoken to by its unix socket, which says who the caller is.

    Raises:
        UnavailableError: If nobody is there; says what to start.
        InvalidArgumentError: If the gateway's URL is of a kind that cannot be spoken yet.
    """
    if place.url is not None:
        return [_gateway(place.url)]
    cards = living_workers(place.home)
    local = sorted((card for card in cards if card.host_id == place.host_id), key=_preference)
    gateways = [card for card in cards if "gateway" in card.roles and card not in local]
    found = [Address(worker=card.worker, path=place.home / "run" / card.socket) for card in local]
    found += [_remote(card) for card in gateways if card.control]
    if found:
        return found
    if cards:
        hosts = ", ".join(sorted({card.host_id for card in cards}))
        raise UnavailableError(
            f"home {place.home} has no worker for host id {place.host_id!r} (there are: {hosts}) and no gateway; "
            f"start one with `tensorbus worker --home {_typed(place.home)} --host-id {_typed(place.host_id)}`, "
            "or name another host_id",
            home=str(place.home),
            host_id=place.host_id,
        )
    raise UnavailableError(
        f"no worker runs for home {place.home}; start one with `tensorbus up --home {_typed(place.home)}`",
        home=str(place.home),
    )


def _gateway(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme != "tb+tcp":
        raise InvalidArgumentError(
            f"{url}: TLS to a gateway is not there yet; use tb+tcp://host:port on a network that you trust", url=url
        )
    return Address(worker="", host=str(parts.hostname), port=int(parts.port or 0))


def _preference(card: WorkerCard) -> int:
    """Who holds memory comes first, then who serves callers that have none."""
    return next((at for at, role in enumerate(("basic", "gateway")) if role in card.roles), 2)


def _remote(card: WorkerCard) -> Address:
    host, _, port = card.control.rpartition(":")
    return Address(worker=card.worker, host=host.strip("[]"), port=int(port))
