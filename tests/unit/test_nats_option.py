"""Which server the integration tests get."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests import servers
from tests.servers import CONFIG, IMAGE, Choice, Kind, Server, serving


def options(**given: str | None) -> Any:
    names: Mapping[str, str | None] = {"--nats": "binary", "--nats-url": None} | {
        f"--{name.replace('_', '-')}": value for name, value in given.items()
    }
    return SimpleNamespace(getoption=names.__getitem__)


def test_the_binary_is_the_default() -> None:
    assert Choice.of(options()) == Choice(Kind.BINARY)
    assert Choice.of(options(nats="url", nats_url="nats://x:1")) == Choice(Kind.URL, "nats://x:1")


@pytest.mark.parametrize("given", [{"nats": "url"}, {"nats_url": "nats://x:1"}, {"nats": "url", "nats_url": ""}])
def test_a_url_belongs_to_one_choice_only(given: dict[str, str]) -> None:
    with pytest.raises(pytest.UsageError, match="go together"):
        Choice.of(options(**given))


@pytest.fixture
def deleted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, set[str]]]:
    """What was asked to be deleted: server, run and the prefixes to keep."""
    asked: list[tuple[str, str, set[str]]] = []

    async def delete_all(url: str, run: str, *, keep: Collection[str] = ()) -> None:
        asked.append((url, run, set(keep)))

    monkeypatch.setattr(servers, "delete_all_streams", delete_all)
    return asked


def test_no_two_runs_or_tests_share_a_prefix(deleted: list[tuple[str, str, set[str]]]) -> None:
    one, other = Server("nats://x:1", "ta"), Server("nats://x:1", "tab")
    with one.prefix() as first, one.prefix() as second, other.prefix() as third:
        assert (first, second, third) == ("tax1", "tax2", "tabx1")


def test_the_end_of_a_test_spares_the_streams_of_a_module(deleted: list[tuple[str, str, set[str]]]) -> None:
    server = Server("nats://x:1", "ta")
    with server.prefix() as module:
        with server.prefix():
            pass
        assert deleted == [(server.url, server.run, {module})]
    assert deleted[1:] == [(server.url, server.run, set())]


def test_a_running_server_is_used_as_it_is_and_left_clean(deleted: list[tuple[str, str, set[str]]]) -> None:
    with pytest.raises(KeyError), serving(Choice(Kind.URL, "nats://x:1")) as server:
        raise KeyError
    assert deleted == [("nats://x:1", server.run, set())]


class Engine:
    """A container engine's client as far as it is used; keeps what it was asked for."""

    def __init__(self, image: str, **given: object) -> None:
        self.asked: dict[str, Any] = {"image": image, **given}
        self.states: list[str] = []
        LAST.append(self)

    def __getattr__(self, name: str) -> Any:
        def note(*values: object) -> Engine:
            self.asked[name.removeprefix("with_")] = values[0] if len(values) == 1 else values
            return self

        return note

    def get_docker_client(self) -> Any:
        return SimpleNamespace(client=SimpleNamespace(ping=lambda: None))

    def start(self) -> None:
        self.states.append("started")

    def stop(self) -> None:
        self.states.append("stopped")

    def get_container_host_ip(self) -> str:
        return "127.0.0.1"

    def get_exposed_port(self, port: int) -> int:
        return port + 1


class NoEngineError(Exception):
    pass


class NoEngine(Engine):
    def get_docker_client(self) -> Any:
        raise NoEngineError("no such socket")


LAST: list[Engine] = []


def install(monkeypatch: pytest.MonkeyPatch, engine: type[Engine]) -> None:
    wait = SimpleNamespace(with_startup_timeout=lambda seconds: seconds)
    modules: dict[str, dict[str, object]] = {
        "docker": {},
        "docker.errors": {"DockerException": NoEngineError},
        "testcontainers": {},
        "testcontainers.core": {},
        "testcontainers.core.container": {"DockerContainer": engine},
        "testcontainers.core.wait_strategies": {"LogMessageWaitStrategy": lambda text: wait},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def test_a_container_has_the_server_that_the_tests_need_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Engine)
    with pytest.raises(KeyError), serving(Choice(Kind.CONTAINER)) as server:
        assert server.url == "nats://127.0.0.1:4223"
        raise KeyError
    engine = LAST.pop()
    assert engine.states == ["started", "stopped"]
    assert engine.asked["image"] == IMAGE
    assert engine.asked["env"] == ("NATS_CONFIG", CONFIG)
    assert "jetstream" in CONFIG


@pytest.mark.parametrize(("ci", "outcome"), [(False, pytest.skip.Exception), (True, pytest.fail.Exception)])
@pytest.mark.parametrize("missing", ["engine", "extra"])
def test_without_an_engine_tests_are_skipped_but_not_in_ci(
    monkeypatch: pytest.MonkeyPatch, missing: str, ci: bool, outcome: type[BaseException]
) -> None:
    install(monkeypatch, NoEngine)
    if missing == "extra":
        monkeypatch.setitem(sys.modules, "testcontainers.core.container", None)
    reason = "no container engine answers" if missing == "engine" else "tensorbus\\[containers\\]"
    with pytest.raises(outcome, match=reason), serving(Choice(Kind.CONTAINER), ci=ci):
        pass
