"""What each role may say and hear on NATS: the least that it works with. Pure; the tests hold it against a real server.

A worker's id is the last token of all that it writes, so that nobody can speak for another; its inboxes begin with its
name, so that nobody hears another's answers. Who may read the log may read all of it: a cluster is one trust domain.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tensorbus.bus._auth import inbox_prefix
from tensorbus.errors import InvalidArgumentError
from tensorbus.events import Subjects
from tensorbus.ids import check_worker_id

ANSWER_S: Final = 300
"""How long an answer to a question may take, before the server forgets whom it was for."""
ANSWER_MESSAGES_MAX: Final = 1000
"""Who works on a long question says so now and then, before the answer."""


class Role(StrEnum):
    """Whose permissions they are. A process may have several."""

    BASIC = "basic"
    GATEWAY = "gateway"
    STORE = "store"
    SHARD_HOME = "shard-home"
    CALLER = "caller"
    ADMIN = "admin"


WRITES: Final[dict[Role, tuple[str, ...]]] = {
    Role.BASIC: ("artifact", "key", "series", "session", "instance", "replica", "clease", "op", "trunc"),
    Role.GATEWAY: ("artifact", "key", "series", "session", "op", "trunc"),
    Role.STORE: ("artifact", "session", "trunc", "fold", "purge", "archive"),
    Role.SHARD_HOME: ("artifact", "session", "trunc", "cluster"),
    Role.CALLER: (),
    Role.ADMIN: (),
}
"""The kinds of facts that a role writes, as itself. A witness ends others' sessions, and what went with them."""

WORKERS: Final = (Role.BASIC, Role.GATEWAY, Role.STORE, Role.SHARD_HOME)
"""Those who have sessions of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Subjects with wildcards; what is in no list is refused.

    Attributes:
        publish_allow: What may be published, questions to JetStream's API too.
        subscribe_allow: What may be listened to.
        answers: Whether questions may be answered at the inbox that they name.
    """

    publish_allow: tuple[str, ...]
    subscribe_allow: tuple[str, ...]
    answers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Somebody whom the servers know.

    Attributes:
        name: A worker's id, or the name of a caller or operator.
        nkey: The public key, if there is one yet.
    """

    name: str
    roles: tuple[Role, ...]
    nkey: str | None = None


def parse_user(text: str) -> User:
    """A user from ``ROLE[+ROLE]:NAME[:NKEY]``.

    Raises:
        InvalidArgumentError: If it is not written like that.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise InvalidArgumentError(f"{text!r} is not ROLE[+ROLE]:NAME[:NKEY], such as gateway+store:g1")
    try:
        roles = tuple(Role(role) for role in parts[0].split("+"))
    except ValueError as exc:
        raise InvalidArgumentError(f"roles are {', '.join(Role)}, not {parts[0]!r}") from exc
    nkey = parts[2] if len(parts) == 3 else None
    if nkey is not None and (len(nkey) != 56 or not nkey.startswith("U")):
        raise InvalidArgumentError(f"{nkey!r} is not the public key of a user, which is 56 characters from U on")
    return User(name=check_worker_id(parts[1]), roles=roles, nkey=nkey)


def grants(roles: Iterable[Role], name: str, *, subjects: Subjects) -> Permissions:
    """What somebody with these roles and this name may do.

    Args:
        name: The worker's id; for callers and operators the setting ``nats_user``.
        subjects: The prefix of the system's subjects.
    """
    chosen = tuple(dict.fromkeys(roles))
    publish = list(_reads(subjects))
    subscribe = [f"{inbox_prefix(name)}.>"]
    for role in chosen:
        publish += _writes(role, name, subjects)
        if role is Role.ADMIN:
            publish += _administers(subjects)
        elif role is Role.CALLER:  # a permit to read is for workers to ask for: they know for whose tenant
            publish += [subjects.rpc("query"), subjects.rpc("store.>")]
        else:
            publish.append(subjects.rpc(">"))
        if role is Role.BASIC:
            subscribe += [subjects.rpc(f"{what}.{name}") for what in ("permit", "op", "check")]
        if role is Role.STORE:
            subscribe += [subjects.rpc("query"), subjects.rpc(f"store.{name}")]
    return Permissions(
        publish_allow=tuple(dict.fromkeys(publish)),
        subscribe_allow=tuple(subscribe),
        answers=not {Role.BASIC, Role.STORE}.isdisjoint(chosen),
    )


def lacking(needed: Iterable[str], *, allowed: Sequence[str] | None, denied: Sequence[str] = ()) -> tuple[str, ...]:
    """Which of the subjects that are needed somebody may not use, at least in part.

    Args:
        needed: Subjects with wildcards, as :class:`Permissions` has them.
        allowed: What the servers allow; ``None`` where they allow everything.
        denied: What they forbid of that.
    """

    def fine(subject: str) -> bool:
        covered = allowed is None or any(_covers(rule, subject) for rule in allowed)
        return covered and not any(_overlap(rule.split("."), subject.split(".")) for rule in denied)

    return tuple(subject for subject in needed if not fine(subject))


def _covers(rule: str, subject: str) -> bool:
    """Whether a rule speaks for all that a subject with wildcards means."""
    have, want = rule.split("."), subject.split(".")
    if have[-1] == ">":
        return len(want) >= len(have) and _token_by_token(have[:-1], want)
    return len(want) == len(have) and ">" not in want and _token_by_token(have, want)


