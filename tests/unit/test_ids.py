"""Names: which text may be one, and what stands for it in a subject."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus import ids
from tensorbus.errors import InvalidArgumentError

TOKEN_X = "ai2t44qlxw6wtpc2rsm55c4xbacmjf7z"
RUN_NIGHTLY = "2vd3osijxfouodcifpcuja4zlwczb3ey"

utf8 = st.text(st.characters(codec="utf-8"))


def test_tokens_that_are_on_somebodys_log_never_change() -> None:
    assert ids.subject_token("artifact", "", "x") == TOKEN_X
    assert ids.run_id("acme", "nightly") == RUN_NIGHTLY


@given(utf8, utf8, utf8)
def test_a_token_is_32_letters_whatever_the_text(kind: str, tenant: str, name: str) -> None:
    assert re.fullmatch("[a-z2-7]{32}", ids.subject_token(kind, tenant, name))


@given(st.lists(utf8, max_size=4), st.lists(utf8, max_size=4))
def test_lengths_keep_parts_apart(one: list[str], other: list[str]) -> None:
    assert (ids.prefixed(*one) == ids.prefixed(*other)) == (one == other)


@given(st.binary(max_size=64))
def test_base32_is_lower_case_without_padding(data: bytes) -> None:
    assert re.fullmatch("[a-z2-7]*", ids.b32(data))


class CountingIds:
    """0, 1, 2, … in as many digits as asked for."""

    def __init__(self) -> None:
        self.next = 0

    def hex(self, nbytes: int) -> str:
        self.next += 1
        return f"{self.next:0{2 * nbytes}x}"


def test_ids_come_from_the_source_that_is_given() -> None:
    source = CountingIds()
    assert ids.new_incarnation(source) == "0" * 15 + "1"
    assert ids.new_event_id(source) == "0" * 31 + "2"
    assert ids.new_lease_id(source) == "0" * 23 + "3"
    assert ids.random_artifact_id(source) == "tbr:" + "0" * 39 + "4"


def test_the_systems_ids_differ() -> None:
    assert len({ids.new_event_id(ids.SystemIds()) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("text", ["tb1:x", "tbr:", "tbv:0"])
def test_a_name_never_looks_like_an_id_of_the_system(text: str) -> None:
    assert ids.is_system_id(text)
    with pytest.raises(InvalidArgumentError, match="prefix"):
        ids.check_name(text, what="key")


@pytest.mark.parametrize("text", ["a", "a.b *>\n", "ключ", "\0", "tb2:x", "x" * 1024, "é" * 512])
def test_a_name_is_any_text_of_up_to_1024_bytes(text: str) -> None:
    assert ids.check_name(text, what="key") == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must not be empty"),
        ("x" * 1025, "1025 bytes long, the most is 1024"),
        ("é" * 513, "1026 bytes long"),
        ("\ud800", "cannot be written as UTF-8"),
        (7, "must be a str, not int"),
        (b"x", "must be a str, not bytes"),
        (None, "must be a str, not NoneType"),
    ],
)
def test_what_is_no_name_is_refused_with_the_reason(text: object, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        ids.check_name(text, what="key")


def test_a_tensor_may_be_nameless_and_have_a_long_name() -> None:
    assert ids.check_tensor_name("") == ""
    assert ids.check_tensor_name("x" * 65_536)
    for text in ("x" * 65_537, "\udfff", 3):
        with pytest.raises(InvalidArgumentError):
            ids.check_tensor_name(text)


@pytest.mark.parametrize("text", ["w", "W-1_b", "x" * 64])
def test_a_worker_id_is_a_token(text: str) -> None:
    assert ids.check_worker_id(text) == text


@pytest.mark.parametrize("text", ["", "a.b", "a b", "*", ">", "é", "x" * 65, "w\n"])
def test_what_is_no_token_is_no_worker_id(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="worker id"):
        ids.check_worker_id(text)
