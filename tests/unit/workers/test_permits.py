"""Permits that a reader signs with a key of its source: good for one artifact of one tenant, and only there."""

from __future__ import annotations

import pytest

from tensorbus.errors import DeniedError, InvalidArgumentError
from tensorbus.ids import SystemIds
from tensorbus.workers._permits import KEY_S, KeyAsk, PermitAsk, Permits, parse_ask


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at_ns = 0

    def now_ns(self) -> int:
        return self.at_ns

    def wall_ns(self) -> int:
        return self.at_ns


READ = PermitAsk(op="read", tenant="acme", artifact="tb1:x")


def permits(clock: Hands | None = None) -> Permits:
    return Permits(SystemIds(), clock or Hands())


def test_a_signed_permit_is_for_its_artifact() -> None:
    source = permits()
    assert source.check(source.issue_key().sign(READ), "read") == READ


@pytest.mark.parametrize("change", [{"tenant": "rival"}, {"artifact": "tb1:y"}, {"mac": "0" * 32}, {"mac": "é"}])
def test_a_permit_that_was_changed_is_denied(change: dict[str, object]) -> None:
    source = permits()
    with pytest.raises(DeniedError):
        source.check(source.issue_key().sign(READ) | change, "read")


def test_what_another_worker_gave_the_key_for_is_denied() -> None:
    with pytest.raises(DeniedError):
        permits().check(permits().issue_key().sign(READ), "read")


@pytest.mark.parametrize("token", [{}, {"key": 7}, [], None, 7, "0" * 32])
def test_what_is_no_permit_is_denied(token: object) -> None:
    with pytest.raises(DeniedError):
        permits().check(token, "read")


def test_nobody_signs_a_permit_to_put() -> None:
    source = permits()
    with pytest.raises(DeniedError):
        source.check(source.issue_key().sign(READ), "put")


def test_pages_are_signed_for_a_tenant_and_artifacts_are_no_pages() -> None:
    source = permits()
    pages = PermitAsk(op="pages", tenant="acme")
    signed = source.issue_key().sign(pages)
    assert source.check(signed, "pages") == pages
    for token, op in [(signed, "read"), (source.issue_key().sign(READ), "pages"), (signed | {"op": "read"}, "read")]:
        with pytest.raises(DeniedError):
            source.check(token, op)
    assert source.check(source.issue(pages), "pages") == pages


def test_a_key_runs_out() -> None:
    clock = Hands()
    source = permits(clock)
    signed = source.issue_key().sign(READ)
    clock.at_ns = int(KEY_S * 1e9)
    with pytest.raises(DeniedError):
        source.check(signed, "read")


def test_questions_are_told_apart() -> None:
    assert parse_ask(b'{"op":"key"}') == KeyAsk(op="key")
    assert parse_ask(READ.model_dump_json().encode()) == READ
    with pytest.raises(InvalidArgumentError):
        parse_ask(b'{"op":"read"}')
