"""The tables of the global store: their columns, what each means, and the SQL that makes them.

Everything that knows a table's shape reads it here: the writer, ``tensorbus query --tables`` and ``docs/store.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SCHEMA_VERSION: Final = 3
"""A file of another version is not read but made anew (``tensorbus store rebuild``)."""

TEXT, NUMBER, SIGNED, FLAG, TEXTS = "VARCHAR", "UBIGINT", "BIGINT", "BOOLEAN", "VARCHAR[]"


@dataclass(frozen=True, slots=True)
class Column:
    """One column; ``made`` is the SQL of one that is computed when read, and not stored."""

    name: str
    type: str
    text: str
    made: str = ""


@dataclass(frozen=True, slots=True)
class Entity:
    """A table of present state and its history.

    Attributes:
        name: Of the view of present rows; the table is ``<name>_history``, the macro ``<name>_at(position)``.
        key: What a person calls a row by; two rows with the same key never hold at once.
        row: The columns that find an open row: a number where the fold has one, since that is one cheap join.
        columns: Without ``valid_from`` and ``valid_to``, which every history has.
    """

    name: str
    text: str
    key: tuple[str, ...]
    row: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def history(self) -> str:
        return f"{self.name}_history"


@dataclass(frozen=True, slots=True)
class Derived:
    """A view over ``facts``: those of one type, with the fields of their body as columns."""

    name: str
    text: str
    types: tuple[str, ...]
    columns: tuple[Column, ...]


VALID: Final = (
    Column("valid_from", NUMBER, "Sequence of the fact from which on the row holds."),
    Column("valid_to", NUMBER, "Sequence of the fact that ended it; NULL while it holds."),
)

FACTS: Final = (
    Column("seq", NUMBER, "Sequence in the log."),
    Column("time_ns", SIGNED, "When the log took it, nanoseconds since the Unix epoch."),
    Column("time", "TIMESTAMP_NS", "The same as a timestamp, UTC.", made="make_timestamp_ns(time_ns)"),
    Column("type", TEXT, "What happened, see docs/events.md."),
    Column("kind", TEXT, "Kind of the aggregate, from the subject; NULL if the subject is not that of a fact."),
    Column("about", TEXT, "The aggregate's id in the subject."),
    Column("tenant", TEXT, "Tenant of what it is about; NULL where there is none."),
    Column("artifact", TEXT, "Artifact that it names."),
    Column("name", TEXT, "The key, series or operation that it is about; for a put, the key it is meant for."),
    Column("worker", TEXT, "Worker that it is about: whose session, copy, lease, operation or role."),
    Column("author", TEXT, "Worker that wrote it."),
    Column("incarnation", TEXT, "The author's life in which it did."),
    Column("principal", TEXT, "For whom the author spoke; NULL for itself."),
    Column("token", NUMBER, "Fencing token under which it acted; NULL where there is none."),
    Column("event_id", TEXT, "Id of the fact."),
    Column("cause", TEXT, "Id of the fact that led to this one."),
    Column("traceparent", TEXT, "W3C trace context."),
    Column("trace_id", TEXT, "The trace id in it.", made="split_part(traceparent, '-', 2)"),
    Column("expected", NUMBER, "The aggregate's last sequence that the author knew; NULL if it named none."),
    Column("kept", FLAG, "Whether the fold kept it; a dropped proposal changed nothing."),
    Column("why", TEXT, "Why it was dropped, see `Verdict`; NULL for a kept one."),
    Column("body", TEXT, "The fact as JSON; NULL for a type that the writer did not know."),
)

_TENANT: Final = Column("tenant", TEXT, "Tenant.")
_ARTIFACT: Final = Column("artifact", TEXT, "Id of the artifact.")
_WORKER: Final = Column("worker", TEXT, "Worker id.")
_INCARNATION: Final = Column("incarnation", TEXT, "Incarnation id of the worker's process.")

ENTITIES: Final = (
    Entity(
        "artifacts",
        "Artifacts, also ended ones until the log forgets them.",
        ("tenant", "artifact"),
        ("born",),
        (
            _TENANT,
            _ARTIFACT,
            Column("digest", TEXT, "Content id; NULL until it is known."),
            Column("nbytes", NUMBER, "Bytes of all tensors."),
            Column("tensors", NUMBER, "How many names the manifest has."),
            Column("manifest_blob", TEXT, "Digest of the manifest's blob; NULL when it is in the fact itself."),
            Column("key", TEXT, "The key that the put was meant for."),
            Column("born", NUMBER, "Sequence of the fact that made it."),
            Column("born_ns", SIGNED, "When, nanoseconds since the Unix epoch."),
            Column("author", TEXT, "Worker that took it in."),
            _INCARNATION,
            Column("principal", TEXT, "For whom."),
            Column("live", FLAG, "Whether it has not ended."),
            Column("destroyed", NUMBER, "Sequence of the fact that ended it."),
            Column("reason", TEXT, "Why it ended."),
        ),
    ),
    Entity(
        "replicas",
        "Complete copies. One on disk whose worker's session ended is absent until that worker is back.",
        ("tenant", "artifact", "worker", "view", "tier"),
        ("seq",),
        (
            _TENANT,
            _ARTIFACT,
            _WORKER,
            Column("view", TEXT, "The view that it is a copy of; NULL for the whole."),
            Column("tier", TEXT, "vram, dram, disk or source."),
            _INCARNATION,
            Column("nbytes", NUMBER, "Bytes of the copy."),
            Column("lease", TEXT, "The caller's lease it stands and falls with."),
            Column("seq", NUMBER, "Sequence of the fact that made it."),
        ),
    ),
    Entity(
        "quarantines",
        "Copies with wrong bytes: nobody reads them. Known until their worker has a right one, or the artifact ends.",
        ("tenant", "artifact", "worker", "view", "tier"),
        ("seq",),
        (
            _TENANT,
            _ARTIFACT,
            _WORKER,
            Column("view", TEXT, "The view that it was a copy of; NULL for the whole."),
            Column("tier", TEXT, "vram, dram, disk or source."),
            _INCARNATION,
            Column("cause", TEXT, "What showed it: verify, spill or reader."),
            Column("lease", TEXT, "The caller's lease it stood and fell with."),
            Column("seq", NUMBER, "Sequence of the fact that said so."),
        ),
    ),
    Entity(
        "keys",
        "Names. One that is bound to nothing says what became of it.",
        ("tenant", "key"),
        ("tenant", "key"),
        (
            _TENANT,
            Column("key", TEXT, "The name."),
            Column("artifact", TEXT, "What it is bound to; NULL for nothing."),
            Column("live", FLAG, "Whether it is bound."),
            Column("gone", TEXT, "Why it is bound to nothing: unbound, or why its artifact ended."),
        ),
    ),
    Entity(
        "versions",
        "Numbers of series. One whose artifact was destroyed stays as gone.",
        ("tenant", "name", "version"),
        ("tenant", "name", "version"),
        (
            _TENANT,
            Column("name", TEXT, "The series."),
            Column("version", NUMBER, "Its number, from 1."),
            Column("artifact", TEXT, "What it is; NULL once that is gone."),
            Column("live", FLAG, "Whether it is there."),
        ),
    ),
    Entity(
        "views",
        "Definitions of views, as long as their artifact lives.",
        ("tenant", "view"),
        ("tenant", "view"),
        (
            _TENANT,
            Column("view", TEXT, "Id of the view."),
            Column("artifact", TEXT, "Its base."),
            Column("definition", TEXT, "Canonical JSON of the selection."),
        ),
    ),
    Entity(
        "leases",
        "Callers' leases that have not ended.",
        ("tenant", "artifact", "lease"),
        ("seq",),
        (
            _TENANT,
            _ARTIFACT,
            Column("lease", TEXT, "Id of the lease."),
            Column("worker", TEXT, "Worker that granted it."),
            Column("purpose", TEXT, "register or pin."),
            Column("holder", TEXT, "The caller's session; NULL for a pin that runs out by itself."),
            Column("ttl_ns", SIGNED, "Length between renewals, ns; NULL holds until released."),
            Column("seq", NUMBER, "Sequence of the grant."),
        ),
    ),
    Entity(
        "sessions",
        "The newest session of each worker, also ended ones until the log forgets them.",
        ("worker",),
        ("opened",),
        (
            _WORKER,
            _INCARNATION,
            Column("host", TEXT, "Host id; equal means that memory can be shared."),
            Column("roles", TEXTS, "basic, gateway, shard-home, store."),
            Column("data", TEXT, "host:port where others read bytes."),
            Column("control", TEXT, "host:port where callers connect."),
            Column("pool_bytes", NUMBER, "Size of its memory pool."),
            Column("ttl_ns", SIGNED, "Silence after which the session may be ended, ns."),
            Column("pid", SIGNED, "Process id on its host."),
            Column("version", TEXT, "tensorbus version."),
            Column("opened", NUMBER, "Sequence of its opening."),
            Column("opened_ns", SIGNED, "When, nanoseconds since the Unix epoch."),
            Column("live", FLAG, "Whether it is open."),
            Column("ended", NUMBER, "Sequence of its end."),
        ),
    ),
    Entity(
        "operations",
        "Operations that run, and the newest of each worker that have ended.",
        ("tenant", "id"),
        ("started",),
        (
            _TENANT,
            Column("id", TEXT, "The caller's key."),
            Column("operation", TEXT, "What is done, see docs/operations-api.md."),
            _ARTIFACT,
            Column("args", TEXT, "Its other arguments, JSON."),
            Column("worker", TEXT, "Worker that carries it out."),
            _INCARNATION,
            Column("principal", TEXT, "For whom."),
            Column("started", NUMBER, "Sequence of the fact that it began with."),
            Column("started_ns", SIGNED, "When, nanoseconds since the Unix epoch."),
            Column("state", TEXT, "running, succeeded, failed, cancelled; lost once its worker's session ended first."),
            Column("ended", NUMBER, "Sequence of the fact that ended it; NULL while it runs."),
            Column("ended_ns", SIGNED, "When, nanoseconds since the Unix epoch."),
            Column("error", TEXT, "Why it did not succeed, JSON."),
            Column("result", TEXT, "What came of it, JSON."),
        ),
    ),
    Entity(
        "roles",
        "Who has a role that one worker at a time may have; no row once it was given up.",
        ("role",),
        ("token",),
        (
            Column("role", TEXT, "The role."),
            _WORKER,
            _INCARNATION,
            Column("token", NUMBER, "Sequence of the grant: the fencing token."),
        ),
    ),
)

_ABOUT_LOG: Final = (
    Column("seq", NUMBER, "Sequence of the fact."),
    Column("time", "TIMESTAMP_NS", "When, UTC."),
    Column("author", TEXT, "Worker that wrote it."),
)

DERIVED: Final = (
    Derived(
        "archives",
        "Files of the archive.",
        ("Archived",),
        (
            Column("stream", TEXT, "Stream."),
            Column("first", NUMBER, "First sequence of the range."),
            Column("last", NUMBER, "Last sequence of the range."),
            Column("count", NUMBER, "Facts in it."),
            Column("file", TEXT, "Path below the archive's URL."),
            Column("digest", TEXT, "BLAKE3-256 of the file."),
            Column("nbytes", NUMBER, "Its size."),
        ),
    ),
    Derived(
        "purges",
        "Announced and completed purges.",
        ("LogPurged", "PurgeCompleted"),
        (
            Column("type", TEXT, "LogPurged: announced; PurgeCompleted: carried out."),
            Column("stream", TEXT, "Stream."),
            Column("upto", NUMBER, "Facts up to this sequence go."),
            Column("snapshot", NUMBER, "Sequence of the snapshot to start from."),
            Column("forget", NUMBER, "What ended at or before this sequence is forgotten."),
            Column("delay_ns", SIGNED, "Time between announcement and purge."),
        ),
    ),
    Derived(
        "truncations",
        "Losses of the log's tail.",
        ("LogTruncated",),
        (
            Column("stream", TEXT, "Stream."),
            Column("lost_seq", NUMBER, "Where the remembered fact was.", made="seq"),
            Column("event_id", TEXT, "Which it was."),
            Column("last", NUMBER, "The log's last sequence when that was noticed."),
        ),
    ),
)

META: Final = (
    Column("position", NUMBER, "Everything up to this sequence is in the tables."),
    Column("event_id", TEXT, "Id of the fact at the position."),
    Column("first", NUMBER, "History begins at this sequence; 0: with the log."),
    Column("schema_version", NUMBER, "Version of these tables."),
    Column("fold_version", NUMBER, "Version of the fold that wrote them."),
    Column("prefix", TEXT, "Subject prefix of the log."),
)

BY_NAME: Final = {entity.name: entity for entity in ENTITIES}


def describe() -> list[tuple[str, str, str, str]]:
    """Every documented table and view: ``(table, column, type, meaning)``, in the order of ``docs/store.md``."""
    return [(table, column.name, column.type, column.text) for table, _, columns in shown() for column in columns]


def shown() -> Iterator[tuple[str, str, tuple[Column, ...]]]:
    """Name, meaning and columns of each table and view."""
    yield "facts", "Every message of the log, kept or dropped.", FACTS
    for entity in ENTITIES:
        yield entity.name, entity.text, (*entity.columns, *VALID)
    for derived in DERIVED:
        yield derived.name, derived.text, (*_ABOUT_LOG, *derived.columns)
    yield "meta", "One row: how far the log was read.", META


def statements() -> Iterator[str]:
    """The SQL that makes an empty store."""
    yield f"CREATE TABLE facts ({_columns(FACTS)})"
    yield f"CREATE TABLE meta ({_columns(META)})"
    for entity in ENTITIES:
        yield f"CREATE TABLE {entity.history} ({_columns((*entity.columns, *VALID))})"
        yield f"CREATE VIEW {entity.name} AS SELECT * FROM {entity.history} WHERE valid_to IS NULL"
        yield (
            f"CREATE MACRO {entity.name}_at(position) AS TABLE SELECT * FROM {entity.history} "
            "WHERE valid_from <= position AND (valid_to IS NULL OR valid_to > position)"
        )
    for derived in DERIVED:
        yield _derived(derived)


def stored(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    return tuple(column for column in columns if not column.made)


def _columns(columns: tuple[Column, ...]) -> str:
    return ", ".join(
        f'"{column.name}" {column.type}' + (f" GENERATED ALWAYS AS ({column.made}) VIRTUAL" if column.made else "")
        for column in columns
    )


def _derived(view: Derived) -> str:
    fields = ", ".join(
        f"""TRY_CAST(body ->> '$.{column.made or column.name}' AS {column.type}) AS "{column.name}\""""
        for column in view.columns
    )
    types = ", ".join(f"'{name}'" for name in view.types)
    facts = f"FROM facts WHERE kept AND facts.type IN ({types})"
    return f"CREATE VIEW {view.name} AS SELECT seq, time, author, {fields} {facts}"
