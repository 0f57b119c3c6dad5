"""Rules (state and command to fact) and folds (state and fact to state). No I/O."""

from tensorbus.lifecycle import _rules as rules
from tensorbus.lifecycle import _rules_log as log_rules
from tensorbus.lifecycle._differences import differences, dissolve
from tensorbus.lifecycle._directory import FOLD_VERSION, Directory
from tensorbus.lifecycle._fold_artifacts import spare
from tensorbus.lifecycle._fold_log import forgettable
from tensorbus.lifecycle._fold_operations import FINISHED_MAX
from tensorbus.lifecycle._fold_pages import PAGES_FOLD_VERSION, ShardLease, ShardSnapshot, ShardState
from tensorbus.lifecycle._home_steps import HomeStep, HomeView, next_step
from tensorbus.lifecycle._homes import CANDIDATES, assign
from tensorbus.lifecycle._page_batches import PageBatches, Records
from tensorbus.lifecycle._page_snapshot import dump_shard, load_shard
from tensorbus.lifecycle._page_table import COPIES_MAX, PageTable
from tensorbus.lifecycle._records import (
    Artifact,
    CallerLease,
    Key,
    LogState,
    Operation,
    OperationState,
    Purge,
    Quarantine,
    Replica,
    ReplicaKey,
    RoleLease,
    Series,
    Session,
    Touched,
    Verdict,
)
from tensorbus.lifecycle._snapshot import FORMAT as SNAPSHOT_FORMAT
from tensorbus.lifecycle._snapshot import dump
from tensorbus.lifecycle._snapshot_load import Loader, load

__all__ = [
    "CANDIDATES",
    "COPIES_MAX",
    "FINISHED_MAX",
    "FOLD_VERSION",
    "PAGES_FOLD_VERSION",
    "SNAPSHOT_FORMAT",
    "Artifact",
    "CallerLease",
    "Directory",
    "HomeStep",
    "HomeView",
    "Key",
    "Loader",
    "LogState",
    "Operation",
    "OperationState",
    "PageBatches",
    "PageTable",
    "Purge",
    "Quarantine",
    "Records",
    "Replica",
    "ReplicaKey",
    "RoleLease",
    "Series",
    "Session",
    "ShardLease",
    "ShardSnapshot",
    "ShardState",
    "Touched",
    "Verdict",
    "assign",
    "differences",
    "dissolve",
    "dump",
    "dump_shard",
    "forgettable",
    "load",
    "load_shard",
    "log_rules",
    "next_step",
    "rules",
    "spare",
]
