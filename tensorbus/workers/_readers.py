"""Who gets an artifact from this worker and has none of it yet: who comes later may have it from those before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tensorbus.ids import WorkerId
from tensorbus.lifecycle import Artifact, Directory
from tensorbus.workers._store import Where

READERS_MAX: Final = 64
"""Of one artifact; the eldest are forgotten."""
ARTIFACTS_MAX: Final = 256


class Readers:
    """The workers that began to read, in that order. What they say of themselves is a hint and no more."""

    def __init__(self) -> None:
        self._reading: OrderedDict[Where, dict[WorkerId, None]] = OrderedDict()

    def ahead(self, state: Directory, record: Artifact, reader: WorkerId) -> list[WorkerId]:
        """Note a reader; gives those that began before it, live and do not have a copy yet."""
        reading = self._reading.pop(record.where, {})
        having = {replica.worker for replica in record.replicas.values() if replica.view is None}
        kept = [worker for worker in reading if worker not in having and _is_live(state, worker)]
        before = kept[: kept.index(reader)] if reader in kept else kept
        self._reading[record.where] = dict.fromkeys([*kept, reader][-READERS_MAX:])
        if len(self._reading) > ARTIFACTS_MAX:
            self._reading.popitem(last=False)
        return before


def _is_live(state: Directory, worker: WorkerId) -> bool:
    session = state.sessions.get(worker)
    return session is not None and session.live
