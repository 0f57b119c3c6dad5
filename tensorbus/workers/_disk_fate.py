"""What is to become of a file that was found on disk: a rule over its header and the Directory."""

from __future__ import annotations

from enum import StrEnum

from tensorbus.errors import CorruptError
from tensorbus.events import Tier
from tensorbus.ids import RANDOM_PREFIX
from tensorbus.lifecycle import Artifact, Replica
from tensorbus.model import Manifest
from tensorbus.transport._spill import Spill, SpillHeader


class Fate(StrEnum):
    """What became of the artifact that a file is a copy of."""

    LIVES = "lives"
    OVER = "over"
    UNKNOWN = "unknown"


def fate(header: SpillHeader, digest: str | None, record: Artifact | None, *, forgotten: int) -> Fate:
    """Whether a file found on disk is still a replica.

    Args:
        digest: Content id of the file's manifest, ``None`` if it has no digests.
        record: What the log says of the artifact.
        forgotten: What ended at or before this sequence, the log may have forgotten.
    """
    if record is None:
        return Fate.OVER if header.born <= forgotten else Fate.UNKNOWN
    same_life = (record.born, record.born_ns) == (header.born, header.born_ns)
    if record.live:
        # An id made at random names the same bytes also when the log, having lost it, was told of it again.
        same_bytes = record.artifact.startswith(RANDOM_PREFIX) or (digest is not None and digest == record.digest)
        return Fate.LIVES if same_life or same_bytes else Fate.OVER
    # One that ended before the file's was born is an older life: the log has lost its tail.
    return Fate.UNKNOWN if record.born_ns < header.born_ns else Fate.OVER


def content_id(spill: Spill) -> str | None:
    """The content id of a file's manifest, ``None`` if it has no digests. Costs as much as the manifest."""
    try:
        manifest = Manifest.from_json(spill.header.manifest)
    except CorruptError:
        return None
    return manifest.content_id() if manifest.digested else None


def is_here(replica: Replica, worker: str) -> bool:
    """Whether it is a worker's whole copy on disk."""
    return replica.worker == worker and replica.tier is Tier.DISK and replica.view is None
