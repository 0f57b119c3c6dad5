"""TLS and nkeys from end to end: who is let in, who is not, and a whole system under least privilege."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.bus import EmbeddedServer, NatsAuth, NatsBus, provision
from tensorbus.bus._auth import new_seed, public_key
from tensorbus.bus._grants import parse_user, users_config
from tensorbus.clock import Deadline
from tensorbus.errors import DeniedError, InvalidArgumentError, UnavailableError
from tensorbus.events import Subjects
from tensorbus.ids import SystemIds
from tensorbus.testing._bus_contract import soon
from tensorbus.testing._certificates import Certificates, make_certificates
from tensorbus.testing._processes import Processes, WorkerProgram, wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl"),
]


@dataclass(frozen=True)
class Secured:
    server: EmbeddedServer
    certificates: Certificates
    folder: Path

    @property
    def url(self) -> str:
        return self.server.url.replace("nats://", "tls://")

    def seed(self, name: str) -> Path:
        return self.folder / f"{name}.nk"

    def auth(self, name: str) -> NatsAuth:
        return NatsAuth(nkey_seed=self.seed(name), tls_ca=self.certificates.ca)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secured(home: Path, certificates: Certificates) -> Iterator[Secured]:
    users = []
    for text in ("basic:W1", "gateway:g1", "store:s1", "caller:c1", "admin:ops"):
        seed = new_seed(bytes.fromhex(SystemIds().hex(32)))
        user = parse_user(f"{text}:{public_key(seed)}")
        (home / f"{user.name}.nk").write_text(seed)
        users.append(user)
    extra = certificates.server_config() + users_config(users, subjects=Subjects())
    with EmbeddedServer(home / "nats", extra=extra) as server:
        yield Secured(server, certificates, home)


async def test_who_is_let_in(secured: Secured) -> None:
    bus = await NatsBus.connect(secured.url, auth=secured.auth("ops"), name="ops")
    await provision(bus, deadline=soon())
    await bus.close()
    ours = secured.server.url  # nats:// will do where the authority is named
    bus = await NatsBus.connect(ours, auth=secured.auth("W1"), name="W1")
    await bus.close()
    (secured.folder / "stranger.nk").write_text(new_seed(bytes(range(32))))
    with pytest.raises(DeniedError, match=r"(?i)authorization"):
        await NatsBus.connect(secured.url, auth=secured.auth("stranger"), deadline=soon())
    with pytest.raises(DeniedError, match=r"(?i)authorization"):
        await NatsBus.connect(secured.url, auth=NatsAuth(tls_ca=secured.certificates.ca), deadline=soon())


async def test_a_server_that_nobody_vouches_for_is_denied(secured: Secured) -> None:
    with pytest.raises(DeniedError, match="not trusted"):
        await NatsBus.connect(secured.url, auth=NatsAuth(nkey_seed=secured.seed("W1")), deadline=soon())


async def test_without_tls_nothing_is_said(home: Path, certificates: Certificates) -> None:
    with EmbeddedServer(home / "plain") as server:
        for url, auth in (
            (server.url.replace("nats:", "tls:"), NatsAuth()),
            (server.url, NatsAuth(tls_ca=certificates.ca)),
        ):
            with pytest.raises(DeniedError, match="does not offer"):
                await NatsBus.connect(url, auth=auth, deadline=soon())


async def test_a_server_that_asks_for_certificates(home: Path, certificates: Certificates) -> None:
    with EmbeddedServer(home / "mutual", extra=certificates.server_config(clients=True)) as server:
        key = {"tls_cert": certificates.client_cert, "tls_key": certificates.client_key}
        bus = await NatsBus.connect(server.url, auth=NatsAuth(tls_ca=certificates.ca, **key))
        await bus.close()
        with pytest.raises((DeniedError, UnavailableError)):
            await NatsBus.connect(server.url, auth=NatsAuth(tls_ca=certificates.ca), deadline=Deadline(2))


async def test_files_that_cannot_be_used_are_named(home: Path, certificates: Certificates) -> None:
    (home / "bad.nk").write_text("SUSELESS")
    for auth in (
        NatsAuth(nkey_seed=home / "bad.nk"),
        NatsAuth(nkey_seed=home / "missing.nk"),
        NatsAuth(creds=home / "missing.creds"),
        NatsAuth(tls_ca=home / "missing.pem"),
        NatsAuth(tls_ca=home / "bad.nk"),
        NatsAuth(tls_ca=certificates.ca, tls_cert=certificates.client_cert, tls_key=certificates.server_key),
    ):
        with pytest.raises(InvalidArgumentError, match=r"\.nk|\.creds|\.pem"):
            await NatsBus.connect("nats://127.0.0.1:1", auth=auth)


async def test_it_comes_back_over_tls_with_its_key(secured: Secured) -> None:
    bus = await NatsBus.connect(secured.url, auth=secured.auth("ops"), name="ops")
    await provision(bus, deadline=soon())
    last = await bus.last_seq(deadline=soon())
    await asyncio.to_thread(secured.server.kill)
    await asyncio.to_thread(secured.server.start)
    assert await bus.last_seq(deadline=soon()) == last
    await bus.close()


@pytest.fixture
def start(secured: Secured, home: Path) -> Iterator[Callable[..., WorkerProgram]]:
    owner = Processes(home / "test-logs", nats_url=secured.url)

    def worker(role: str, name: str, *, ready: bool = True) -> WorkerProgram:
        seed, ca = secured.seed(name), secured.certificates.ca
        return owner.worker(role, home=home, id=name, ready=ready, nats_nkey_seed=seed, nats_tls_ca=ca)

    yield worker
    owner.close()


def test_a_whole_system_under_least_privilege(
    secured: Secured, home: Path, start: Callable[..., WorkerProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def init() -> None:
        bus = await NatsBus.connect(secured.url, auth=secured.auth("ops"), name="ops")
        await provision(bus, deadline=soon())
        await bus.close()

    asyncio.run(init())
    basic, gateway = start("basic", "W1"), start("gateway", "g1")
    often = {"archive_s": 0.2, "snapshot_facts": 1, "keep_facts": 0, "purge_delay_s": 0.5}
    for name, often_s in often.items():
        monkeypatch.setenv(f"TENSORBUS_{name.upper()}", str(often_s))
    store = start("store", "s1")
    settings = {"nats_url": secured.url, "nats_nkey_seed": secured.seed("c1"), "nats_user": "c1"}
    for name, value in {**settings, "nats_tls_ca": secured.certificates.ca}.items():
        monkeypatch.setenv(f"TENSORBUS_{name.upper()}", str(value))
    weights = torch.arange(4096, dtype=torch.float32)
    with tb.connect(home=home, host_id=basic.host_id, directory="full") as bus:
        put = bus.put({"w": weights}, key="model/w")
        assert torch.equal(bus.artifact("model/w").tensor("w"), weights)
        position = bus.publish("policy", put).position
        rows = bus.query("SELECT key FROM keys", at_least=position).dicts()
        assert rows == [{"key": "model/w"}]
        assert bus.latest("policy").version == 1
        purged = "SELECT 1 FROM facts WHERE kept AND type = 'PurgeCompleted' AND author = 's1'"
        wait_until(lambda: bus.query(purged).dicts(), what="a purge by the store")
        basic.kill9()
        wait_until(lambda: not any(one.live for one in bus.list_workers() if one.worker == "W1"), what="the end of W1")
        wait_until(lambda: not bus.exists("model/w"), what="the loss of what W1 held")
    assert (gateway.stop(), store.stop()) == (0, 0)


def test_a_store_with_too_few_grants_ends_before_it_takes_its_ids_place(
    secured: Secured, home: Path, start: Callable[..., WorkerProgram]
) -> None:
    async def facts() -> int:
        bus = await NatsBus.connect(secured.url, auth=secured.auth("ops"), name="ops")
        await provision(bus, deadline=soon())
        last = await bus.last_seq(deadline=soon())
        await bus.close()
        return last

    before = asyncio.run(facts())
    few = start("store", "g1", ready=False)  # its user may what a gateway may
    assert few.wait() == 10
    assert "`tensorbus bus grants store:g1` lists what this worker needs" in few.text
    assert '"event": "ready"' not in few.text
    assert asyncio.run(facts()) == before, "no session was opened"
