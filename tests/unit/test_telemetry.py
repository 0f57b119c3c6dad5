"""Log lines and trace context."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tensorbus.telemetry import ROOT_LOGGER, fields, setup_logging, traceparent


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    logger = logging.getLogger(ROOT_LOGGER)
    before = (logger.handlers, logger.level, logger.propagate)
    yield io.StringIO()
    logger.handlers, logger.level, logger.propagate = before


def test_a_text_line_quotes_what_is_not_one_plain_word(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    logging.getLogger("tensorbus.x").info("key %s", "bound", extra=fields(key="a b\n", worker="w-1", duration_ms=1.5))
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.rstrip().endswith('info    tensorbus.x key bound key="a b\\n" worker=w-1 duration_ms=1.5')


def test_a_json_line_carries_fields_and_traceback(stream: io.StringIO) -> None:
    setup_logging("debug", as_json=True, stream=stream)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("tensorbus.x").exception("failed", extra=fields(nbytes=7))
    line = json.loads(stream.getvalue())
    assert (line["level"], line["message"], line["nbytes"]) == ("error", "failed", 7)
    assert "ValueError: no" in line["traceback"]


def test_the_level_is_kept(stream: io.StringIO) -> None:
    setup_logging("warning", stream=stream)
    logging.getLogger("tensorbus.x").info("quiet")
    assert stream.getvalue() == ""


def test_without_opentelemetry_there_is_no_trace_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    assert traceparent() == ""


@pytest.mark.parametrize(("valid", "expected"), [(True, f"00-{1:032x}-{2:016x}-01"), (False, "")])
def test_the_current_span_becomes_a_traceparent(monkeypatch: pytest.MonkeyPatch, valid: bool, expected: str) -> None:
    context = SimpleNamespace(is_valid=valid, trace_id=1, span_id=2, trace_flags=1)
    span = SimpleNamespace(get_span_context=lambda: context)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", SimpleNamespace(get_current_span=lambda: span))
    assert traceparent() == expected
