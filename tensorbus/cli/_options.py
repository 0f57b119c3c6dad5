"""Options that many commands share: settings as flags, and ``--json``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tensorbus.config import Settings, load

F = TypeVar("F", bound=Callable[..., Any])

CLIENT: Final = ("home", "host_id", "url", "tenant", "timeout_s")
"""Settings of commands that talk to a worker."""

NATS: Final = ("nats_creds", "nats_nkey_seed", "nats_tls_ca", "nats_tls_cert", "nats_tls_key")
"""Settings that say as whom to connect to NATS, and whom to trust."""

WORKER: Final = (
    "home",
    "host_id",
    "nats_url",
    *NATS,
    "nats_replicas",
    "subject_prefix",
    "session_ttl_s",
    "heartbeat_s",
    "pool_bytes",
    "reserve_bytes",
    "memory_high",
    "memory_low",
    "eviction",
    "disk_bytes",
    "disk_dir",
    "data_host",
    "data_port",
    "data_connections",
    "data_verify",
    "data_tls_cert",
    "data_tls_key",
    "data_tls_ca",
    "gateway_host",
    "gateway_port",
    "gateway_sql",
    "page_shards",
    "page_snapshot_batches",
    "page_purge_delay_s",
    "archive_url",
    "archive_s",
    "snapshot_facts",
    "keep_facts",
    "purge_delay_s",
    "forget_s",
    "resign_s",
    "store_memory_bytes",
    "log_level",
)
"""Settings of commands that start workers."""

_EXTRA_FLAGS: Final = {"timeout_s": ("--timeout",), "worker_id": ("--id",)}
_METAVARS: Final = {
    "home": "DIR",
    "url": "URL",
    "nats_url": "URL",
    "nats_creds": "FILE",
    "nats_nkey_seed": "FILE",
    "nats_tls_ca": "FILE",
    "nats_tls_cert": "FILE",
    "nats_tls_key": "FILE",
    "nats_replicas": "NUMBER",
    "nats_user": "NAME",
    "timeout_s": "SECONDS",
    "archive_url": "URL",
    "archive_s": "SECONDS",
    "snapshot_facts": "NUMBER",
    "keep_facts": "NUMBER",
    "purge_delay_s": "SECONDS",
    "forget_s": "SECONDS",
    "resign_s": "SECONDS",
    "store_memory_bytes": "SIZE",
    "session_ttl_s": "SECONDS",
    "heartbeat_s": "SECONDS",
    "pool_bytes": "SIZE",
    "reserve_bytes": "SIZE",
    "data_port": "PORT",
    "gateway_port": "PORT",
    "data_host": "ADDRESS",
    "data_connections": "NUMBER",
    "data_verify": "HOW",
    "data_tls_cert": "FILE",
    "data_tls_key": "FILE",
    "data_tls_ca": "FILE",
    "gateway_host": "ADDRESS",
    "gateway_sql": "BOOL",
    "log_level": "LEVEL",
}


class GivenPath(click.Path):
    """A path; no empty one, which would mean the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value):
            self.fail("a path must not be empty", param, ctx)
        return super().convert(value, param, ctx)


def flag_of(name: str) -> str:
    """The flag that sets a setting."""
    return "--" + name.replace("_", "-")


def takes_flags(*names: str) -> Callable[[F], F]:
    """Give a command a flag for each setting; the function gets their values, ``None`` where not given, as a dict."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(**values: Any) -> Any:
            return function({name: values.pop(name) for name in names}, **values)

        for name in reversed(names):
            flags = (*_EXTRA_FLAGS.get(name, ()), flag_of(name))
            help_text = Settings.model_fields[name].description
            click.option(*flags, name, metavar=_METAVARS.get(name, "TEXT"), help=help_text)(run)
        return run  # type: ignore[return-value]  # same call for click, which passes keywords only

    return decorate


def takes_settings(*names: str) -> Callable[[F], F]:
    """Give a command a flag for each setting; the function gets a :class:`Resolved` first instead of their values."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(flags: dict[str, object], **values: Any) -> Any:
            return function(load(flags), **values)

        return takes_flags(*names)(run)  # type: ignore[return-value]  # as above

    return decorate


def json_option(function: F) -> F:
    """``--json``, passed on as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, as documented in docs/cli.md.")(function)
