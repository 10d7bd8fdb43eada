"""The embedded servers: started once, found by others, stopped by the last one that uses them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuportal.embedded import Postgres, Redis, in_use, leave
from gpuportal.errors import SetupError
from gpuportal.paths import MOST, socket_folder
from tests.gpuportal.portal import ROOT, environment, eventually, manage, open_folder


@pytest.fixture
def data() -> Iterator[Path]:
    """A data folder; whatever still runs in it at the end is stopped."""
    with open_folder() as parent:
        folder = parent / "data"
        folder.mkdir()
        yield folder
        for server in (Postgres(folder), Redis(folder)):
            server.stop_any()
            eventually(lambda server=server: not server.running(), 20)


def test_a_second_start_finds_the_running_server(data: Path) -> None:
    first, second = Redis(data), Redis(data)
    assert first.start() is True
    assert second.start() is False
    assert first.pid() == second.pid() == first.process.pid  # type: ignore[union-attr]
    second.stop()  # not its own
    assert first.running()
    first.stop()
    assert not second.running()


def test_what_was_committed_survives_a_kill_of_the_database(data: Path) -> None:
    import psycopg

    postgres = Postgres(data)
    postgres.start()
    postgres.create_database("kept")
    with psycopg.connect(postgres.address("kept")) as connection:
        connection.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS n")
    assert postgres.process is not None
    postgres.process.kill()
    postgres.process.wait()
    again = Postgres(data)
    assert again.start() is True
    with psycopg.connect(again.address("kept")) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (1000,)
    again.stop()


def test_a_set_up_that_was_interrupted_begins_anew(data: Path) -> None:
    cluster = data / "postgres"
    cluster.mkdir()
    (cluster / "base").mkdir()
    postgres = Postgres(data)
    assert postgres.start() is True
    postgres.stop()
    assert (cluster / "PG_VERSION").exists()


def test_a_broken_database_is_named_with_postgresqls_own_words(data: Path) -> None:
    postgres = Postgres(data)
    postgres.start()
    postgres.stop()
    (data / "postgres" / "PG_VERSION").write_text("9.6\n")
    with pytest.raises(SetupError, match=r"PostgreSQL did not start: .*FATAL.*postgres\.log"):
        Postgres(data).start()


def test_the_last_one_out_stops_the_servers(data: Path) -> None:
    redis = Redis(data)
    first, second = in_use(data), in_use(data)
    redis.start(own=False)
    leave([redis], first)
    assert redis.running()
    first.close()
    leave([Redis(data)], second)
    eventually(lambda: not redis.running(), 10)
    second.close()


def test_two_commands_at_once_share_one_database(data: Path) -> None:
    commands = [
        subprocess.Popen(
            [sys.executable, "manage.py", "showmigrations", "--plan"],
            cwd=ROOT,
            env=environment(data),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for command in commands:
        out, err = command.communicate(timeout=240)
        assert command.returncode == 0, err
        assert "scheduling.0001_initial" in out
    eventually(lambda: not Postgres(data).running(), 20)


def test_a_killed_command_leaves_a_database_that_the_next_one_uses(data: Path) -> None:
    shell = subprocess.Popen(
        [sys.executable, "manage.py", "shell", "-c", "print('there', flush=True); import time; time.sleep(600)"],
        cwd=ROOT,
        env=environment(data),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    assert any("there" in line for line in shell.stdout)
    os.kill(shell.pid, signal.SIGKILL)
    shell.wait()
    assert manage("showmigrations", data=data).returncode == 0
    eventually(lambda: not Postgres(data).running(), 20)


def test_sockets_of_a_folder_with_a_long_path_are_elsewhere() -> None:
    short, long = Path("/data"), Path("/" + "x" * 150)
    assert socket_folder(short) == short / "run"
    assert len(str(socket_folder(long))) < MOST
    assert socket_folder(long) != socket_folder(Path("/" + "y" * 150))
