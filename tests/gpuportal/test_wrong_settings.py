"""A setting that cannot work gives one clear line and a non-zero exit, never a traceback."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.gpuportal.portal import free_port, manage


def refused(*arguments: str, data: Path, **more: str) -> str:
    done = manage(*arguments, data=data, **more)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DEBUG", "maybe", "DEBUG='maybe' is not one of true, false"),
        ("GPUPORTAL_QUEUE", "secret", "GPUPORTAL_QUEUE='secret' is not one of open, private"),
        ("GPUPORTAL_DEMOO", "yes", "GPUPORTAL_DEMOO is not known; did you mean GPUPORTAL_DEMO?"),
        ("GPUPORTAL_STALE_AFTER", "soon", "'soon' is not a whole number from 10 to 86400"),
        ("DATABASE_URL", "mysql://db/portal", "does not begin with postgresql://"),
        ("DATABASE_URL", "postgresql://db:port/portal", "the port in 'db:port' is not a number"),
        ("REDIS_URL", "localhost:6379", "does not begin with redis://"),
        ("LOG_LEVEL", "LOUD", "LOG_LEVEL='LOUD' is not one of"),
        ("EMAIL_PORT", "70000", "EMAIL_PORT='70000' is not a whole number from 1 to 65535"),
        ("FIELD_ENCRYPTION_KEY", "short", "FIELD_ENCRYPTION_KEY"),
        ("GPUPORTAL_OIDC_GROUPS", "{", "GPUPORTAL_OIDC_GROUPS"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name(tmp_path: Path, name: str, value: str, words: str) -> None:
    assert words in refused("check", data=tmp_path / "data", **{name: value})


@pytest.mark.parametrize("command", ["migrate", "up", "check_ledger"])
def test_a_database_that_cannot_be_reached_is_named(tmp_path: Path, command: str) -> None:
    line = refused(
        command,
        data=tmp_path / "data",
        DATABASE_URL=f"postgresql://portal@127.0.0.1:{free_port()}/portal",
        REDIS_URL=os.environ["REDIS_URL"],
    )
    assert "DATABASE_URL" in line
    assert "127.0.0.1" in line


def test_a_redis_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    line = refused(
        "up",
        data=tmp_path / "data",
        DATABASE_URL=os.environ["DATABASE_URL"],
        REDIS_URL=f"redis://127.0.0.1:{free_port()}/0",
    )
    assert "REDIS_URL" in line


def test_a_busy_port_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        line = refused("up", "--port", str(port), data=tmp_path / "data")
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert "choose another port with --port" in line
    assert not (tmp_path / "data" / "postgres").exists()


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--port", "0", "--port: 0 is not from 1 to 65535"),
        ("--web-workers", "0", "--web-workers: 0 is not from 1 to 64"),
        ("--host", "203.0.113.1", "choose another --host"),
        ("--host", "no such host", "--host: 'no such host' is not an address"),
    ],
)
def test_an_option_that_cannot_work_is_refused(tmp_path: Path, option: str, value: str, words: str) -> None:
    arguments = ["up", "--port", str(free_port()), option, value]
    assert words in refused(*arguments, data=tmp_path / "data")


def test_a_data_folder_that_cannot_be_written_to_is_named() -> None:
    line = refused("check", data=Path("/proc/gpuportal"))
    assert "GPUPORTAL_DATA: the folder /proc/gpuportal cannot be written to" in line


def test_a_data_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert f"GPUPORTAL_DATA: the folder {tmp_path / 'data'}" in refused("check", data=tmp_path / "data")


def test_an_emptied_key_file_is_named_instead_of_making_a_new_key(tmp_path: Path) -> None:
    """A new key would make the stored secrets of all clusters unreadable."""
    assert manage("check", data=tmp_path).returncode == 0
    (tmp_path / "field.key").write_text("")
    assert str(tmp_path / "field.key") in refused("check", data=tmp_path)


def test_keys_are_made_once_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    assert manage("check", data=tmp_path).returncode == 0
    keys = {name: (tmp_path / name).read_text() for name in ("secret.key", "field.key")}
    assert manage("check", data=tmp_path).returncode == 0
    for name, value in keys.items():
        assert (tmp_path / name).read_text() == value
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
