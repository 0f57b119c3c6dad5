"""Permissions as a function of roles and name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.bus import (
    NatsAuth,
    Role,
    User,
    grants,
    lacking,
    new_seed,
    parse_user,
    public_key,
    users_config,
    users_json,
)
from tensorbus.bus._auth import inbox_prefix
from tensorbus.config import Settings
from tensorbus.errors import InvalidArgumentError
from tensorbus.events import Subjects

SUBJECTS = Subjects("tb.x")
KEY = public_key(new_seed(bytes(range(32))))

roles = st.lists(st.sampled_from(Role), min_size=1, unique=True)
names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


@given(roles, names)
def test_what_is_written_ends_in_the_own_name_and_what_is_heard_is_for_it(chosen: list[Role], name: str) -> None:
    granted = grants(chosen, name, subjects=SUBJECTS)
    for subject in granted.publish_allow:
        stored = subject.startswith("tb.x.") and not subject.startswith("tb.x.rpc.")
        assert not stored or subject.endswith(f".{name}")
        assert subject.startswith(("tb.x.", "$JS.API.", "$JS.FC.TB", "$JS.SNAPSHOT.", "$SYS.REQ.USER.INFO"))
    assert granted.subscribe_allow[0] == f"_INBOX_{name}.>"
    assert granted.answers is (Role.STORE in chosen or Role.BASIC in chosen)


@given(roles, names)
def test_several_roles_may_what_each_may(chosen: list[Role], name: str) -> None:
    together = grants(chosen, name, subjects=SUBJECTS)
    alone = [grants([role], name, subjects=SUBJECTS) for role in chosen]
    assert set(together.publish_allow) == {subject for one in alone for subject in one.publish_allow}
    assert set(together.subscribe_allow) == {subject for one in alone for subject in one.subscribe_allow}


@pytest.mark.parametrize("role", Role)
def test_only_the_store_purges_and_only_admin_makes_the_log(role: Role) -> None:
    allowed = grants([role], "a", subjects=SUBJECTS).publish_allow
    assert any("PURGE" in subject for subject in allowed) is (role is Role.STORE)
    assert ("$JS.API.STREAM.CREATE.TB_tb_x" in allowed) is (role is Role.ADMIN)
    writes = any(".ev." in subject for subject in allowed)
    assert writes is (role not in (Role.CALLER, Role.ADMIN))


def test_users_are_read_from_words() -> None:
    assert parse_user("gateway+store:g1") == User(name="g1", roles=(Role.GATEWAY, Role.STORE))
    assert parse_user(f"caller:c1:{KEY}").nkey == KEY
    for wrong in ("w1", "basic:", "king:w1", "basic:w.1", "basic:w1:key", f"basic:w1:{KEY}:more"):
        with pytest.raises(InvalidArgumentError):
            parse_user(wrong)


def test_a_configuration_needs_a_key_of_each_and_no_two_alike() -> None:
    one = User(name="a", roles=(Role.BASIC,), nkey=KEY)
    assert f"nkey: {KEY}" in users_config([one], subjects=SUBJECTS)
    for users in ([User(name="a", roles=(Role.BASIC,))], [one, one], [one, User(name="b", roles=one.roles, nkey=KEY)]):
        with pytest.raises(InvalidArgumentError):
            users_config(users, subjects=SUBJECTS)
    assert users_json([User(name="a", roles=(Role.BASIC,))], subjects=SUBJECTS)[0]["nkey"] is None


def test_seeds_and_keys() -> None:
    assert KEY.startswith("U") and len(KEY) == 56
    for wrong in ("", "SUAB", "no seed", "SÜ"):
        with pytest.raises(InvalidArgumentError):
            public_key(wrong)


def test_an_inbox_is_one_token() -> None:
    assert inbox_prefix("W-1_x") == "_INBOX_W-1_x"
    assert inbox_prefix("a b.c*>") == "_INBOX_a_b_c__"


def test_the_homes_own_server_knows_no_users() -> None:
    files = {"nats_nkey_seed": "/k", "nats_tls_ca": "/c"}
    assert NatsAuth.of(Settings.model_validate(files)) == NatsAuth()
    auth = NatsAuth.of(Settings.model_validate({**files, "nats_url": "nats://h:1"}))
    assert auth.encrypts and str(auth.nkey_seed) == "/k"


@pytest.mark.parametrize(
    ("needed", "allowed", "denied", "lacks"),
    [
        ("tb.ev.key.*.w1", None, (), False),
        ("tb.ev.key.*.w1", (), (), True),
        ("tb.ev.key.*.w1", ("tb.ev.key.*.w1",), (), False),
        ("tb.ev.key.*.w1", ("tb.ev.>",), (), False),
        ("tb.ev.key.*.w1", (">",), (), False),
        ("tb.ev.key.*.w1", ("tb.ev.*.*.*",), (), False),
        ("tb.ev.key.*.w1", ("tb.ev.key.*.w2",), (), True),
        ("tb.ev.key.*.w1", ("tb.ev.key.abc.w1",), (), True),
        ("tb.ev.key.*.w1", ("tb.ev.key.*",), (), True),
        ("tb.rpc.>", ("tb.rpc.*",), (), True),
        ("tb.rpc.>", ("tb.rpc.>",), (), False),
        ("tb.rpc.>", ("tb.>",), (), False),
        ("tb.rpc.query", ("tb.rpc.query.>",), (), True),
        ("tb.ev.key.*.w1", (">",), ("tb.ev.key.>",), True),
        ("tb.ev.key.*.w1", None, ("*.*.key.abc.w1",), True),
        ("tb.ev.key.*.w1", (">",), ("tb.ev.key.*.w2",), False),
        ("tb.rpc.>", (">",), ("tb.rpc.op.w1",), True),
        ("tb.rpc.query", (">",), ("tb.rpc",), False),
    ],
)
def test_what_somebody_lacks(
    needed: str, allowed: tuple[str, ...] | None, denied: tuple[str, ...], lacks: bool
) -> None:
    assert lacking([needed], allowed=allowed, denied=denied) == ((needed,) if lacks else ())


@pytest.mark.parametrize("role", Role)
def test_who_has_what_a_role_is_given_lacks_nothing_of_it(role: Role) -> None:
    has = grants([role], "w1", subjects=Subjects())
    assert lacking(has.publish_allow, allowed=has.publish_allow) == ()
    other = grants([role], "w2", subjects=Subjects())
    own = lacking(has.publish_allow, allowed=other.publish_allow)
    assert all(".w1" in subject for subject in own)
    assert bool(own) == (role not in (Role.CALLER, Role.ADMIN))
