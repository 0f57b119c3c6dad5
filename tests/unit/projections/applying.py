"""Applies a log to a store, one small batch after the other, saying so; a test kills it at some moment."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from tensorbus.events import AnyRecorded
from tensorbus.ids import ArtifactId
from tensorbus.projections import GlobalStore
from tests.unit.lifecycle import history as h
from tests.unit.projections.store_rig import SUBJECTS, Feed

BATCH = 25


@cache
def messages() -> list[AnyRecorded]:
    log = h.Log()
    log.open(h.W1)
    log.open(h.W2)
    for number in range(400):
        artifact = ArtifactId(f"a{number}")
        log.append(h.put(artifact, None))
        log.append(h.bound(f"k{number % 50}", artifact, rebind=True))
        log.say(h.added, h.W2, artifact=artifact)
        if number % 3 == 0:
            log.append(h.destroyed(ArtifactId(f"a{number // 2}")))
        if number % 97 == 0:
            log.append(h.ended(h.W2))
            log.open(h.W2, h.Incarnation(f"{number:016x}"))
    return log.messages


def main() -> None:
    store = GlobalStore.open(Path(sys.argv[1]), subjects=SUBJECTS)
    items = Feed().take(messages())
    for at in range(0, len(items), BATCH):
        store.apply(items[at : at + BATCH])
        print(store.position[0], flush=True)


if __name__ == "__main__":
    main()
