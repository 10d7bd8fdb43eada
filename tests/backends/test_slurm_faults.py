"""Faults between the portal and Slurm: no attempt is lost unnoticed, none runs twice."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID

import httpx
import pytest

from scheduling.backends.base import RunState, StartCommand, Unreachable, WorkerSlot
from scheduling.backends.slurm import SlurmBackend
from tests.backends.slurm_cluster import (
    SlurmCluster,
    report,
    running_slurm,
    start_command,
    stop_command,
    wait_for,
    wait_until,
)

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]


@pytest.fixture(scope="module")
def own_slurm() -> Iterator[SlurmCluster]:
    with running_slurm() as cluster:
        yield cluster


class Proxy:
    """Stands before slurmrestd and spoils the next answers as told: ``fail`` (500, not passed on), ``late`` (passed
    on, answered after the client has given up), ``never`` (not passed on, no answer), ``lost`` (passed on, the
    connection closed), ``twice`` (passed on twice), ``garbage`` (passed on, the answer is no JSON)."""

    def __init__(self, target: str) -> None:
        self.plan: list[str] = []
        proxy = self
        client = httpx.Client(base_url=target, timeout=30, trust_env=False)

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                spoil = proxy.plan.pop(0) if proxy.plan and self.command == "POST" else ""
                if spoil == "never":
                    time.sleep(2)
                    return
                answer = None
                if spoil != "fail":
                    for _ in range(2 if spoil == "twice" else 1):
                        headers = {key: value for key, value in self.headers.items() if key.lower() != "host"}
                        answer = client.request(self.command, self.path, content=body, headers=headers)
                if spoil == "lost":
                    return
                if spoil == "late":
                    time.sleep(2)
                self.send_response(500 if answer is None else answer.status_code)
                content = b"oops" if answer is None or spoil == "garbage" else answer.content
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = handle_any

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def proxy(own_slurm: SlurmCluster) -> Iterator[Proxy]:
    proxy = Proxy(own_slurm.environment["SLURMRESTD_URL"])
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


def counted(slurm: SlurmCluster, seconds: float, node: str) -> StartCommand:
    """A job that writes a line for each time it is run."""
    command = start_command(
        f'echo ran >>"{slurm.output}/$GPUPORTAL_ATTEMPT.runs"; sleep {seconds}',
        slots=(WorkerSlot(node, (0,)),), gpus_per_worker=1, gpu_model="h100" if node in ("n0", "n1") else "a100",
    )  # fmt: skip
    return command


def runs(slurm: SlurmCluster, attempt: UUID) -> int:
    path = Path(slurm.output) / f"{attempt}.runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def start_until_accepted(backend: SlurmBackend, command: StartCommand, seconds: float = 60) -> int:
    """How often it had to be tried."""
    end = time.monotonic() + seconds
    tries = 0
    while True:
        tries += 1
        try:
            backend.start(command)
            return tries
        except Unreachable:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@pytest.mark.parametrize("spoil", ["fail", "late", "never", "lost", "garbage"])
def test_a_spoilt_answer_to_a_submit_means_unreachable_and_the_next_try_makes_one_job(
    own_slurm: SlurmCluster, proxy: Proxy, spoil: str
) -> None:
    backend = own_slurm.backend("rest", url=proxy.url, timeout=1)
    backend.start(counted(own_slurm, 0, "n3"))
    for _ in range(3):
        command = counted(own_slurm, 0.3, "n0")
        proxy.plan = [spoil]
        with pytest.raises(Unreachable):
            backend.start(command)
        assert start_until_accepted(backend, command) == 1
        assert wait_for(backend, command.attempt).state is RunState.SUCCEEDED
        assert runs(own_slurm, command.attempt) == 1
        jobs = own_slurm.run("squeue", "-h", "-t", "all", "-o", "%k").count(str(command.attempt))
        assert jobs == 1


def test_a_submit_that_slurm_gets_twice_runs_once(own_slurm: SlurmCluster, proxy: Proxy) -> None:
    backend = own_slurm.backend("rest", url=proxy.url)
    backend.start(counted(own_slurm, 0, "n3"))
    for _ in range(5):
        command = counted(own_slurm, 2, "n1")
        proxy.plan = ["twice"]
        backend.start(command)
        jobs = own_slurm.run("squeue", "-h", "-t", "all", "-o", "%k").count(str(command.attempt))
        assert jobs == 2, "the fault did happen"
        assert wait_for(backend, command.attempt).state is RunState.SUCCEEDED
        assert runs(own_slurm, command.attempt) == 1


@pytest.mark.parametrize("spoil", ["fail", "late", "never", "lost"])
def test_a_spoilt_answer_to_a_stop_is_made_good_by_the_next(own_slurm: SlurmCluster, proxy: Proxy, spoil: str) -> None:
    backend = own_slurm.backend("rest", url=proxy.url, timeout=1)
    command = counted(own_slurm, 60, "n0")
    backend.start(command)
    wait_for(backend, command.attempt, RunState.RUNNING)
    proxy.plan = [spoil]
    with pytest.raises(Unreachable):
        backend.stop(stop_command(command.attempt, grace=5))
    wait_until(lambda: _stopped(backend, command.attempt), 20)
    assert wait_for(backend, command.attempt).state is RunState.CANCELLED


def _stopped(backend: SlurmBackend, attempt: UUID) -> bool:
    try:
        backend.stop(stop_command(attempt, grace=5))
    except Unreachable:
        return False
    return True


def test_a_slurmrestd_that_is_not_there_is_unreachable(own_slurm: SlurmCluster) -> None:
    backend = own_slurm.backend("rest", url="http://127.0.0.1:9")
    with pytest.raises(Unreachable):
        backend.start(counted(own_slurm, 0, "n0"))
    with pytest.raises(Unreachable):
        backend.observe("", [])


def test_a_wrong_key_is_refused_on_connecting_and_waited_out_later(own_slurm: SlurmCluster) -> None:
    import base64

    from scheduling.backends.base import Rejected
    from scheduling.backends.slurm import from_config

    config, _ = own_slurm.config("rest")
    backend = from_config(config, {"jwt_key": base64.b64encode(b"x" * 32).decode()})
    with pytest.raises(Rejected, match="token"):
        backend.describe()
    with pytest.raises(Unreachable):
        backend.start(counted(own_slurm, 0, "n0"))
    with pytest.raises(Unreachable):
        backend.observe("", [])


def revive(slurm: SlurmCluster) -> None:
    """On a busy machine a restarted slurmctld gives up on a slurmd that answers late: an operator resumes the node."""
    for node in sorted(set(slurm.run("sinfo", "-h", "-N", "-t", "down", "-o", "%N").split())):
        slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


@pytest.mark.parametrize("transport", ["commands", "rest"])
def test_a_killed_slurmctld_loses_no_attempt_unnoticed_and_runs_none_twice(
    own_slurm: SlurmCluster, transport: str
) -> None:
    """slurmctld saves its state every few seconds: a job accepted just before it is killed is forgotten. Then the
    attempt is missing from the next complete observation, or its second job finds that it has been started."""
    dice = random.Random(transport)
    backend = own_slurm.backend(transport, timeout=4, launch_patience=30)
    commands = []
    for _ in range(3):
        time.sleep(6)  # once something is saved, job numbers are not used again
        killer = threading.Timer(dice.uniform(0.3, 8), os.kill, (own_slurm.pid("slurmctld"), signal.SIGKILL))
        killer.start()
        batch = [counted(own_slurm, dice.uniform(0.1, 3), f"n{index % 4}") for index in range(8)]
        accepted = 0
        for command in batch:
            try:
                backend.start(command)
                accepted += 1
                time.sleep(dice.uniform(0, 0.5))
            except Unreachable:
                break
        killer.join()
        with pytest.raises(Unreachable):
            backend.observe("", [])
        own_slurm.start_controller()
        for command in batch[accepted:]:
            start_until_accepted(backend, command)
        commands += batch
    outcomes = {}
    for command in commands:
        revive(own_slurm)
        try:
            outcomes[command.attempt] = wait_until(lambda c=command: _outcome(backend, c.attempt), 90)
        except AssertionError:  # say what there is
            lines = own_slurm.run("squeue", "-t", "all", "-o", "%A %T %r %N %k").splitlines()
            told = [line for line in lines if str(command.attempt) in line]
            raise AssertionError(f"{report(backend, command.attempt)}: {told}") from None
    for attempt, outcome in outcomes.items():
        count = runs(own_slurm, attempt)
        assert count <= 1, f"{attempt} ran {count} times"
        if outcome == RunState.SUCCEEDED:
            assert count == 1
        else:
            assert outcome in ("missing", RunState.NODE_FAILED, RunState.REQUEUED, RunState.CANCELLED), outcome
    assert RunState.SUCCEEDED in outcomes.values()


def _outcome(backend: SlurmBackend, attempt: UUID) -> str:
    """How it ended; empty while it has not, or the cluster does not tell."""
    try:
        found = report(backend, attempt)
    except Unreachable:
        return ""
    if found is None:
        return "missing"
    return str(found.state) if found.state.final else ""
