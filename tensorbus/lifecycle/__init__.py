"""Rules (state and command to fact) and folds (state and fact to state). No I/O."""

from tensorbus.lifecycle import _rules as rules
from tensorbus.lifecycle import _rules_log as log_rules
from tensorbus.lifecycle._directory import FOLD_VERSION, Directory
from tensorbus.lifecycle._fold_log import forgettable
from tensorbus.lifecycle._records import (
    Artifact,
    CallerLease,
    Key,
    LogState,
    Purge,
    Replica,
    ReplicaKey,
    RoleLease,
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
    "LogState",
    "Purge",
    "Replica",
    "ReplicaKey",
    "RoleLease",
    "Series",
    "Session",
    "Touched",
    "Verdict",
    "forgettable",
    "log_rules",
    "rules",
]
