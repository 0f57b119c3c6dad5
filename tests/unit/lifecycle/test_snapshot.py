"""A state that was written and read back is the state, and goes on like it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st

from tensorbus.errors import ConflictError, CorruptError, UnavailableError
from tensorbus.events import STORE_ROLE, RoleGranted, Subjects, UnknownEvent
from tensorbus.lifecycle import SNAPSHOT_FORMAT, Directory, Loader, Touched, differences, dissolve, dump, load
from tensorbus.lifecycle._snapshot import PIECE_BYTES
from tests.unit.lifecycle import history as h

LOOKED_UP = ("by_digest", "by_view", "by_worker", "by_lessor")
"""Indexes that nobody walks through in order."""


def everything(state: Directory) -> dict[str, Any]:
    """All that a state holds and all orders that mean something."""
    found = h.everything(state)
    for name in LOOKED_UP[1:]:
        index = getattr(state, name)
        found[name] = repr(sorted((key, sorted(of) if isinstance(of, dict) else of) for key, of in index.items()))
    found["by_digest"] = repr(sorted((key, list(linked)) for key, linked in state.by_digest.items()))
    del found["_keys_shared"]
    return found


def written(state: Directory) -> bytes:
    return b"".join(dump(state))


def well_known(log: h.Log) -> list[Any]:
    """The messages up to the first that this version does not know."""
    state = Directory()
    messages = []
    for message in log.messages:
        state.apply(message)
        if state.unknown:
            break
        messages.append(message)
    return messages


def rich() -> h.Log:
    """A log with something of everything."""
    log = h.write([])
    log.append(h.view_defined())
    log.say(h.added, h.W2, view=h.V1, tier=h.Tier.DISK)
    log.say(h.granted, h.W2)
    log.append(h.bound())
    log.append(h.bound("other", h.Y))
    log.append(h.published(1))
    log.append(h.published(2, h.Y))
    log.append(h.archived())
    log.append(h.purge())
    log.append(h.destroyed(h.Y))
    log.append(h.bound("gone", h.D1))
    log.append(h.destroyed(h.D1))
    log.append(h.put(h.Y, None))
    log.append(h.ended(h.W2))
    return log


@given(h.histories)
def test_from_every_position_a_snapshot_and_the_rest_are_the_whole(log: h.Log) -> None:
    messages = well_known(log)
    whole, verdicts = Directory(), []
    snapshots = [written(whole)]
    for message in messages:
        verdicts.append(whole.apply(message))
        snapshots.append(written(whole))
    for at, snapshot in enumerate(snapshots):
        state = load([snapshot], verify=True)
        assert written(state) == snapshot
        assert [state.apply(message) for message in messages[at:]] == verdicts[at:]
        state.validate()
        assert state.hash() == whole.hash() == state.full_hash()
        assert everything(state) == everything(whole)
        assert written(state) == snapshots[-1]


@given(h.histories, st.data())
def test_a_state_restored_twice_on_the_way_goes_on_the_same(log: h.Log, data: st.DataObject) -> None:
    state = Directory()
    for message in log.messages:
        if not state.unknown and data.draw(st.integers(0, 3)) == 0:
            state = load(dump(state))
        state.apply(message)
    assert state.hash() == log.state.full_hash()
    assert everything(state) == everything(log.state)


@given(h.histories, st.lists(st.integers(0, 20_000)))
def test_pieces_may_be_cut_anywhere(log: h.Log, cuts: list[int]) -> None:
    assume(not log.state.unknown)
    data = written(log.state)
    places = sorted(cut % len(data) for cut in cuts)
    pieces = [data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)]
    assert everything(load(pieces)) == everything(log.state)


def test_something_of_everything_survives() -> None:
    log = rich()
    log.append(RoleGranted(role=STORE_ROLE), h.W2)
    state = load(dump(log.state), verify=True)
    assert everything(state) == everything(log.state)
    log.append(h.bound("a\n\x00\x7f\u2028 ü \U0001f600"))
    assert everything(load(dump(log.state), verify=True)) == everything(log.state)


def test_the_header_says_what_it_is() -> None:
    log = rich()
    header = json.loads(written(log.state).split(b"\n")[0])
    assert (header["format"], header["fold"], header["seq"]) == (SNAPSHOT_FORMAT, 1, log.state.seq)
    assert header["hash"] == log.state.hash()
    loader = Loader()
    loader.feed(written(log.state))
    assert (loader.seq, loader.hash, loader.fold) == (log.state.seq, log.state.hash(), 1)


def large() -> h.Log:
    log = h.Log()
    log.open()
    log.append(h.put())
    for number in range(2000):
        log.append(h.bound(f"{number}-{'k' * 60}"))
        log.append(h.published(number + 1))
    return log


def test_a_large_state_comes_in_small_pieces() -> None:
    log = large()
    pieces = list(dump(log.state))
    assert len(pieces) > 4
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert everything(load(pieces, verify=True)) == everything(log.state)


def test_a_state_that_passed_over_something_is_not_written() -> None:
    log = rich()
    log.append(UnknownEvent("FromTheFuture"))
    with pytest.raises(UnavailableError, match="upgrade"):
        dump(log.state)


def test_a_state_that_moves_on_meanwhile_is_noticed() -> None:
    log = large()
    pieces = dump(log.state)
    next(pieces)
    log.append(h.bound("another"))
    with pytest.raises(ConflictError, match="moved from"):
        list(pieces)


def test_every_truncation_is_noticed() -> None:
    data = written(rich().state)
    for length in (*range(0, len(data), 7), len(data) - 1):
        with pytest.raises(CorruptError):
            load([data[:length]])


def test_what_follows_the_end_is_noticed() -> None:
    data = written(rich().state)
    with pytest.raises(CorruptError, match="behind its end"):
        load([data, b"{}\n"])
    with pytest.raises(CorruptError):
        load([data + b"x"])


def test_every_flipped_bit_is_noticed() -> None:
    data = written(rich().state)
    for at in range(0, len(data), 3):
        bent = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        with pytest.raises((CorruptError, UnavailableError)):
            load([bent])


@given(st.data())
def test_lines_in_another_order_are_noticed(data: st.DataObject) -> None:
    lines = written(rich().state).splitlines(keepends=True)
    bent = data.draw(st.permutations(lines))
    assume(bent != lines)
    with pytest.raises(CorruptError):
        load([b"".join(bent)])


def resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """With something replaced and a trailer that says that all is well."""
    lines = data.replace(old, new, 1).splitlines(keepends=True)
    body = b"".join(lines[:-1])
    return body + json.dumps(["end", len(lines) - 1, blake3(body).hexdigest()], separators=(",", ":")).encode() + b"\n"


def test_a_writers_error_is_noticed() -> None:
    state = rich().state
    data = written(state)
    assert load([resealed(data, b"x", b"x")]).hash() == state.hash()
    term = f"{state.terms[Touched('artifact', h.T, 'x')]:x}".encode()
    with pytest.raises(CorruptError, match="hash"):
        load([resealed(data, term, term[:-1] + (b"0" if term[-1:] != b"0" else b"1"))])
    with pytest.raises(CorruptError, match="twice or missing"):
        load([resealed(data, b'"keys":', b'"keys":1')])
    bent = resealed(data, b'"policy",2]', b'"policy",3]')
    assert load([bent]).series[h.T, "policy"].last == 3
    with pytest.raises(CorruptError, match="hash"):
        load([bent], verify=True)


@pytest.mark.parametrize(("old", "new"), [(b'"format":3', b'"format":4'), (b'"fold":1', b'"fold":2')])
def test_what_a_newer_program_wrote_asks_for_an_upgrade(old: bytes, new: bytes) -> None:
    with pytest.raises(UnavailableError, match="upgrade"):
        load([resealed(written(rich().state), old, new)])


def test_another_file_is_no_snapshot() -> None:
    with pytest.raises(CorruptError):
        load([b'{"name":"something else","format":1}\n'])
    with pytest.raises(CorruptError):
        load([b"\x28\xb5\x2f\xfd\n"])


def test_the_prefix_is_the_readers_own() -> None:
    assert load(dump(rich().state), Subjects("t1")).subjects.prefix == "t1"


@given(h.histories, h.histories)
def test_becoming_another_state_keeps_the_object_and_tells_all_differences(one: h.Log, other: h.Log) -> None:
    before, after = h.fold(one.messages), h.fold(other.messages)
    was, will = everything(before), everything(after)
    told = {touched for slice_ in differences(before, after) for touched in slice_}
    expected = {
        key
        for key in before.terms.keys() | after.terms.keys()
        if isinstance(key, Touched) and before.terms.get(key) != after.terms.get(key)
    }
    assert told == expected
    before.become(after)
    assert everything(before) == will
    assert everything(after) == was
    before.validate()
    for _ in dissolve(after):
        pass
    assert not (after.artifacts or after.heads or after.terms)
    before.validate()


def test_a_state_does_not_differ_from_itself() -> None:
    state = rich().state
    assert not any(differences(state, load(dump(state))))
