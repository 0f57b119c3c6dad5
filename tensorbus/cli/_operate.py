"""Commands that are an operation of a worker: begun, waited for with a progress bar, told of."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._errors import of_kind
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import emit_json, plain, short_id, size
from tensorbus.cli._progress import Progress
from tensorbus.cli._verdict import command
from tensorbus.config import Resolved, Settings
from tensorbus.errors import DeadlineExceededError, TensorbusError, UnavailableError
from tensorbus.transport import living_workers

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncArtifact, AsyncBus, AsyncOperation, AsyncWorker

F = TypeVar("F", bound=Callable[..., Any])

LOOK_S: Final = 0.2
"""Between two looks at how far an operation is."""
DEADLINE_S_MAX: Final = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What all operations are given on the command line."""

    worker: str | None
    key: str | None
    deadline_s: float | None
    detach: bool
    as_json: bool

    @property
    def how(self) -> dict[str, Any]:
        """As the SDK's methods take it."""
        return {"id": self.key, "deadline_s": self.deadline_s}


Ask = Callable[["AsyncWorker", "AsyncArtifact"], "AsyncOperation[Any]"]


def takes_operation(*, worker: bool = True) -> Callable[[F], F]:
    """Give a command what all operations take; the function gets settings first, and an :class:`Asked` as ``asked``.

    Args:
        worker: Whether who carries it out may be named by ``--worker``.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(resolved: Resolved, **values: Any) -> Any:
            asked = Asked(
                worker=values.pop("worker", None), key=values.pop("key"), deadline_s=values.pop("deadline_s"),
                detach=values.pop("detach"), as_json=values.pop("as_json"),
            )  # fmt: skip
            return function(resolved, asked=asked, **values)

        decorated: Any = takes_settings(*CLIENT)(json_option(run))
        limit = click.FloatRange(min=0, max=DEADLINE_S_MAX)
        text = "Seconds after which the worker gives up; an hour without it."
        decorated = click.option("--deadline", "deadline_s", type=limit, metavar="SECONDS", help=text)(decorated)
        decorated = click.option("--detach", is_flag=True, help="Do not wait for the end; print the id.")(decorated)
        text = "Id of the operation: the same one is the same operation."
        decorated = click.option("--id", "key", metavar="ID", help=text)(decorated)
        if worker:
            text = "The worker; this host's without it."
            decorated = click.option("--worker", metavar="ID", help=text)(decorated)
        return decorated  # type: ignore[no-any-return]  # same call for click, which passes keywords only

    return decorate


def operate(resolved: Resolved, ref: str, what: str, ask: Ask, asked: Asked) -> None:
    """Have an operation begun on the artifact REF, wait for it unless told not to, and say what came of it."""

    async def work(bus: AsyncBus) -> dict[str, Any]:
        art = await bus.artifact(ref)
        at = bus.worker(asked.worker or here(resolved.settings))
        operation = ask(at, art)
        told: dict[str, Any] = {"id": art.base_id, "worker": at.id, "operation": operation.id, "result": None}
        await operation.status()  # begun, or why not
        if not asked.detach:
            told["result"] = plain(await ended(operation, what, resolved.settings))
            told["positions"] = (await operation.status()).positions
        return told

    told = with_bus(resolved, work)
    if asked.as_json:
        emit_json(_as_json(told))
    elif told["result"] is None:
        print(told["operation"])
    else:
        print(_sentence(what, short_id(told["id"]), told["worker"], told["result"]))


async def ended(operation: AsyncOperation[Any], what: str, settings: Settings) -> Any:
    """What comes of an operation, waited for with a progress bar. Who stops waiting is told that it goes on.

    Raises:
        TensorbusError: Why nothing came of it.
    """
    with Progress(what) as bar:
        waiting = asyncio.ensure_future(operation.result())
        try:
            while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
                if sys.stderr.isatty():
                    await _look(operation, bar)
            return waiting.result()
        except DeadlineExceededError as exc:
            if (await operation.status()).state != "running":
                raise  # its own
            advice = command("tensorbus", "op", "show", operation.id, "--wait", "--home", settings.home)
            raise of_kind(exc.kind, f"{exc.message}; it goes on: {advice}", operation=operation.id) from exc
        except asyncio.CancelledError:
            ends = command("tensorbus", "op", "cancel", operation.id, "--home", settings.home)
            print(f"operation {operation.id} goes on; {ends} ends it", file=sys.stderr)
            raise
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def _look(operation: AsyncOperation[Any], bar: Progress) -> None:
    try:
        found = await operation.progress()
    except TensorbusError:
        return  # the bar may wait; the result tells what is wrong
    if found.nbytes_total:
        bar(found.nbytes_done, found.nbytes_total)


def here(settings: Settings) -> str:
    """The worker of this host that holds memory.

    Raises:
        UnavailableError: If there is none.
    """
    for card in living_workers(settings.home):
        if "basic" in card.roles and card.host_id == settings.host_id:
            return card.worker
    raise UnavailableError(
        f"no worker of home {settings.home} holds memory on this host; name one with --worker, or start one with "
        f"`{command('tensorbus', 'up', '--home', settings.home)}`",
        home=str(settings.home),
    )


def _as_json(told: dict[str, Any]) -> dict[str, Any]:
    """Documented in docs/cli.md; ``pin`` says its lease outside the result as well."""
    result = told["result"] or {}
    lease = {key: result[key] for key in ("lease", "ttl_s") if key in result}
    position = {"position": told["positions"]} if told.get("positions") else {}
    return {key: told[key] for key in ("id", "worker", "operation", "result")} | lease | position


def _sentence(what: str, artifact: str, worker: str, result: dict[str, Any]) -> str:
    match what:
        case "prefetch":
            return f"{artifact} is in memory of worker {worker} ({size(result['nbytes'])}, {result['path']})"
        case "pin":
            return str(result["lease"])
        case "replicate":
            return f"{artifact} is on {', '.join(result['workers'])}; {size(result['nbytes'])} were copied"
        case "migrate":
            return f"{artifact} is on worker {result['dst']} and gone from {result['src']} ({size(result['nbytes'])})"
        case "evict":
            return f"{artifact} is gone from worker {worker}" + ("" if result["evicted"] else ", which had no copy")
        case "persist":
            return f"{artifact} is on disk of worker {worker} ({size(result['nbytes'])})"
        case "verify":
            tiers, tensors = " and ".join(result["tiers"]), result["tensors"]
            return f"{artifact} on worker {worker} is as its digests promise: {tensors} tensors in {tiers}"
        case _:
            return f"{what} of {artifact} on worker {worker} is done"