def _token_by_token(have: Sequence[str], want: Sequence[str]) -> bool:
    return all(a == b or (a == "*" and b != ">") for a, b in zip(have, want, strict=False))


def _overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two subjects with wildcards have any subject in common."""
    for a, b in zip(one, other, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(one) == len(other)


def _reads(subjects: Subjects) -> Iterator[str]:
    """To look at the streams, and to make readings of them."""
    yield "$SYS.REQ.USER.INFO"  # what one may do oneself
    yield "$JS.API.INFO"
    yield f"$JS.API.STREAM.MSG.GET.{subjects.log_stream}"
    yield f"$JS.API.STREAM.MSG.GET.{subjects.pages_stream}"
    for stream in subjects.streams:
        yield f"$JS.API.STREAM.INFO.{stream}"
        yield f"$JS.API.CONSUMER.CREATE.{stream}"
        yield f"$JS.API.CONSUMER.DELETE.{stream}.*"
        yield f"$JS.FC.{stream}.>"


def _writes(role: Role, name: str, subjects: Subjects) -> Iterator[str]:
    prefix = subjects.prefix
    for kind in WRITES[role]:
        yield f"{prefix}.ev.{kind}.*.{name}"
    if role in WORKERS:
        yield f"{prefix}.blob.*.*.{name}"
        yield f"{prefix}.live.*.{name}"
        yield f"$JS.API.STREAM.CREATE.{subjects.live_stream}"  # in memory: gone with a server that was alone
    if role in (Role.BASIC, Role.STORE):
        yield f"{prefix}.pconf.*.{name}"
    if role is Role.STORE:
        yield f"{prefix}.ev.role.store.{name}"
        yield f"{prefix}.snap.*.{name}"
        yield f"$JS.API.STREAM.PURGE.{subjects.log_stream}"
        yield f"$JS.API.STREAM.PURGE.{subjects.pages_stream}"
    if role is Role.SHARD_HOME:
        for kind in ("lease", "shard", "psnap", "pconf"):
            yield f"{prefix}.{kind}.*.{name}"
        yield f"{prefix}.pblob.*.*.{name}"


def _administers(subjects: Subjects) -> Iterator[str]:
    """To make the streams, to look after them, and to move them to other servers; not to write or purge facts."""
    for stream in subjects.streams:
        for verb in ("CREATE", "UPDATE", "DELETE", "SNAPSHOT", "RESTORE"):
            yield f"$JS.API.STREAM.{verb}.{stream}"
        yield f"$JS.SNAPSHOT.ACK.{stream}.>"
        yield f"$JS.SNAPSHOT.RESTORE.{stream}.>"


def users_config(users: Sequence[User], *, subjects: Subjects) -> str:
    """A file to include in nats-server.conf: who the users are and what they may do.

    Raises:
        InvalidArgumentError: If a user has no key, or two have one name or key.
    """
    _check_users(users)
    lines = [
        "# Who may do what on this system's subjects. Made by `tensorbus bus grants`; include it in nats-server.conf."
    ]
    lines += ["authorization {", "  users: ["]
    for user in users:
        granted = grants(user.roles, user.name, subjects=subjects)
        lines += [f"    # {', '.join(user.roles)}: {user.name}", f"    {{ nkey: {user.nkey}, permissions: {{"]
        lines += [f"        publish: {{ allow: {_list(granted.publish_allow)} }}"]
        lines += [f"        subscribe: {{ allow: {_list(granted.subscribe_allow)} }}"]
        if granted.answers:
            lines += [f'        allow_responses: {{ max: {ANSWER_MESSAGES_MAX}, expires: "{ANSWER_S}s" }}']
        lines += ["    } }"]
    return "\n".join([*lines, "  ]", "}", ""])


def users_json(users: Sequence[User], *, subjects: Subjects) -> list[dict[str, Any]]:
    """The same as JSON values, for those who make JWTs or accounts of it. Keys may be missing."""
    return [_as_json(user, grants(user.roles, user.name, subjects=subjects)) for user in users]


def _as_json(user: User, granted: Permissions) -> dict[str, Any]:
    permissions: dict[str, Any] = {
        "publish": {"allow": list(granted.publish_allow)},
        "subscribe": {"allow": list(granted.subscribe_allow)},
    }
    if granted.answers:
        permissions["allow_responses"] = {"max": ANSWER_MESSAGES_MAX, "expires_s": ANSWER_S}
    return {"name": user.name, "roles": list(user.roles), "nkey": user.nkey, "permissions": permissions}


def _check_users(users: Sequence[User]) -> None:
    for user in users:
        if user.nkey is None:
            raise InvalidArgumentError(
                f"user {user.name} has no key: name it as ROLE:{user.name}:NKEY, or generate one"
            )
    names, keys = [user.name for user in users], [str(user.nkey) for user in users]
    for many in (names, keys):
        twice = sorted({one for one in many if many.count(one) > 1})
        if twice:
            raise InvalidArgumentError(
                f"{', '.join(twice)}: there twice; one process with several roles is ROLE+ROLE:NAME"
            )


def _list(subjects: Iterable[str]) -> str:
    inner = ",\n          ".join(json.dumps(subject) for subject in subjects)
    return f"[\n          {inner}\n        ]"
