"""Recorded logs that every later version must read: ``<name>.jsonl`` (messages), ``<name>.json`` (what they fold to).

``python -m tests.golden.logs.make v2`` writes a new pair from the history below, and never one that is there already:
what was shipped is in somebody's log. ``--hash NAME`` prints the hash that a recorded log folds to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorbus.events import (
    STORE_ROLE,
    AnyRecorded,
    DestroyReason,
    DropReason,
    FoldRaised,
    OperationOutcome,
    QuarantineCause,
    RoleGranted,
    RoleResigned,
    SessionEnd,
    SessionEnded,
    ShardsFixed,
    Tier,
    UnknownEvent,
    aggregate_of,
    decode,
    encode,
    headers_to_wire,
)
from tensorbus.lifecycle import Directory, LogState
from tests.unit.lifecycle import history as h

HERE = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.jsonl"))


def read(name: str) -> Iterator[AnyRecorded]:
    for line in (HERE / f"{name}.jsonl").read_text("utf-8").splitlines():
        message = json.loads(line)
        yield decode(**{**message, "data": message["data"].encode()})


def fold(name: str) -> Directory:
    state = Directory()
    for message in read(name):
        state.apply(message)
    return state


def outcome(state: Directory) -> dict[str, Any]:
    """What a log folds to: the hash, and enough words to see where it differs."""
    return {
        "hash": state.hash(),
        "seq": state.seq,
        "sessions": {w: [s.incarnation, s.ended, s.number] for w, s in state.sessions.items()},
        "artifacts": {
            f"{tenant}/{artifact}": [
                record.digest,
                record.destroyed,
                [[r.worker, r.view, r.tier, r.lease] for r in record.replicas.values()],
                sorted(record.leases),
                sorted(record.keys),
            ]
            for (tenant, artifact), record in state.artifacts.items()
        },
        "keys": {f"{tenant}/{name}": [key.artifact, key.gone] for (tenant, name), key in state.keys.items()},
        "series": {f"{t}/{name}": [s.last, sorted(s.versions)] for (t, name), s in state.series.items()},
        **(
            {"roles": {r.role: [r.worker, r.incarnation, r.token] for r in state.roles.values()}} if state.roles else {}
        ),
        **({"log": asdict(state.log)} if state.log != LogState() else {}),
        **({"shards": state.shards} if state.shards else {}),
        **(
            {"operations": {"/".join(w): [o.worker, o.state] for w, o in state.operations.items()}}
            if state.operations
            else {}
        ),
        **(
            {
                "quarantined": {
                    f"{tenant}/{artifact}": [[q.worker, q.view, q.tier, q.cause] for q in record.quarantined.values()]
                    for (tenant, artifact), record in state.artifacts.items()
                    if record.quarantined
                }
            }
            if state.quarantined
            else {}
        ),
        "orphans": {f"{tenant}/{artifact}": by for (tenant, artifact), by in state.orphans.items()},
        "dropped": state.dropped,
        "gaps": state.gaps,
        "unknown": state.unknown,
    }


def history() -> h.Log:
    """Every fact, every reason for a drop, and text that is hard to carry."""
    log = h.Log()
    log.open(h.W1)
    log.open(h.W2)
    log.append(h.put(h.D1, key="Qwen/Qwen3-8B"))
    log.append(h.bound("Qwen/Qwen3-8B", h.D1))
    log.append(h.registered(h.X, key="k"), skip=2)
    log.append(h.bound("a.b *>\n", h.X))
    log.append(h.bound("ключ \U0001f511", h.D1))
    log.append(h.digest_known(h.X, h.D2))
    log.append(h.published(1, h.X))
    log.append(h.published(2, h.D1))
    log.append(h.view_defined(h.V1, h.D1))
    log.say(h.added, h.W2, artifact=h.D1)
    log.say(h.added, h.W2, artifact=h.D1, view=h.V1, tier=Tier.VRAM)
    log.say(h.added, h.W2, artifact=h.D1, tier=Tier.DISK)
    log.say(h.dropped, h.W1, artifact=h.D1)
    _operations(log)
    log.say(h.granted, h.W2, artifact=h.D1, lease=h.L2)
    _corrupt(log)
    log.append(h.unbound("ключ \U0001f511", h.D1))
    log.append(h.put(h.Y, h.D2, tier=Tier.SOURCE), h.W2)
    _refused(log)
    log.say(h.released, h.W1, artifact=h.X)
    log.append(h.destroyed(h.X, DestroyReason.LEASE_ENDED))
    log.append(SessionEnded(worker=h.W2, incarnation=h.FIRST, reason=SessionEnd.EXPIRED))
    log.append(h.destroyed(h.Y, DestroyReason.LOST))
    log.append(h.put(h.Y, h.D2), skip=7)
    log.open(h.W1, h.SECOND)
    log.append(h.put(h.ArtifactId("late")), h.W1, h.FIRST)
    _kept(log)
    return log


def _operations(log: h.Log) -> None:
    """One of each end, one that is lost with its session, and a copy that may not go."""
    for id in ("fetch", "evict", "stop", "left"):
        log.say(h.began, h.W2, id=id, operation="evict" if id == "evict" else "prefetch", artifact=h.D1)
    log.say(h.began, h.W1, id="fetch", artifact=h.D1)
    log.say(h.done, h.W2, id="fetch")
    log.say(h.dropped, h.W2, artifact=h.D1, reason=DropReason.ASKED)
    log.say(h.done, h.W2, id="evict", outcome=OperationOutcome.FAILED, error='{"kind":"conflict"}')
    log.say(h.done, h.W2, id="stop", outcome=OperationOutcome.CANCELLED, error='{"kind":"cancelled"}')
    log.say(h.done, h.W2, id="never")


def _corrupt(log: h.Log) -> None:
    """A copy that is healed, one that is not, and one that nobody has."""
    log.say(h.quarantined, h.W2, artifact=h.D1, tier=Tier.DISK, cause=QuarantineCause.SPILL)
    log.say(h.added, h.W2, artifact=h.D1, tier=Tier.DISK)
    log.say(h.quarantined, h.W1, artifact=h.X, cause=QuarantineCause.READER)
    log.say(h.quarantined, h.W2, artifact=h.D1, view=h.V1, tier=Tier.VRAM)
    log.say(h.quarantined, h.W2, artifact=h.D1, view=h.V1, tier=Tier.VRAM)


def _kept(log: h.Log) -> None:
    """What the store says: archive, snapshot, purge, that it gives up; what it loses; a fold that is not known yet."""
    log.append(RoleGranted(role=STORE_ROLE), h.W1, h.SECOND)
    upto = log.state.seq
    log.append(h.archived(1, upto), h.W1, h.SECOND)
    log.append(h.archived(upto + 2, upto + 3), h.W1, h.SECOND)
    log.append(h.snapshot(upto), h.W1, h.SECOND)
    log.append(h.purge(upto, upto), h.W1, h.SECOND)
    log.append(h.purge(upto + 1, upto), h.W1, h.FIRST)
    log.append(h.truncated(log.state.seq + 5, log.state.seq), h.W1, h.SECOND)
    log.append(h.purged(upto, upto), h.W1, h.SECOND)
    log.append(RoleResigned(role=STORE_ROLE), h.W1, h.FIRST)
    log.append(RoleGranted(role=STORE_ROLE), h.W1, h.SECOND)
    log.append(RoleResigned(role=STORE_ROLE), h.W1, h.SECOND, expected=1)
    log.append(RoleGranted(role=STORE_ROLE), h.W1, h.SECOND)
    log.append(RoleResigned(role=STORE_ROLE), h.W1, h.SECOND)
    log.append(h.archived(upto + 2, upto + 3), h.W1, h.SECOND)
    for id in ("kept", "runs"):
        log.say(h.began, h.W1, h.SECOND, id=id, operation="replicate", artifact=h.D1)
    log.say(h.done, h.W1, h.SECOND, id="kept")
    log.append(ShardsFixed(shards=64), h.W1, h.SECOND)
    log.append(ShardsFixed(shards=128), h.W1, h.SECOND)
    log.append(FoldRaised(stream="TB", version=1), h.W1, h.SECOND)
    log.append(FoldRaised(stream="TB", version=4096), h.W1, h.SECOND)
    log.append(h.put(h.ArtifactId("after")), h.W1, h.SECOND)


def _refused(log: h.Log) -> None:
    log.append(h.put(h.Y, h.D1), expected=0)
    log.append(h.put(h.Y, h.D1))
    log.append(h.destroyed(h.D1, DestroyReason.LOST))
    log.append(h.bound("a.b *>\n", h.D1))
    log.append(h.bound("m", h.ArtifactId("never")))
    log.append(h.unbound("m"))
    log.append(h.added(1, h.D1), h.W2)
    log.append(h.put(), subject=log.state.subjects.fact(aggregate_of(h.bound()), h.W1))


def write_new(name: str) -> None:
    log = history()
    with (HERE / f"{name}.jsonl").open("x", encoding="utf-8") as lines:
        for message in log.messages:
            assert not isinstance(message.event, UnknownEvent)
            fence = log.state.subjects.fence(aggregate_of(message.event))
            line = {
                "seq": message.seq,
                "time_ns": message.time_ns,
                "subject": message.subject,
                "headers": headers_to_wire(message.headers, type_name=message.event.type, fence=fence),
                "data": encode(message.event).decode(),
            }
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    with (HERE / f"{name}.json").open("x", encoding="utf-8") as file:
        json.dump(outcome(fold(name)), file, indent=1, ensure_ascii=False)
        file.write("\n")


if __name__ == "__main__":
    if sys.argv[1] == "--hash":
        print(fold(sys.argv[2]).hash())
    else:
        write_new(sys.argv[1])
