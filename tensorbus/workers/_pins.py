"""What pins keep in a worker's memory, for people: figures, and who holds the space when it runs out."""

from __future__ import annotations

from typing import Final

from tensorbus.events import LeasePurpose
from tensorbus.ids import WorkerId
from tensorbus.lifecycle import Artifact, CallerLease, Directory
from tensorbus.projections import Json

SHOWN: Final = 10


def pinned(state: Directory, worker: WorkerId) -> list[tuple[Artifact, list[CallerLease]]]:
    """The artifacts that are pinned on a worker, with their pins, the largest first."""
    found = []
    for where in state.by_lessor.get(worker, ()):
        record = state.artifacts[where]
        pins = [one for one in record.leases.values() if one.worker == worker and one.purpose is LeasePurpose.PIN]
        if pins:
            found.append((record, pins))
    return sorted(found, key=lambda one: -one[0].nbytes)


def pin_figures(state: Directory, worker: WorkerId) -> Json:
    """How much is pinned, and by how many pins."""
    found = pinned(state, worker)
    return {
        "artifacts": len(found),
        "leases": sum(len(pins) for _, pins in found),
        "pinned_bytes": sum(record.nbytes for record, _ in found),
    }


def pin_holders(state: Directory, worker: WorkerId, tenant: str) -> list[Json]:
    """The largest pinned artifacts, as one tenant may see them."""
    return [
        {"artifact": record.artifact, "nbytes": record.nbytes, "leases": [pin.lease for pin in pins[:SHOWN]]}
        if record.tenant == tenant
        else {"artifact": "another tenant's", "nbytes": record.nbytes, "leases": []}
        for record, pins in pinned(state, worker)[:SHOWN]
    ]
