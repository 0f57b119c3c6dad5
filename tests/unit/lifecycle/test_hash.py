"""The incremental hash: what it costs is the change, what it says is the state."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.lifecycle import _hash
from tensorbus.lifecycle._hash import StateHash, hash_of

changes = st.lists(st.tuples(st.integers(0, 8), st.none() | st.text(max_size=3)), max_size=40)


@given(changes, st.integers(0, 5))
def test_after_any_changes_it_is_the_sum_over_what_is_there(changed: list[tuple[int, str | None]], wait: int) -> None:
    texts: dict[Hashable, str | None] = {}
    state = StateHash(texts.get)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hash, "DIRTY_MAX", wait)
        for key, text in changed:
            texts[key] = text
            state.mark(key)
            assert len(state._dirty) <= wait
    assert state.hex() == hash_of(text for text in texts.values() if text is not None)


def test_of_nothing_it_is_zero_and_reading_it_changes_nothing() -> None:
    state = StateHash(lambda key: str(key))
    assert state.hex() == "0" * 64
    state.mark(1)
    assert state.hex() == state.hex() != "0" * 64


def test_the_order_of_changes_does_not_matter_and_equal_texts_count_twice() -> None:
    assert hash_of(["a", "b"]) == hash_of(["b", "a"])
    assert hash_of(["a", "a"]) != hash_of(["a"])
