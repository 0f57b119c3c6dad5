"""Errors: one class per reaction, the same on both ends of a socket."""

from __future__ import annotations

import json
import pickle

import pytest

from tensorbus import errors
from tensorbus.errors import ErrorKind, TensorbusError, from_wire, to_wire

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, TensorbusError)]


def test_each_kind_has_one_class() -> None:
    assert sorted(cls.kind for cls in CLASSES) == sorted(ErrorKind)


def test_kinds_are_only_ever_added_to() -> None:
    assert {
        "internal",
        "not_found",
        "conflict",
        "expired",
        "fenced",
        "unavailable",
        "deadline_exceeded",
        "cancelled",
        "invalid_argument",
        "corrupt",
        "out_of_space",
        "denied",
        "plan_failed",
    } <= set(ErrorKind)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_crosses_a_socket_and_a_pickle_as_itself(cls: type[TensorbusError]) -> None:
    error = cls("what happened", artifact="x", position={"TB": 7}, none=None)
    for again in (from_wire(json.loads(json.dumps(to_wire(error)))), pickle.loads(pickle.dumps(error))):
        assert type(again) is cls
        assert (str(again), again.details) == ("what happened", error.details)
        assert again.retryable is cls.retryable


def test_builtin_handlers_catch_what_they_mean() -> None:
    assert issubclass(errors.NotFoundError, KeyError)
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert str(errors.NotFoundError("plain words")) == "plain words"  # a KeyError would quote them


def test_only_what_a_retry_can_help_is_retryable() -> None:
    assert {cls.__name__ for cls in CLASSES if cls.retryable} == {
        "UnavailableError",
        "DeadlineExceededError",
        "OutOfSpaceError",
    }


@pytest.mark.parametrize("data", [{}, {"kind": "from_the_future", "message": "m"}, {"kind": 3, "details": [1]}])
def test_an_error_of_a_newer_peer_is_the_base_class(data: dict[str, object]) -> None:
    assert type(from_wire(data)) is TensorbusError


def test_details_may_be_named_as_the_message_is() -> None:
    error = from_wire({"kind": "conflict", "message": "m", "details": {"message": "theirs", "self": 1}})
    assert error.message == "m"
    assert error.details == {"message": "theirs", "self": 1}
