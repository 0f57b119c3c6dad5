"""What is in deploy/ can be read by those for whom it is: nats-server, systemd, compose, kubectl, bash."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from tensorbus.bus._server import find_binary
from tensorbus.cli._app import cli, run
from tensorbus.config import load

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def etc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``/etc/nats`` of a server: certificates and users as README.md makes them."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificates with openssl")
    etc = tmp_path_factory.mktemp("etc")
    names = ["nats-1", "nats-2", "nats-3", "10.0.0.5"]
    subprocess.run([DEPLOY / "certificates.sh", etc / "tls", *names], check=True, capture_output=True)
    users = ["basic:b1", "gateway+store:g1", "caller:c1", "admin:ops"]
    assert run(["bus", "grants", *users, "--generate", str(etc / "users")]) == 0
    shutil.copy(etc / "users" / "users.conf", etc)
    return etc


@pytest.mark.parametrize("name", ["single.conf", "node.conf"])
def test_nats_server_takes_its_configuration(etc: Path, name: str) -> None:
    text = (DEPLOY / "nats" / name).read_text().replace("/etc/nats", str(etc)).replace("/var/lib/nats", str(etc / "js"))
    path = etc / name
    path.write_text(text)
    ran = subprocess.run(
        [find_binary(), "-t", "-c", path], capture_output=True, text=True, env={"NATS_NAME": "nats-1"}, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "is valid" in ran.stderr


def test_the_certificates_are_for_the_names_and_made_once(etc: Path) -> None:
    before = (etc / "tls" / "server.pem").read_bytes()
    subprocess.run([DEPLOY / "certificates.sh", etc / "tls", "nats-1"], check=True, capture_output=True)
    assert (etc / "tls" / "server.pem").read_bytes() == before
    for name in ("nats-1", "nats-3", "localhost"):
        command = ["openssl", "verify", "-CAfile", etc / "tls" / "ca.pem", "-verify_hostname", name]
        subprocess.run([*command, etc / "tls" / "server.pem"], check=True, capture_output=True)
    assert (etc / "tls" / "server-key.pem").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_can_be_read_and_start_what_there_is(path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # as configparser documents it
    unit.read_string(path.read_text())
    assert unit.sections() == ["Unit", "Service", "Install"]
    program, *words = unit["Service"]["ExecStart"].split()
    if program.endswith("/tensorbus"):
        check_command(words)
        assert unit["Service"]["RestartPreventExitStatus"] == "4 5"


def test_the_environment_of_the_units_is_of_settings() -> None:
    lines = (DEPLOY / "systemd" / "tensorbus.env").read_text().splitlines()
    check_environment(dict(line.split("=", 1) for line in lines if line and not line.startswith("#")))


def test_compose_starts_what_there_is() -> None:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    services: dict[str, Any] = compose["services"]
    assert list(services) == ["nats-1", "nats-2", "nats-3", "init", "basic-1", "gateway-1", "store-1"]
    for name, service in services.items():
        folder = DEPLOY / "compose" / service["build"]["context"]
        assert (folder / service["build"]["dockerfile"]).is_file()
        if service["command"][0] == "tensorbus":
            check_command(service["command"][1:])
            check_environment(service["environment"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            known = source in compose["volumes"] or source.startswith("./secrets/")
            assert known or (DEPLOY / "compose" / source).is_file(), f"{name}: {volume}"
        assert set(service.get("depends_on", {})) <= set(services)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_can_be_read_and_start_what_there_is(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document.get("kind") == "ConfigMap":
            check_environment(document["data"])
        if document.get("kind") not in ("StatefulSet", "Job"):
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            check_command(container["command"][1:])
            given = {each["name"]: each.get("value", "1") for each in container["env"] if each["name"] != "POD_NAME"}
            check_environment(given)
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_kustomize_names_the_manifests() -> None:
    names = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert {*names, "kustomization.yaml", "nats-values.yaml"} == {path.name for path in MANIFESTS}


def test_every_file_is_told_of() -> None:
    text = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name != "README.md":
            at = path.relative_to(DEPLOY)
            assert f"`{at}`" in text or f"`{at.parent}/`" in text, at


def check_command(words: list[str]) -> None:
    """Whether the command line names a command, and options that it has."""
    command: click.Command | None = cli
    rest = list(words)
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    assert command is not None, words
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= flags, words


def check_environment(given: dict[str, str]) -> None:
    """Whether they are settings, with values that can be."""
    load({}, {"TENSORBUS_CONFIG": "/dev/null", **given})
