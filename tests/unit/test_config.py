"""Settings: precedence, origins, bounds, and errors that can be acted on."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tensorbus.config import LogLevel, Settings, load, machine_host_id, memory_bytes
from tensorbus.errors import InvalidArgumentError


@pytest.fixture
def env(home: Path) -> dict[str, str]:
    return {"TENSORBUS_HOME": str(home)}


def write(home: Path, text: str) -> Path:
    path = home / "config.toml"
    path.write_text(text)
    return path


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(home: Path, env: dict[str, str]) -> None:
    path = write(home, 'timeout_s = 1.0\ntenant = "file"\nlog_level = "debug"\n')
    env |= {"TENSORBUS_TIMEOUT_S": "2", "TENSORBUS_TENANT": "env"}
    resolved = load({"timeout_s": 3.0, "worker_id": None}, env)
    settings = resolved.settings
    assert (settings.timeout_s, settings.tenant, settings.log_level) == (3.0, "env", LogLevel.DEBUG)
    assert settings.subject_prefix == "tb"
    assert resolved.origins["timeout_s"] == "flag"
    assert resolved.origins["tenant"] == "env TENSORBUS_TENANT"
    assert resolved.origins["log_level"] == f"file {path}"
    assert resolved.origins["worker_id"] == "default"
    assert set(resolved.origins) == set(Settings.model_fields)


def test_defaults_come_from_the_machine() -> None:
    settings = load({}, {}).settings
    assert settings.home == Path("~/.local/share/tensorbus").expanduser()
    assert settings.host_id == machine_host_id()
    assert settings.pool_bytes == memory_bytes() // 4
    assert settings.heartbeat_s == settings.session_ttl_s / 5 == 3.0
    assert settings.nats_url is None
    assert settings.url is None


def test_the_named_file_may_name_the_home(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.toml"
    path.write_text(f'home = "{tmp_path}/h"\npool_bytes = "64MiB"\n')
    resolved = load({}, {"TENSORBUS_CONFIG": str(path)})
    assert resolved.settings.home == tmp_path / "h"
    assert resolved.settings.pool_bytes == 64 << 20
    assert resolved.origins["home"] == f"file {path}"


def test_a_file_in_a_home_cannot_name_another(home: Path, env: dict[str, str]) -> None:
    write(home, 'home = "/elsewhere"\n')
    with pytest.raises(InvalidArgumentError, match="cannot name another"):
        load({}, env)


def test_an_empty_variable_counts_as_not_set(env: dict[str, str]) -> None:
    assert load({}, env | {"TENSORBUS_URL": "", "TENSORBUS_CONFIG": ""}).origins["url"] == "default"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 4 << 30), ("1.5 gib", 3 << 29), ("512MB", 512_000_000), ("2097152", 2 << 20), ("2097152B", 2 << 20)],
)
def test_sizes_are_read_with_their_unit(env: dict[str, str], text: str, nbytes: int) -> None:
    assert load({}, env | {"TENSORBUS_POOL_BYTES": text}).settings.pool_bytes == nbytes


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("pool_bytes", "lots", "512MiB or 4GiB"),
        ("pool_bytes", "5", "1048576"),
        ("session_ttl_s", "1", "greater than or equal to 2"),
        ("session_ttl_s", "nan", "finite"),
        ("heartbeat_s", "10", "half of session_ttl_s"),
        ("reserve_bytes", "900TiB", "at most pool_bytes"),
        ("timeout_s", "0", "greater than 0"),
        ("data_port", "65536", "65535"),
        ("url", "http://x:1", "tb\\+tcp://host:port"),
        ("url", "tb+tcp://x", "tb\\+tcp://host:port"),
        ("nats_url", "nats://a:1,b", "nats://host"),
        ("worker_id", "a b", "1 to 64"),
        ("subject_prefix", "tb.*", "match"),
        ("log_level", "loud", "'debug', 'info'"),
    ],
)
def test_a_value_out_of_bounds_says_what_is_allowed(env: dict[str, str], name: str, value: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        load({name: value}, env)
    assert name in str(caught.value)


def test_every_problem_is_told_at_once_with_its_origin(home: Path, env: dict[str, str]) -> None:
    path = write(home, "data_port = -1\n")
    with pytest.raises(InvalidArgumentError) as caught:
        load({}, env | {"TENSORBUS_SESSION_TTL_S": "soon"})
    text = str(caught.value)
    assert f"data_port = -1 (file {path})" in text
    assert "session_ttl_s = 'soon' (env TENSORBUS_SESSION_TTL_S)" in text
    assert "heartbeat_s" not in text


def test_an_unknown_name_suggests_the_near_one(home: Path, env: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match="TENSORBUS_NAT_URL; did you mean TENSORBUS_NATS_URL"):
        load({}, env | {"TENSORBUS_NAT_URL": "nats://x"})
    with pytest.raises(InvalidArgumentError, match="tensorbus config"):
        load({}, env | {"TENSORBUS_ZZZ": "1"})
    with pytest.raises(InvalidArgumentError, match="did you mean tenant"):
        load({"tenand": "x"}, env)
    path = write(home, "pool_byte = 1\n")
    with pytest.raises(InvalidArgumentError, match="did you mean pool_bytes") as caught:
        load({}, env)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(home: Path, env: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match="is not there"):
        load({}, env | {"TENSORBUS_CONFIG": str(home / "none.toml")})
    path = write(home, "tenant = \n")
    with pytest.raises(InvalidArgumentError, match="are not TOML") as caught:
        load({}, env)
    assert str(path) in str(caught.value)


def test_settings_cannot_be_changed(env: dict[str, str]) -> None:
    settings = load({}, env).settings
    with pytest.raises(ValidationError, match="frozen"):
        settings.tenant = "other"  # type: ignore[misc]


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    "values",
    [
        {"nats_replicas": "2"},
        {"nats_tls_cert": "/c"},
        {"nats_tls_key": "/k"},
        {"nats_creds": "/c", "nats_nkey_seed": "/s"},
        {"nats_user": "a.b"},
    ],
)
def test_connections_to_nats_that_cannot_be(values: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(values))):
        load({}, {f"TENSORBUS_{name.upper()}": value for name, value in values.items()})
    assert load({}, {"TENSORBUS_NATS_REPLICAS": "3"}).settings.nats_replicas == 3
