"""SQL over the store: only what reads is let through, within its limits, at one position."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tensorbus.errors import DeadlineExceededError, InvalidArgumentError, OutOfSpaceError, UnavailableError
from tensorbus.projections import GlobalStore, QueryLimits, _store_query
from tests.unit.projections.store_rig import SUBJECTS, Feed, fill, small_log


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GlobalStore]:
    store = GlobalStore.open(tmp_path / "s.duckdb", subjects=SUBJECTS, memory_bytes=128_000_000, queries=2)
    yield store
    store.close()


def ask(store: GlobalStore, sql: str, params: Any = None, **limits: Any) -> tuple[list[dict[str, Any]], bool]:
    with store.query(sql, params, limits=QueryLimits(**limits)) as result:
        rows = [row for batch in result for row in batch.to_pylist()]
        return rows, result.truncated


@pytest.mark.parametrize(
    ("sql", "params", "rows"),
    [
        ("SELECT artifact, live FROM artifacts ORDER BY ALL", None, [("x", True), ("y", False)]),
        ("FROM keys SELECT key WHERE live", None, [("k",)]),
        ("SELECT key FROM keys WHERE gone = ?", ["asked"], [("gone",)]),
        (
            "SELECT replace(key, 'o', '0'), regexp_replace(key, '[a-z]', 'x', 'g') FROM keys WHERE gone IS NOT NULL",
            None,
            [("g0ne", "xxxx")],
        ),
        ("SELECT count(*) > 0 FROM duckdb_tables", None, [(True,)]),
        ("SELECT count(*) FROM replicas WHERE worker = $w", {"w": "w1"}, [(1,)]),
        ("SELECT count(*) FROM replicas_at(6)", None, [(2,)]),
        ("SELECT count(*) FROM replicas_at($at)", {"at": 3}, [(1,)]),
        ("WITH live AS (SELECT * FROM sessions WHERE live) SELECT worker FROM live", None, [("w1",)]),
        ("SELECT body ->> '$.key' FROM facts WHERE type = 'KeyBound' ORDER BY seq; ", None, [("k",), ("gone",)]),
        ("SELECT i FROM range(3) r(i)", None, [(0,), (1,), (2,)]),
        ("VALUES (1), (2)", None, [(1,), (2,)]),
        ("(SELECT 1) UNION ALL (SELECT 2)", None, [(1,), (2,)]),
        ("SELECT 1 WHERE false", None, []),
        ("SELECT lower('X') /* DROP TABLE facts; */ -- ; SELECT 2", None, [("x",)]),
    ],
)
def test_what_may_be_asked(store: GlobalStore, sql: str, params: Any, rows: list[tuple[Any, ...]]) -> None:
    fill(store, small_log())
    found, truncated = ask(store, sql, params)
    assert ([tuple(row.values()) for row in found], truncated) == (rows, False)


@pytest.mark.parametrize(
    "sql",
    ["DESCRIBE facts", "SHOW TABLES", "SUMMARIZE keys", "EXPLAIN SELECT 1", "explain analyze\nSELECT * FROM facts",
     "/* why */ EXPLAIN (FORMAT json) SELECT 1", "DESCRIBE SELECT * FROM facts"],
)  # fmt: skip
def test_tables_and_plans_can_be_shown(store: GlobalStore, sql: str) -> None:
    assert ask(store, sql)[0]


REFUSED = """
INSERT INTO facts (seq) VALUES (1)
UPDATE meta SET position = 0
DELETE FROM facts
TRUNCATE facts
MERGE INTO meta USING (SELECT 1) ON false WHEN NOT MATCHED THEN INSERT DEFAULT VALUES
WITH gone AS (DELETE FROM facts RETURNING *) SELECT * FROM gone
WITH new AS (INSERT INTO meta (position) VALUES (1) RETURNING *) SELECT * FROM new
EXPLAIN DELETE FROM facts
EXPLAIN ANALYZE DELETE FROM facts
EXPLAIN ANALYZE SELECT * FROM read_text('/etc/passwd')
EXPLAIN SELECT 1; DROP TABLE facts
SELECT 1; DROP TABLE facts
SELECT 1; SELECT 2
CREATE TABLE t AS SELECT 1
CREATE TEMP TABLE t AS SELECT 1
CREATE MACRO m() AS 1
CREATE SECRET s (TYPE s3)
CREATE SEQUENCE s
ALTER TABLE facts DROP COLUMN body
DROP TABLE facts
COMMENT ON TABLE facts IS 'x'
COPY facts TO '/tmp/x.csv'
COPY (SELECT 1) TO '/tmp/x.csv'
COPY facts FROM '/etc/passwd'
EXPORT DATABASE '/tmp/x'
IMPORT DATABASE '/tmp/x'
ATTACH '/tmp/x.duckdb'
DETACH s
USE memory
PRAGMA database_list
PRAGMA memory_limit = '1TB'
SET memory_limit = '1TB'
SET enable_external_access = true
RESET memory_limit
CALL pragma_version()
CHECKPOINT
FORCE CHECKPOINT
VACUUM
ANALYZE
BEGIN
COMMIT
ROLLBACK
PREPARE p AS SELECT 1
EXECUTE p
DEALLOCATE p
INSTALL httpfs
LOAD httpfs
SELECT * FROM read_csv('/etc/passwd')
SELECT * FROM read_text('/etc/passwd')
SELECT * FROM "READ_BLOB"('/etc/passwd')
SELECT * FROM main.read_blob('/etc/passwd')
SELECT * FROM facts, LATERAL (SELECT * FROM read_json('/etc/passwd'))
SELECT * FROM glob('/*')
SELECT * FROM '/etc/passwd'
SELECT * FROM '/etc/hosts.csv'
SELECT (SELECT count(*) FROM read_parquet('/tmp/x.parquet'))
SELECT * FROM sniff_csv('/etc/passwd')
SELECT * FROM query('DELETE FROM facts')
SELECT * FROM query_table('facts')
SELECT * FROM checkpoint()
SELECT * FROM force_checkpoint()
SELECT * FROM json_execute_serialized_sql('{}')
SELECT * FROM enable_logging()
SELECT * FROM duckdb_settings()
SELECT * FROM duckdb_secrets()
DESCRIBE SELECT * FROM read_text('/etc/passwd')
SELECT nextval('s')
SELECT getenv('HOME')
SELECT repeat('x', 2000000000)
SELECT lpad('x', 2000000000, 'y')
SELECT len(range(300000000))
SELECT bitstring('0', 2000000000)
SELECT Main."BitString"('0', 2000000000)
SELECT replace(string_agg('x', ''), 'x', string_agg('y', '')) FROM facts
SELECT regexp_replace(body, 'x', body, 'g') FROM facts
SELECT replace(body, 'x', 'seventeen letters') FROM facts
SELECT main.replace(body, 'x', body) FROM facts
SELECT body.replace('x', body) FROM facts
SELECT replace(body, 'x', ?) FROM facts
SELECT current_setting('memory_limit')
SELECT getvariable('x')
SELECT write_log('x')
SELECT setseed(0.5)
SELECT sleep_ms(10000)
SELECT pg_sleep(10)
SELECT pg_catalog.pg_sleep(10)
SELECT * FROM pragma_database_list
SELECT * FROM main."Pragma_Database_List"
SELECT * FROM (SELECT path FROM duckdb_databases)
SELECT * FROM duckdb_databases()
SELECT * FROM duckdb_logs
SELECT * FROM pg_settings
SELECT * FROM pg_catalog.pg_settings
DESCRIBE pragma_database_list
SELECT * FROM repeat('x', 2000000000)
SELECT * FROM nothing
SELECT nothing FROM facts
SELECT error('x')
SELECT CAST('x' AS INTEGER)
SELECT ?
SELEC 1
;
"""


@pytest.mark.parametrize("sql", REFUSED.strip().splitlines())
def test_what_may_not_be_asked(store: GlobalStore, sql: str) -> None:
    fill(store, small_log())
    before = store.hash()
    with pytest.raises(InvalidArgumentError) as caught:
        ask(store, sql)
    assert caught.value.message
    assert store.hash() == before


def test_the_stores_own_file_cannot_be_read_as_bytes(store: GlobalStore) -> None:
    """DuckDB itself would open and close it, and thereby drop the lock that keeps other processes out."""
    with pytest.raises(InvalidArgumentError, match="read_blob"):
        ask(store, f"SELECT size FROM read_blob('{store.path}')")


def test_no_name_in_sql_is_a_variable_of_this_program(store: GlobalStore) -> None:
    import pyarrow as pa

    secret = pa.table({"x": [1]})
    with pytest.raises(InvalidArgumentError, match="secret"):
        ask(store, "SELECT * FROM secret")
    assert secret.num_rows == 1


def test_an_empty_or_endless_text_is_refused(store: GlobalStore) -> None:
    for sql in ("", " ", "-- nothing", "SELECT " + "(" * 5_000 + "1" + ")" * 5_000, "SELECT 1 -- " + "x" * 300_000):
        with pytest.raises(InvalidArgumentError):
            ask(store, sql)
    for sql in ("", "-- c", " /* c */ ; ", ";"):
        with pytest.raises(InvalidArgumentError, match="no statement"):
            ask(store, sql)


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "got", "cut"), [(5, 5, True), (10, 10, False), (11, 10, False), (0, 0, True)])
def test_rows_beyond_the_limit_are_cut(store: GlobalStore, limit: int, got: int, cut: bool) -> None:
    rows, truncated = ask(store, "SELECT * FROM range(10)", rows=limit)
    assert (len(rows), truncated) == (got, cut)


def test_an_answer_larger_than_its_limit_is_cut(store: GlobalStore) -> None:
    rows, truncated = ask(store, "SELECT i, 'abcdefgh' AS t FROM range(100000) r(i)", nbytes=200_000)
    assert truncated
    assert 100_000 < len(rows) * 20 <= 260_000
    assert [row["i"] for row in rows] == list(range(len(rows)))


@pytest.mark.parametrize(
    "sql",
    ["SELECT count(*) FROM range(1000000) a, range(1000000) b",
     "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t",
     "SELECT * FROM range(100000000000)"],
)  # fmt: skip
def test_a_query_that_takes_too_long_is_stopped(store: GlobalStore, sql: str) -> None:
    with pytest.raises(DeadlineExceededError) as caught:
        ask(store, sql, seconds=0.2, rows=10**12, nbytes=10**15)
    assert caught.value.details == {"timeout_s": 0.2}
    assert ask(store, "SELECT 1 AS one") == ([{"one": 1}], False)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT list(i) FROM range(100000000) r(i)",
        "SELECT * FROM range(100000000) r(i) ORDER BY hash(i)",
        "SELECT list_aggregate(list(i), 'string_agg') FROM range(30000000) r(i)",
        "SELECT count(x) FROM (SELECT NULL::BIGINT[99999] AS x FROM range(10000))",
    ],
)
def test_a_query_that_needs_too_much_memory_is_out_of_space(store: GlobalStore, sql: str) -> None:
    with pytest.raises(OutOfSpaceError):
        ask(store, sql)
    fill(store, small_log())
    assert len(ask(store, "SELECT * FROM facts")[0]) == len(small_log().messages)


def test_only_so_many_queries_run_at_a_time(store: GlobalStore) -> None:
    one, two = store.query("SELECT 1"), store.query("SELECT 2")
    with pytest.raises(UnavailableError, match="2 queries"):
        store.query("SELECT 3", limits=QueryLimits(seconds=0.05))
    one.close()
    one.close()
    assert [batch.to_pylist() for batch in store.query("SELECT 3 AS n")] == [[{"n": 3}]]
    two.close()


def test_an_answer_that_nobody_reads_gives_its_place_back(store: GlobalStore) -> None:
    for _ in range(5):
        store.query("SELECT * FROM range(10)")
    assert ask(store, "SELECT 1 AS one")[0] == [{"one": 1}]


# -- positions -------------------------------------------------------------------------------------------------------


def test_an_answer_is_of_one_position_whatever_is_written_meanwhile(store: GlobalStore) -> None:
    items = Feed().take(small_log().messages)
    store.apply(items[:5])
    with store.query("SELECT seq FROM facts") as result:
        store.apply(items)
        rows = [row["seq"] for batch in result for row in batch.to_pylist()]
    assert (rows, result.position) == ([item.recorded.seq for item in items[:5]], items[4].recorded.seq)
    with store.query("SELECT seq FROM facts", at_least=items[-1].recorded.seq) as result:
        assert sum(batch.num_rows for batch in result) == len(items)


def test_an_answer_waits_for_the_position_that_it_must_have(store: GlobalStore) -> None:
    items = Feed().take(small_log().messages)
    last = items[-1].recorded.seq
    with pytest.raises(DeadlineExceededError):
        store.query("SELECT 1", at_least=last, limits=QueryLimits(seconds=0.05))
    waits = threading.Event()

    def waiting() -> int:
        waits.set()
        with store.query("SELECT count(*) FROM facts", at_least=last) as result:
            return result.position

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(waiting)
        assert waits.wait(10)
        for item in items:
            store.apply([item])
        assert answer.result(timeout=10) == last


def test_many_readers_and_a_writer_never_see_half_a_batch(store: GlobalStore) -> None:
    items = Feed().take(small_log().messages)
    sql = "SELECT (SELECT count(*) FROM facts) AS facts, (SELECT position FROM meta) AS position"

    def read() -> list[tuple[int, int]]:
        return [tuple(ask(store, sql)[0][0].values()) for _ in range(20)]  # type: ignore[misc]

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for item in items:
            store.apply([item])
        seen = {pair for reader in readers for pair in reader.result()}
    assert seen <= {(0, 0), *((n + 1, item.recorded.seq) for n, item in enumerate(items))}


def test_only_listed_functions_stand_in_from() -> None:
    """A new macro of ours must be listed, and nothing that reads files may be."""
    assert not [name for name in _store_query.TABLE_FUNCTIONS if "read" in name or "scan" in name or "query" in name]
