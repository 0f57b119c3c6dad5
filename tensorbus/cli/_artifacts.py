"""``put`` and ``get``: bytes in, bytes out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, GivenPath, json_option, takes_settings
from tensorbus.cli._output import emit_json, name, size
from tensorbus.cli._progress import Progress
from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus


@click.command(short_help="Take in a safetensors file or directory.")
@click.argument("path", type=GivenPath())
@click.option("--key", metavar="KEY", help="A name that can be moved to another artifact later.")
@click.option("--id", "artifact_id", metavar="ID", help="A name for good; without it the id follows from the content.")
@click.option("--rebind", is_flag=True, help="Take KEY from the artifact that has it now.")
@click.option(
    "--digest",
    type=click.Choice(["now", "later"]),
    default="now",
    show_default=True,
    help="later leaves the hashing to the worker and gives a random id.",
)
@click.option(
    "--disk",
    type=click.Choice(["must", "should", "may"]),
    default="may",
    show_default=True,
    help="must waits until the bytes are on the worker's disk too, where its next life finds them.",
)
@takes_settings(*CLIENT)
@json_option
def put(
    resolved: Resolved,
    *,
    path: Path,
    key: str | None,
    artifact_id: str | None,
    rebind: bool,
    digest: Literal["now", "later"],
    disk: Literal["must", "should", "may"],
    as_json: bool,
) -> None:
    """Take in the tensors of PATH, a safetensors file or a directory of them."""

    async def work(bus: AsyncBus) -> None:
        with Progress(f"put {name(path.name)}") as progress:
            art = await bus.put(
                path, key=key, id=artifact_id, rebind=rebind, digest=digest, disk=disk, progress=progress
            )
        info = await art.info()
        if as_json:
            shown = {"id": art.id, "digest": info.digest, "key": key, "nbytes": info.nbytes, "tensors": info.tensors}
            emit_json({**shown, "position": art.position})
        else:
            print(art.id)
            named = f" as {name(key)}" if key is not None else ""
            print(f"{info.tensors} tensors, {size(info.nbytes)}, in memory of worker {info.replicas[0].worker}{named}")

    with_bus(resolved, work)


@click.command(short_help="Write an artifact to a safetensors file.")
@click.argument("ref")
@click.option(
    "-o",
    "--output",
    type=GivenPath(),
    required=True,
    metavar="PATH",
    help="A directory, which gets a model.safetensors, or a file that ends in .safetensors.",
)
@takes_settings(*CLIENT)
@json_option
def get(resolved: Resolved, *, ref: str, output: Path, as_json: bool) -> None:
    """Write the artifact REF, a key or an id, to a safetensors file."""
    if output.exists() and not output.is_dir() and not (output.is_file() and output.suffix == ".safetensors"):
        raise click.UsageError(f"{output} is neither a directory nor a file that ends in .safetensors")

    async def work(bus: AsyncBus) -> None:
        art = await bus.artifact(ref)
        with Progress(f"get {name(ref)}") as progress:
            path = await art.save(output, progress=progress)
        if as_json:
            emit_json({"id": art.id, "path": path, "nbytes": art.nbytes, "tensors": len(await art.names())})
        else:
            print(f"{path}: {len(await art.names())} tensors, {size(art.nbytes)}")

    with_bus(resolved, work)
