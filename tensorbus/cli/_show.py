"""``show``: all that is known of one artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import age, emit_json, facts, name, plain, short_id, size, table
from tensorbus.clock import SystemClock
from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.model import TensorSpec
    from tensorbus.sdk import ArtifactInfo, AsyncBus

TENSORS_SHOWN = 40


@click.command(short_help="Show all that is known of an artifact.")
@click.argument("ref")
@click.option("--all", "every", is_flag=True, help=f"Show every tensor, not only the first {TENSORS_SHOWN}.")
@takes_settings(*CLIENT)
@json_option
def show(resolved: Resolved, *, ref: str, every: bool, as_json: bool) -> None:
    """Show the artifact REF, a key or an id: its tensors, replicas, keys, versions and leases."""

    async def work(bus: AsyncBus) -> None:
        art = await bus.artifact(ref)
        info, specs = await art.info(), list((await art.tensor_meta()).values())
        if as_json:
            emit_json(_as_json(info, specs))
        else:
            _print(info, specs, shown=len(specs) if every else TENSORS_SHOWN)

    with_bus(resolved, work)


def _as_json(info: ArtifactInfo, specs: list[TensorSpec]) -> dict[str, object]:
    """Documented in docs/cli.md."""
    return {
        "id": info.artifact,
        "digest": info.digest,
        "nbytes": info.nbytes,
        "created_ns": info.created_ns,
        "author": info.author,
        "keys": plain(info.keys),
        "versions": [{"name": series, "number": number} for series, number in info.versions],
        "replicas": plain(info.replicas),
        "quarantined": plain(info.quarantined),
        "leases": plain(info.leases),
        "tensors": [
            {"name": s.name, "dtype": s.dtype, "shape": list(s.shape), "nbytes": s.nbytes, "digest": s.digest}
            for s in specs
        ],
    }


def _print(info: ArtifactInfo, specs: list[TensorSpec], *, shown: int) -> None:
    born = age(info.created_ns, now_ns=SystemClock().wall_ns())
    facts(
        [
            ("id", name(info.artifact)),
            ("digest", info.digest or "not known yet"),
            ("size", f"{size(info.nbytes)} in {info.tensors} tensors"),
            ("put", f"{born} ago by worker {info.author}"),
            ("keys", ", ".join(name(key) for key in info.keys) or "none"),
            ("versions", ", ".join(f"{name(series)} v{number}" for series, number in info.versions) or "none"),
        ]
    )
    print()
    replicas = [
        (one.worker, one.host, one.tier, size(one.nbytes), short_id(one.view) if one.view else "whole", one.data or "-")
        for one in info.replicas
    ]
    table(("REPLICA ON", "HOST", "TIER", "SIZE", "OF", "BYTES AT"), replicas, right=("SIZE",))
    if info.quarantined:
        print()
        wrong = [
            (one.worker, one.tier, short_id(one.view) if one.view else "whole", one.cause, str(one.position))
            for one in info.quarantined
        ]
        table(("CORRUPT ON", "TIER", "OF", "FOUND BY", "SINCE"), wrong, right=("SINCE",))
    if info.leases:
        print()
        leases = [
            (
                one.lease,
                one.worker,
                one.purpose,
                one.holder,
                "until released" if one.ttl_s is None else f"{one.ttl_s:g}s",
            )
            for one in info.leases
        ]
        table(("LEASE", "WORKER", "FOR", "HOLDER", "TTL"), leases)
    print()
    rows = [(name(s.name), s.dtype, "x".join(map(str, s.shape)) or "scalar", size(s.nbytes)) for s in specs[:shown]]
    table(("TENSOR", "DTYPE", "SHAPE", "SIZE"), rows, right=("SIZE",))
    if len(specs) > shown:
        print(f"and {len(specs) - shown} more; --all shows them")
