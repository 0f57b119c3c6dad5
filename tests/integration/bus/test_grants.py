"""The permissions of `tensorbus bus grants` on a real server: what each role may, and what is denied at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorbus.bus import EmbeddedServer, NatsAuth, NatsBus, append, provision
from tensorbus.bus._auth import new_seed, public_key
from tensorbus.bus._grants import Role, User, users_config
from tensorbus.bus._requests import NoStreamError
from tensorbus.clock import Deadline
from tensorbus.errors import DeniedError
from tensorbus.events import MSG_ID, Subjects
from tensorbus.ids import SystemIds
from tensorbus.testing._bus_contract import LIFE, headers, replica_added, soon

pytestmark = pytest.mark.integration

SUBJECTS = Subjects("tb")
ID = "a" * 32
NAMES = {
    Role.BASIC: "W1",
    Role.GATEWAY: "g1",
    Role.STORE: "s1",
    Role.SHARD_HOME: "h1",
    Role.CALLER: "c1",
    Role.ADMIN: "ops",
}
OTHER = "w1"
"""Another worker, whose id differs from W1's only in case."""

KINDS = (
    "artifact",
    "key",
    "series",
    "session",
    "instance",
    "replica",
    "clease",
    "op",
    "trunc",
    "fold",
    "purge",
    "archive",
)
WORKERS = {Role.BASIC, Role.GATEWAY, Role.STORE, Role.SHARD_HOME}
EVERYBODY = set(Role)

OWN: dict[str, set[Role]] = {
    **{f"tb.ev.{kind}.{ID}.{{me}}": {Role.BASIC, Role.GATEWAY} for kind in ("key", "series", "op")},
    **{f"tb.ev.{kind}.{ID}.{{me}}": {Role.BASIC} for kind in ("instance", "replica", "clease")},
    **{f"tb.ev.{kind}.{ID}.{{me}}": WORKERS for kind in ("artifact", "session")},
    "tb.ev.trunc.TB.{me}": WORKERS,
    "tb.ev.fold.TB.{me}": {Role.STORE},
    "tb.ev.purge.TB.{me}": {Role.STORE},
    "tb.ev.archive.TB.{me}": {Role.STORE},
    "tb.ev.role.store.{me}": {Role.STORE},
    "tb.ev.role.gateway.{me}": set(),
    "tb.snap.directory.{me}": {Role.STORE},
    f"tb.blob.{ID}.0.{{me}}": WORKERS,
    f"tb.live.{LIFE}.{{me}}": WORKERS,
    "tb.ev.cluster.shards.{me}": {Role.SHARD_HOME},
    "tb.lease.7.{me}": {Role.SHARD_HOME},
    "tb.shard.7.{me}": {Role.SHARD_HOME},
    "tb.psnap.7.{me}": {Role.SHARD_HOME},
    "tb.pconf.7.{me}": {Role.BASIC, Role.SHARD_HOME, Role.STORE},
    f"tb.pblob.{ID}.0.{{me}}": {Role.SHARD_HOME},
    "other.ev.key.x.{me}": set(),
}
"""Each subject that is stored, with an author at its end, and who may write it as himself."""

API: dict[str, set[Role]] = {
    "INFO": EVERYBODY,
    "STREAM.INFO.TB": EVERYBODY,
    "STREAM.INFO.TB_LIVE": EVERYBODY,
    "STREAM.INFO.OTHER": set(),
    "STREAM.MSG.GET.TB": EVERYBODY,
    "STREAM.MSG.DELETE.TB": set(),
    "STREAM.PURGE.TB": {Role.STORE},
    "STREAM.PURGE.TB_LIVE": set(),
    "STREAM.INFO.TB_PAGES": EVERYBODY,
    "STREAM.MSG.GET.TB_PAGES": EVERYBODY,
    "STREAM.PURGE.TB_PAGES": {Role.STORE},
    "STREAM.CREATE.TB_PAGES": {Role.ADMIN},
    "CONSUMER.CREATE.TB_PAGES": EVERYBODY,
    "STREAM.CREATE.TB": {Role.ADMIN},
    "STREAM.CREATE.TB_LIVE": WORKERS | {Role.ADMIN},
    "STREAM.CREATE.OTHER": set(),
    "STREAM.UPDATE.TB": {Role.ADMIN},
    "STREAM.DELETE.OTHER": set(),
    "STREAM.SNAPSHOT.TB": {Role.ADMIN},
    "STREAM.RESTORE.TB": {Role.ADMIN},
    "STREAM.NAMES": set(),
    "STREAM.LEADER.STEPDOWN.TB": set(),
    "CONSUMER.CREATE.TB": EVERYBODY,
    "CONSUMER.CREATE.OTHER": set(),
    "CONSUMER.DELETE.TB.x": EVERYBODY,
    "CONSUMER.DURABLE.CREATE.TB.x": set(),
    "DIRECT.GET.TB": set(),
}
"""Each question to JetStream, and who may ask it. None has a body that could do something."""


