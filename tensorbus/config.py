"""Settings: read once, at the edge, into a frozen object.

A value comes from a flag, else from ``TENSORBUS_<NAME>`` in the environment, else from a TOML file
(``$TENSORBUS_CONFIG``, or ``config.toml`` in the home), else from the default; :class:`Resolved` says which.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tensorbus.errors import InvalidArgumentError
from tensorbus.ids import b32, check_worker_id, prefixed

ENV_PREFIX: Final = "TENSORBUS_"
CONFIG_ENV: Final = "TENSORBUS_CONFIG"
FILE_NAME: Final = "config.toml"
HOME_DEFAULT: Final = "~/.local/share/tensorbus"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B)?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Eviction(StrEnum):
    """What leaves memory first."""

    LRU = "lru"
    LFU = "lfu"
    S3FIFO = "s3fifo"


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Verify(StrEnum):
    """How bytes that come from another host are checked."""

    OFF = "off"
    BLOCKS = "blocks"
    DIGESTS = "digests"


def parse_size(value: object) -> object:
    """``"4GiB"``, ``"512 MB"`` or ``"1024"`` as bytes; what is no text passes through."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("must be a number of bytes, or one with a unit, e.g. 512MiB or 4GiB")
    unit = (match[2] or "B").lower()
    base = 1024 if "i" in unit else 1000
    return int(float(match[1]) * base ** _POWERS[unit.rstrip("b").rstrip("i")])


def machine_host_id() -> str:
    """What stands for this machine: a hash of its machine id, which itself should not leave it, else of its name."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    return b32(blake3(prefixed("host", machine or socket.gethostname())).digest(length=10))


def memory_bytes() -> int:
    """Physical memory, or the limit of the control group when that is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max"
        return physical
    return min(physical, limit)


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _checked_url(text: str, *, schemes: tuple[str, ...], port_needed: bool) -> str:
    parts = urlsplit(text)
    expected = " or ".join(f"{scheme}://host{':port' if port_needed else '[:port]'}" for scheme in schemes)
    try:
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"must be {expected}, its port is not a port") from exc
    if parts.scheme not in schemes or not parts.hostname or (port_needed and port is None):
        raise ValueError(f"must be {expected}")
    return text


def _gateway_url(text: str) -> str:
    return _checked_url(text, schemes=("tb+tcp", "tb+tls"), port_needed=True)


def _odd(replicas: int) -> int:
    if replicas not in (1, 3, 5):
        raise ValueError("must be 1, 3 or 5")
    return replicas


def _power_of_two(shards: int) -> int:
    if shards & (shards - 1):
        raise ValueError("must be a power of two")
    return shards


