"""Names of log fields and spans in one table, the current trace context, and how logs are written.

A log line is an event with fields: ``log.info("replica added", extra=fields(artifact=..., nbytes=...))``.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, TextIO, TypedDict, Unpack

ROOT_LOGGER: Final = "tensorbus"
_ATTRIBUTE: Final = "tensorbus_fields"
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/@+,")


class LogFields(TypedDict, total=False):
    """Every field that a log line may carry; a misspelt one is a type error."""

    artifact: str
    author: str
    bytes_left: int
    conn: str
    count: int
    digest: str
    duration_ms: float
    endpoint: str
    error: str
    event_id: str
    event_type: str
    host: str
    incarnation: str
    key: str
    kind: str
    lease: str
    nbytes: int
    path: str
    peer: str
    pid: int
    position: int
    reason: str
    role: str
    segment: int
    seq: int
    signal: str
    stream: str
    subject: str
    tenant: str
    tier: str
    ttl_s: float
    version: str
    worker: str


class SpanName(StrEnum):
    """Names of spans, ``tensorbus.<noun>.<verb>``."""

    ARTIFACT_DESTROY = "tensorbus.artifact.destroy"
    ARTIFACT_GET = "tensorbus.artifact.get"
    ARTIFACT_PUT = "tensorbus.artifact.put"
    KEY_BIND = "tensorbus.key.bind"
    LOG_APPEND = "tensorbus.log.append"
    REPLICA_FETCH = "tensorbus.replica.fetch"
    SERIES_PUBLISH = "tensorbus.series.publish"


def fields(**values: Unpack[LogFields]) -> dict[str, object]:
    """The ``extra`` of a log call."""
    return {_ATTRIBUTE: values}


def traceparent() -> str:
    """The W3C trace context of the current span, or ``""``.

    Looks only at an OpenTelemetry that the process has imported itself: who has not cannot be in a span.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def setup_logging(level: str = "info", *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send what tensorbus logs to ``stream``, one line each. Called by programs, never by the library.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        as_json: JSON objects instead of ``time level logger message key=value ...``.
        stream: Standard error when ``None``.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    logger = logging.getLogger(ROOT_LOGGER)
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def _stamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _own_fields(record: logging.LogRecord) -> dict[str, object]:
    own = getattr(record, _ATTRIBUTE, None)
    return dict(own) if isinstance(own, dict) else {}


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_own_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = f"{_stamp(record)} {record.levelname.lower():7} {record.name} {record.getMessage()}"
        line = " ".join([head, *(f"{name}={_shown(value)}" for name, value in _own_fields(record).items())])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: object) -> str:
    """A value as it can stand after ``=``: quoted as JSON unless it is one plain word."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=False)
