"""``manage.py up``: whatever is killed, the portal goes on, and the next start finds nothing in its way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from gpuportal.embedded import Redis
from tests.gpuportal.portal import Portal, eventually, manage, open_folder

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.xdist_group("up")]


@pytest.fixture(scope="module")
def portal() -> Iterator[Portal]:
    """One data folder for all tests here: each leaves the portal running."""
    with open_folder() as folder:
        portal = Portal(folder / "data").start()
        portal.wait_until_ready()
        yield portal
        portal.stop()
        eventually(lambda: not portal.processes(), 20)


def goes_on(portal: Portal) -> None:
    portal.wait_until_ready()
    before = portal.cycles()
    eventually(lambda: portal.cycles() > before, 60)


def test_the_first_start_makes_an_account_whose_password_works_once(portal: Portal) -> None:
    text = portal.said()
    assert f"GPU Portal is running: http://127.0.0.1:{portal.port}" in text
    line = next(line for line in text.splitlines() if line.startswith("  administrator"))
    assert len(line.split()[-1]) == 19
    goes_on(portal)


def test_a_second_start_points_to_the_first(portal: Portal) -> None:
    portal.wait_until_ready()
    done = manage("up", "--port", str(portal.port), data=portal.data)
    assert done.returncode == 0, done.stderr
    assert f"running already: http://127.0.0.1:{portal.port}" in done.stdout


def test_a_command_beside_the_running_portal_uses_its_database(portal: Portal) -> None:
    portal.wait_until_ready()
    done = manage("check_ledger", data=portal.data)
    assert done.returncode == 0, done.stdout + done.stderr
    goes_on(portal)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("the web server", ("granian",)),
        ("the worker of the loop", ("celery", "cycle,dispatch,reconcile")),
        ("the other worker", ("celery", "--queues default")),
        ("the worker for the world outside", ("celery", "--queues outside")),
        ("beat", ("celery", "beat")),
        ("PostgreSQL", ("bin/postgres -D",)),
    ],
)
def test_a_killed_child_is_replaced(portal: Portal, what: str, words: tuple[str, ...]) -> None:
    portal.wait_until_ready()
    (victim, *_) = portal.processes(*words)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in portal.processes(*words) and portal.processes(*words))
    goes_on(portal)


def test_a_killed_redis_is_replaced(portal: Portal) -> None:
    portal.wait_until_ready()
    victim = Redis(portal.data).pid()
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: Redis(portal.data).pid()) != victim
    goes_on(portal)


def test_after_a_kill_of_everything_at_once_the_next_start_works(portal: Portal) -> None:
    portal.wait_until_ready()
    for process in portal.processes():
        os.kill(process, signal.SIGKILL)
    portal.kill()
    assert portal.process is not None
    portal.process.wait()
    portal.start()
    goes_on(portal)
    assert manage("check_ledger", data=portal.data).returncode == 0


def test_after_a_kill_of_the_supervisor_the_next_start_works_at_once(portal: Portal) -> None:
    portal.wait_until_ready()
    portal.kill()
    assert portal.process is not None
    portal.process.wait()
    portal.start()
    goes_on(portal)


def test_a_stop_ends_everything_and_a_lock_of_another_process_is_no_obstacle(portal: Portal) -> None:
    portal.wait_until_ready()
    assert portal.stop() == 0, portal.said()
    assert eventually(lambda: not portal.processes(), 20)
    lock = portal.data / "postgres" / "postmaster.pid"
    assert not lock.exists()
    lock.write_text(f"1\n{portal.data}/postgres\n1700000000\n5432\n\n\n\n")
    portal.start()
    goes_on(portal)


def test_when_the_data_folder_was_moved_the_portal_starts_there(portal: Portal) -> None:
    portal.wait_until_ready()
    assert portal.stop() == 0
    portal.data = portal.data.rename(portal.data.with_name("moved"))
    portal.start()
    goes_on(portal)