def _nats_urls(text: str) -> str:
    for one in text.split(","):
        _checked_url(one.strip(), schemes=("nats", "tls", "ws", "wss"), port_needed=False)
    return text


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """Every setting, with its unit and bounds. Made by :func:`load`; tests may make one directly."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Annotated[Path, AfterValidator(_absolute)] = Field(
        default_factory=lambda: Path(HOME_DEFAULT),
        validate_default=True,
        description=f"Directory of sockets, bus, store and pid files; two homes never meet (default: {HOME_DEFAULT}).",
    )
    host_id: Label = Field(
        default_factory=machine_host_id,
        description="Equal where memory can be shared; 1 to 64 of A-Z a-z 0-9 _ . - (default: the machine's).",
    )
    url: Annotated[str, AfterValidator(_gateway_url)] | None = Field(
        None,
        description="Gateway to connect to, tb+tcp://host:port or tb+tls://host:port (default: the home's worker).",
    )
    nats_url: Annotated[str, AfterValidator(_nats_urls)] | None = Field(
        None, description="NATS servers, nats://host:port, several with commas (default: the home's embedded server)."
    )
    nats_creds: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description="NATS credentials file for nats_url."
    )
    nats_nkey_seed: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description="File with the seed of the nkey that nats_url's servers know this process by."
    )
    nats_tls_ca: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description="Certificates (PEM) that the NATS servers' are signed with; a server without TLS is refused."
    )
    nats_tls_cert: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description="Client certificate (PEM), for NATS servers that ask for one; needs nats_tls_key."
    )
    nats_tls_key: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description="Private key (PEM) of nats_tls_cert."
    )
    nats_user: Annotated[str, AfterValidator(check_worker_id)] | None = Field(
        None,
        description="Name for which a caller's or operator's NATS permissions were made; a worker's is its worker_id.",
    )
    nats_replicas: Annotated[int, AfterValidator(_odd)] = Field(
        1, description="NATS servers that keep a copy of each stream: 1, 3 or 5."
    )
    subject_prefix: str = Field(
        "tb",
        pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$",
        max_length=64,
        description="First tokens of every subject; separates systems on one NATS account; at most 64 characters.",
    )
    tenant: Label = Field("default", description="Whose keys and ids are meant; 1 to 64 of A-Z a-z 0-9 _ . -.")
    worker_id: Annotated[str, AfterValidator(check_worker_id)] | None = Field(
        None, description="Name of the worker on the log; 1 to 64 of A-Z a-z 0-9 _ - (default: one made for the home)."
    )
    session_ttl_s: Annotated[float, Field(ge=2, le=3600, allow_inf_nan=False)] = Field(
        15.0, description="Seconds of silence after which a worker's session may be ended; 2 to 3600, 10 or more on R3."
    )
    heartbeat_s: Seconds = Field(
        default_factory=lambda data: float(data["session_ttl_s"]) / 5,
        description="Seconds between heartbeats; at most half of session_ttl_s (default: a fifth of it).",
    )
    pool_bytes: Size = Field(
        default_factory=lambda: memory_bytes() // 4,
        description="Memory for replicas, in bytes or as 4GiB; at least 1MiB (default: a quarter of the machine's).",
        ge=1 << 20,
    )
    reserve_bytes: Size = Field(
        0, description="Part of the pool that is made ready at start, in bytes or as 1GiB; 0 to pool_bytes."
    )
    memory_high: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        0.95, description="Part of the pool in use from which copies leave memory by themselves; over 0, at most 1."
    )
    memory_low: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default_factory=lambda data: max(0.0, float(data["memory_high"]) - 0.1),
        description="Part of the pool down to which they do; 0 to memory_high (default: a tenth of the pool less).",
    )
    eviction: Eviction = Field(Eviction.LRU, description="What leaves memory first: lru, lfu or s3fifo.")
    disk_bytes: Size = Field(
        0, description="Disk for replicas that leave memory, or are to survive it, in bytes or as 100GiB; 0 uses none."
    )
    disk_dir: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description="Folder for these; workers may share one (default: disk in the home)."
    )
    timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = Field(
        30.0, description="Seconds that a call may take when it names no timeout; over 0, at most 86400."
    )
    data_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address where other workers read bytes; several with commas, and transfers use them side by side.",
    )
    data_port: Port = Field(0, description="Port where other workers read bytes; 0 to 65535, 0 takes a free one.")
    data_connections: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="Connections that one transfer of bytes from other hosts uses at most; 1 to 64."
    )
    data_verify: Verify = Field(
        Verify.DIGESTS,
        description="How bytes from other hosts are checked: digests (a checksum of each 4 MiB, against changes on the "
        "way, and the BLAKE3 of each tensor, against changes at the source), blocks (only the former) or off.",
    )
    data_tls_cert: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None,
        description="This process's certificate (PEM) for bytes between hosts; needs data_tls_key and data_tls_ca. "
        "With it they go over TLS only.",
    )
    data_tls_key: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description="Private key (PEM) of data_tls_cert."
    )
    data_tls_ca: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description="Certificates (PEM) of the cluster's own authority: whom it vouches for may move bytes."
    )
    gateway_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address where callers without a worker connect, and those who ask a home.",
    )
    gateway_port: Port = Field(0, description="Port of these; 0 to 65535, 0 takes a free one.")
    gateway_sql: bool = Field(
        False,
        description="Whether a gateway takes SQL over TCP, which sees every tenant: true or false. Other questions "
        "about the past are confined to the caller's tenant and always taken.",
    )
    page_shards: Annotated[int, Field(ge=1, le=65536), AfterValidator(_power_of_two)] = Field(
        64,
        description="Shards of the cluster's pages, a power of two up to 65536; the first home fixes it for ever.",
    )
    page_snapshot_batches: Annotated[int, Field(ge=1)] = Field(
        200, description="Batches of up to a thousand changes after which a home stores a shard of pages; at least 1."
    )
    page_purge_delay_s: Seconds = Field(
        120.0, description="Seconds after which a store purges what a confirmed snapshot of a shard stands for."
    )
    purge_delay_s: Seconds = Field(
        600.0,
        description="Seconds between the announcement of a purge of the log and the purge; a reader that was cut off "
        "for longer starts anew from a snapshot.",
    )
    archive_url: str | None = Field(
        None, description="Folder or fsspec URL of the log's archive (default: archive in the home)."
    )
    archive_s: Seconds = Field(60.0, description="Seconds after which a store writes new facts to the archive.")
    snapshot_facts: Annotated[int, Field(ge=1)] = Field(
        50_000, description="Facts after which a store takes a snapshot of the directory; at least 1."
    )
    keep_facts: Annotated[int, Field(ge=0)] = Field(
        200_000, description="Facts that stay in the log; older ones are purged once archived and in a snapshot."
    )
    forget_s: Seconds = Field(
        7 * 86400.0, description="Seconds after which what has ended is forgotten; its id is free again."
    )
    resign_s: Seconds = Field(
        60.0,
        description="Seconds after which the store that keeps the log, and cannot, gives that role up for another one.",
    )
    store_memory_bytes: Annotated[Size, Field(ge=64 << 20)] = Field(
        1 << 30, description="Memory that a store's database may use, in bytes or as 1GiB; at least 64MiB."
    )
    log_level: LogLevel = Field(LogLevel.INFO, description="How much is logged: debug, info, warning or error.")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.heartbeat_s > self.session_ttl_s / 2:
            raise ValueError(
                f"heartbeat_s {self.heartbeat_s:g} must be at most half of session_ttl_s {self.session_ttl_s:g}, "
                "or one lost heartbeat ends the session"
            )
        if self.nats_creds is not None and self.nats_nkey_seed is not None:
            raise ValueError("nats_creds and nats_nkey_seed are two ways to say the same; name one")
        if (self.nats_tls_cert is None) != (self.nats_tls_key is None):
            raise ValueError("nats_tls_cert and nats_tls_key go together")
        if len({self.data_tls_cert is None, self.data_tls_key is None, self.data_tls_ca is None}) == 2:
            raise ValueError("data_tls_cert, data_tls_key and data_tls_ca go together")
        if self.memory_low > self.memory_high:
            raise ValueError(f"memory_low {self.memory_low:g} must be at most memory_high {self.memory_high:g}")
        if self.reserve_bytes > self.pool_bytes:
            raise ValueError(f"reserve_bytes {self.reserve_bytes} must be at most pool_bytes {self.pool_bytes}")
        return self


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings in force and where each came from.

    Attributes:
        settings: The values.
        origins: For each name ``"default"``, ``"file <path>"``, ``"env TENSORBUS_<NAME>"`` or ``"flag"``.
    """

    settings: Settings
    origins: Mapping[str, str]


