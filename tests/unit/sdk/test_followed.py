"""The followed directory: only newer news counts, whatever overtakes what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorbus.sdk._followed import Followed
from tensorbus.sdk._records import ArtifactInfo, parse
from tests.unit.sdk.fake_worker import info

K = ("any", "k")


def art(number: int) -> ArtifactInfo:
    return parse(ArtifactInfo, info(f"tbr:{number}"))


def learn(followed: Followed, name: tuple[str, str], number: int, position: int) -> None:
    followed.ask(name)
    followed.answered(name, art(number), position)
    followed.asked(name)


def test_only_newer_pushes_count() -> None:
    followed = Followed()
    learn(followed, K, 1, 10)
    followed.pushed(K, art(0), 9)
    assert followed.look(K).info == art(1)
    followed.pushed(K, art(2), 11)
    assert (followed.look(K).info, followed.look(K).position) == (art(2), 11)
    followed.pushed(K, None, 12)
    assert followed.look(K) is None


def test_pushes_about_what_was_not_asked_are_nothing() -> None:
    followed = Followed()
    followed.pushed(K, art(1), 5)
    assert followed.look(K) is None


def test_a_push_that_overtakes_the_answer_wins() -> None:
    followed = Followed()
    followed.ask(K)
    followed.pushed(K, art(2), 11)
    assert followed.answered(K, art(1), 10) == (art(2), 11)
    followed.asked(K)
    assert followed.look(K).info == art(2)


def test_an_end_that_overtakes_the_answer_leaves_nothing() -> None:
    followed = Followed()
    followed.ask(K)
    followed.ask(K)
    followed.pushed(K, None, 11)
    for _ in range(2):  # both who asked find that out
        assert followed.answered(K, art(1), 10) == (None, 11)
        followed.asked(K)
    assert followed.look(K) is None


def test_own_changes_are_known_at_once_and_ends_asked_again() -> None:
    followed = Followed()
    learn(followed, K, 1, 10)
    learn(followed, ("id", "tbr:2"), 2, 10)
    followed.changed_here(art(2), "k", 12)
    assert followed.look(K).info == art(2)
    followed.ended_here("tbr:2", None, 13)
    assert len(followed) == 0


def test_a_lost_connection_forgets_everything() -> None:
    followed = Followed()
    learn(followed, K, 1, 10)
    followed.ask(K)
    followed.pushed(K, art(9), 99)
    followed.clear()
    assert followed.look(K) is None
    assert followed.answered(K, art(2), 11) == (art(2), 11)
    followed.asked(K)


def test_what_nobody_looks_at_goes_first() -> None:
    dropped: list[tuple[str, str]] = []
    followed = Followed(limit=100, on_dropped=dropped.extend)
    for number in range(100):
        learn(followed, ("any", f"k{number}"), number, 1)
    for number in range(100):
        followed.look(("any", f"k{number}")).used = number % 2 == 0
    learn(followed, ("any", "new"), 1, 1)
    assert len(followed) <= 100
    assert dropped
    assert all(int(ref[1:]) % 2 for _, ref in dropped)
    assert followed.look(("any", "new")) is not None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.booleans()), max_size=40), st.integers(1, 4))
def test_the_newest_news_is_what_is_known(news: list[tuple[str, int, bool]], limit: int) -> None:
    followed = Followed(limit=limit)
    for ref, position, is_answer in news:
        name = ("any", ref)
        before = followed.look(name)
        if is_answer:
            learn(followed, name, position, position)
        else:
            followed.pushed(name, art(position), position)
        after = followed.look(name)
        if before is not None and after is not None:
            assert after.position == max(before.position, position)
        assert after is None or after.info == art(after.position)
        assert len(followed) <= limit
    linked = {name for names in followed._by_artifact.values() for name in names}
    assert linked == set(followed._entries)