@dataclass(frozen=True)
class Guarded:
    """A server that knows one user of each role."""

    server: EmbeddedServer
    seeds: dict[Role, Path]

    async def connect(self, role: Role, **options: object) -> NatsBus:
        auth = NatsAuth(nkey_seed=self.seeds[role])
        return await NatsBus.connect(self.server.url, auth=auth, name=NAMES[role], deadline=soon(), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    home, ids, users, seeds = tmp_path_factory.mktemp("grants"), SystemIds(), [], {}
    for role, name in NAMES.items():
        seed = new_seed(bytes.fromhex(ids.hex(32)))
        seeds[role] = home / f"{name}.nk"
        seeds[role].write_text(f"{seed}\n")
        users.append(User(name=name, roles=(role,), nkey=public_key(seed)))
    with EmbeddedServer(home / "nats", extra=users_config(users, subjects=SUBJECTS)) as server:
        yield Guarded(server, seeds)


@pytest.fixture
async def buses(guarded: Guarded) -> AsyncIterator[dict[Role, NatsBus]]:
    found = {role: await guarded.connect(role) for role in Role}
    await provision(found[Role.ADMIN], deadline=soon())
    yield found
    for bus in found.values():
        await bus.close()


async def is_denied(bus: NatsBus, subject: str) -> bool:
    """Whether the server refuses a subject; that it says so at once is checked too."""
    try:
        async with asyncio.timeout(5):
            await bus._requests.request(subject, b"{", deadline=Deadline(10), headers={MSG_ID: SystemIds().hex(8)})
    except DeniedError:
        return True
    return False


@pytest.mark.parametrize("role", Role)
async def test_each_subject_is_for_who_writes_it_and_as_himself(buses: dict[Role, NatsBus], role: Role) -> None:
    bus, wrong = buses[role], []
    for pattern, allowed in OWN.items():
        for author in (NAMES[role], OTHER):
            subject = pattern.format(me=author)
            expected = role in allowed and author == NAMES[role]
            if await is_denied(bus, subject) is expected:
                wrong.append(f"{subject}: {'denied' if expected else 'allowed'}")
    assert wrong == []


@pytest.mark.parametrize("role", Role)
async def test_each_question_to_jetstream_is_for_who_needs_it(buses: dict[Role, NatsBus], role: Role) -> None:
    wrong = []
    for verb, allowed in API.items():
        if await is_denied(buses[role], f"$JS.API.{verb}") is (role in allowed):
            wrong.append(f"{verb}: {'denied' if role in allowed else 'allowed'}")
    assert wrong == []


async def test_the_table_names_every_subject_of_the_streams() -> None:
    for patterns in SUBJECTS.streams.values():
        for pattern in patterns:
            assert any(subject.startswith(pattern.partition(".*")[0]) for subject in OWN), pattern


@pytest.mark.parametrize("role", Role)
async def test_nobody_hears_anothers_answers_or_the_bare_log(guarded: Guarded, role: Role) -> None:
    bus = await guarded.connect(role)
    refused: list[str] = []

    class Ear:
        def on_lost(self) -> None: ...
        def on_refused(self, told: object) -> None:
            refused.append(str(getattr(told, "subject", "")))

    bus._link.listen(ear := Ear())
    wanted = [f"_INBOX_{OTHER}.>", "_INBOX.>", "tb.ev.>", ">", "$JS.API.>"] + (
        [] if role is Role.STORE else ["tb.rpc.query"]
    )
    for subject in wanted:
        await bus._link.subscribe(subject, lambda _msg: None)
    async with soon().scope():
        while len(refused) < len(wanted):
            await asyncio.sleep(0.01)
    bus._link.forget(ear)
    assert sorted(refused) == sorted(wanted)
    await bus.close()


async def test_with_another_name_no_answer_can_arrive_and_that_is_said(guarded: Guarded) -> None:
    auth = NatsAuth(nkey_seed=guarded.seeds[Role.CALLER])
    bus = await NatsBus.connect(guarded.server.url, auth=auth, name="somebody")
    async with asyncio.timeout(5):
        with pytest.raises(DeniedError, match="_INBOX_somebody"):
            await bus.last_seq(deadline=Deadline(30))
        async with bus.read(bus.subjects.facts, after=0) as reader:
            with pytest.raises(DeniedError):
                await anext(aiter(reader))
    await bus.close()


async def test_a_reading_that_may_not_be_opened_is_denied(guarded: Guarded, buses: dict[Role, NatsBus]) -> None:
    bus = await guarded.connect(Role.BASIC, subjects=Subjects("other"))
    async with asyncio.timeout(5), bus.read(bus.subjects.facts, after=0) as reader:
        with pytest.raises(DeniedError, match=r"CONSUMER\.CREATE\.TB_other"):
            await anext(aiter(reader))
    await bus.close()


async def test_a_worker_finds_the_log_and_makes_only_the_heartbeats(guarded: Guarded) -> None:
    admin = await guarded.connect(Role.ADMIN)
    worker = await guarded.connect(Role.BASIC)
    for stream in SUBJECTS.streams:
        with contextlib.suppress(NoStreamError):
            await admin._requests.api(f"STREAM.DELETE.{stream}", deadline=soon())
    with pytest.raises(DeniedError, match="tensorbus bus init"):
        await provision(worker, deadline=soon())
    await provision(admin, deadline=soon())
    await admin._requests.api("STREAM.DELETE.TB_LIVE", deadline=soon())
    await provision(worker, deadline=soon())
    await worker.beat(SUBJECTS.live(LIFE, NAMES[Role.BASIC]), ttl_s=2, deadline=soon())
    await append(worker, replica_added(), headers(author=NAMES[Role.BASIC]), deadline=soon())
    with pytest.raises(DeniedError, match=r"\.w1$"):
        await append(worker, replica_added(), headers(author=OTHER), deadline=soon())
    for bus in (admin, worker):
        await bus.close()


async def test_nobody_purges_but_the_store(buses: dict[Role, NatsBus]) -> None:
    basic = buses[Role.BASIC]
    for _ in range(3):
        await append(basic, replica_added(), headers(author=NAMES[Role.BASIC]), deadline=soon())
    last = await basic.last_seq(deadline=soon())
    for role in EVERYBODY - {Role.STORE}:
        with pytest.raises(DeniedError, match="PURGE"):
            await buses[role].purge("tb.ev.replica.*.*", upto=last, deadline=soon())
    await buses[Role.STORE].purge("tb.ev.replica.*.*", upto=last, deadline=soon())


async def test_a_long_question_to_one_store_is_answered_by_that_one(buses: dict[Role, NatsBus]) -> None:
    async def slow(question: bytes) -> bytes:
        await asyncio.sleep(1.2)  # long enough to be told twice that somebody works on it
        return question

    own = SUBJECTS.rpc(f"store.{NAMES[Role.STORE]}")
    async with buses[Role.STORE].answer(own, slow, queue="store"):
        assert await buses[Role.GATEWAY].ask(own, b"rows", deadline=soon()) == b"rows"
    with pytest.raises(DeniedError):
        async with buses[Role.STORE].answer(SUBJECTS.rpc("store.another"), slow, queue="store"):
            pass


async def test_questions_are_answered_by_the_store(buses: dict[Role, NatsBus]) -> None:
    async def handler(question: bytes) -> bytes:
        return b"rows for " + question

    asks = buses[Role.STORE].answer(SUBJECTS.rpc("query"), handler, queue="store")
    async with asks:
        for role in EVERYBODY - {Role.ADMIN}:
            answer = await buses[role].ask(SUBJECTS.rpc("query"), role.encode(), deadline=soon())
            assert answer == b"rows for " + role.encode()
    with pytest.raises(DeniedError):
        async with buses[Role.CALLER].answer(SUBJECTS.rpc("query"), handler, queue="store"):
            pass
