"""Rules (state and command to fact) and folds (state and fact to state). No I/O."""

from tensorbus.lifecycle import _rules as rules
from tensorbus.lifecycle._directory import FOLD_VERSION, Directory
from tensorbus.lifecycle._records import (
    Artifact,
    CallerLease,
    Key,
    Replica,
    ReplicaKey,
    Series,
    Session,
    Touched,
    Verdict,
)

__all__ = [
    "FOLD_VERSION",
    "Artifact",
    "CallerLease",
    "Directory",
    "Key",
    "Replica",
    "ReplicaKey",
    "Series",
    "Session",
    "Touched",
    "Verdict",
    "rules",
]