def load(flags: Mapping[str, object] | None = None, env: Mapping[str, str] | None = None) -> Resolved:
    """Read flags, environment and file into one frozen object.

    Args:
        flags: Values by the names of :class:`Settings`; ``None`` means not given.
        env: The environment; the process's own when ``None``. An empty variable counts as not set.

    Raises:
        InvalidArgumentError: For an unknown name, a value out of bounds, or a file that cannot be read. It names every
            offending value and its origin.
    """
    environment = os.environ if env is None else env
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _check_names(given, origin="flag")
    from_env = _from_env(environment)
    home = Path(str(given.get("home", from_env.get("home", HOME_DEFAULT)))).expanduser()
    path, from_file = _from_file(environment.get(CONFIG_ENV) or None, home)

    values: dict[str, object] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    for source, origin in ((from_file, f"file {path}"), (from_env, "env"), (given, "flag")):
        for name, value in source.items():
            values[name] = value
            origins[name] = f"env {ENV_PREFIX}{name.upper()}" if origin == "env" else origin
    return Resolved(settings=_validated(values, origins), origins=origins)


def _from_env(env: Mapping[str, str]) -> dict[str, str]:
    found = {
        key.removeprefix(ENV_PREFIX).lower(): value
        for key, value in env.items()
        if key.startswith(ENV_PREFIX) and key != CONFIG_ENV and value
    }
    _check_names(found, origin="env")
    return found


def _from_file(named: str | None, home: Path) -> tuple[Path, dict[str, Any]]:
    path = Path(named).expanduser().absolute() if named else home.absolute() / FILE_NAME
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as exc:
        if named:
            raise InvalidArgumentError(f"{CONFIG_ENV} names {path}, which is not there", path=str(path)) from exc
        return path, {}
    except OSError as exc:
        raise InvalidArgumentError(f"cannot read the settings in {path}: {exc.strerror}", path=str(path)) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidArgumentError(f"the settings in {path} are not TOML: {exc}", path=str(path)) from exc
    _check_names(values, origin=f"file {path}")
    if "home" in values and not named:
        raise InvalidArgumentError(f"{path} lies in a home and cannot name another; remove 'home'", path=str(path))
    return path, values


def _check_names(names: Iterable[str], *, origin: str) -> None:
    known = Settings.model_fields
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        shown, hint = name, near[0] if near else ""
        if origin == "env":
            shown, hint = ENV_PREFIX + name.upper(), ENV_PREFIX + hint.upper() if hint else ""
        advice = f"did you mean {hint}?" if hint else "`tensorbus config` lists those there are"
        place = "" if origin == "env" else f" ({origin})"
        raise InvalidArgumentError(f"there is no setting {shown}{place}; {advice}", setting=name, origin=origin)


def _validated(values: Mapping[str, object], origins: Mapping[str, str]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        problems = []
        for error in exc.errors():
            if error["type"] == "default_factory_not_called":  # only follows from another problem
                continue
            text = str(error["msg"]).removeprefix("Value error, ")
            if not error["loc"]:
                problems.append(text)
                continue
            name = str(error["loc"][0])
            problems.append(f"{name} = {values.get(name)!r} ({origins[name]}): {text}")
        raise InvalidArgumentError("; ".join(problems), settings=problems) from exc
