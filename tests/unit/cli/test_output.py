"""How commands show sizes, ages, names and progress."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.cli import _output as output
from tensorbus.cli._progress import Progress
from tensorbus.cli._urls import without_password
from tensorbus.clock import NS_PER_S


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (269_000_000, "256.5 MiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert output.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (86_400, "1d"), (10 * 86_400, "10d")]
)
def test_ages(seconds: int, text: str) -> None:
    assert output.age(0, now_ns=seconds * NS_PER_S) == text


def test_a_stamp_is_utc_to_the_millisecond() -> None:
    assert output.stamp(1_700_000_000 * NS_PER_S + 42_999_999) == "2023-11-14 22:13:20.042Z"


@pytest.mark.parametrize("text", ["demo/x", "naïve key", "a.b *>"])
def test_plain_names_are_shown_as_they_are(text: str) -> None:
    assert output.name(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", '""'),
        (" x", '" x"'),
        ("a\nb", r'"a\nb"'),
        ("\x1b[2J", r'"\u001b[2J"'),
        ('"q"', r'"\"q\""'),
        ("\u202e", r'"\u202e"'),
    ],
)
def test_odd_names_are_quoted(text: str, shown: str) -> None:
    assert output.name(text) == shown


@given(st.text())
def test_a_shown_name_is_one_printable_line_and_says_which_it_is(text: str) -> None:
    shown = output.name(text)
    assert shown.isprintable()
    assert (json.loads(shown) if shown.startswith('"') else shown) == text


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("KEY", "SIZE"), [("a", "1 B"), ("long", "1000 B")], right=("SIZE",))
    assert capsys.readouterr().out == "KEY     SIZE\na        1 B\nlong  1000 B\n"


def test_system_ids_are_cut_and_given_ids_are_not() -> None:
    assert output.short_id("tb1:" + "a" * 64) == "tb1:" + "a" * 16 + "…"
    assert output.short_id("b" * 64) == "b" * 64


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://h:1", "nats://h:1"),
        ("nats://u:p@h:1,nats://t@h:2", "nats://u:***@h:1,nats://***@h:2"),
        ("nats://u:p@p@h:1", "nats://u:***@h:1"),
    ],
)
def test_passwords_are_hidden(url: str, shown: str) -> None:
    assert without_password(url) == shown


class Ticking:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return self.ns


def test_progress_is_drawn_now_and_then_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Ticking()
    with Progress("put x", clock=clock, shown=True) as progress:
        for step in range(101):
            clock.ns += NS_PER_S // 100
            progress(step << 20, 100 << 20)
    drawn = capsys.readouterr().err.split("\r")[1:]
    assert 15 <= len(drawn) <= 25
    assert "100%  100.0 MiB of 100.0 MiB, 99.0 MiB/s" in drawn[-1]
    assert drawn[-1].endswith("\n")


def test_progress_says_nothing_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("put x") as progress:
        progress(1, 0)
    assert capsys.readouterr().err == ""
