"""The folds as processes hold them, fed by the log, and what they answer.

The global store needs DuckDB and Arrow (``pip install 'tensorbus[store]'``), which are imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tensorbus.errors import InvalidArgumentError
from tensorbus.projections._info import Json, artifact_info, series_news, session_info, view_info
from tensorbus.projections._live import Follower, LiveDirectory
from tensorbus.projections._names import Names
from tensorbus.projections._store_rows import Applied, RowTracker
from tensorbus.projections._store_schema import describe

if TYPE_CHECKING:
    from tensorbus.projections._store import GlobalStore
    from tensorbus.projections._store_query import QueryLimits, QueryResult
    from tensorbus.projections._store_travel import Difference, TimeTravel

__all__ = [
    "Applied",
    "Difference",
    "Follower",
    "GlobalStore",
    "Json",
    "LiveDirectory",
    "Names",
    "QueryLimits",
    "QueryResult",
    "RowTracker",
    "TimeTravel",
    "artifact_info",
    "describe",
    "series_news",
    "session_info",
    "view_info",
]

_NEED_STORE = {
    "GlobalStore": "_store",
    "QueryLimits": "_store_query",
    "QueryResult": "_store_query",
    "Difference": "_store_travel",
    "TimeTravel": "_store_travel",
}


def __getattr__(name: str) -> object:
    if name not in _NEED_STORE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_NEED_STORE[name]}"), name)
    except ModuleNotFoundError as exc:
        if exc.name not in ("duckdb", "_duckdb", "pyarrow"):
            raise
        raise InvalidArgumentError(f"the store needs {exc.name}: pip install 'tensorbus[store]'") from exc
