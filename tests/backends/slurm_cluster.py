"""A real Slurm for tests: started once a session, with accounts to run jobs under."""

from __future__ import annotations

import base64
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from uuid import UUID, uuid4

from scheduling.backends.base import NotFound, RunReport, RunState, StartCommand, StopCommand, WorkerSlot
from scheduling.backends.slurm import SlurmBackend, from_config

TOOLS = Path(__file__).parent.parent / "tools" / "slurm"
T = TypeVar("T")

ACCOUNTS = ("gpu-ada", "gpu-ben", "gpu-cem")
PROGRAMS = ("slurmctld", "slurmd", "slurmrestd", "munged", "sbatch", "runuser", "useradd")


@dataclass
class SlurmCluster:
    base: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *argv: str, check: bool = True) -> str:
        done = subprocess.run(
            argv, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{argv}: {done.stderr}")
        return done.stdout

    @property
    def output(self) -> str:
        return str(self.base / "jobs")

    def config(self, transport: str, **changes: object) -> tuple[dict[str, object], dict[str, object]]:
        config: dict[str, object] = {"transport": transport, "output_directory": self.output, "timeout": 20}
        secret: dict[str, object] = {}
        if transport == "commands":
            config |= {"slurm_conf": self.environment["SLURM_CONF"], "run_as": "root"}
        else:
            config |= {"url": self.environment["SLURMRESTD_URL"], "reader": "root"}
            secret["jwt_key"] = base64.b64encode(Path(self.environment["SLURM_JWT_KEY"]).read_bytes()).decode()
        return config | changes, secret

    def backend(self, transport: str, **changes: object) -> SlurmBackend:
        return from_config(*self.config(transport, **changes))

    def pid(self, name: str) -> int:
        return int((self.base / "pids" / f"{name}.pid").read_text())

    def start_controller(self) -> None:
        """slurmctld again, after it was killed."""
        log = (self.base / "log" / "slurmctld.out").open("ab")
        environment = {**os.environ, **self.environment}
        process = subprocess.Popen(
            [str(self.base / "sbin" / "slurmctld"), "-D"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        (self.base / "pids" / "slurmctld.pid").write_text(str(process.pid))
        wait_until(lambda: "UP" in self.run("scontrol", "ping", check=False), 20)

    def cancel_everything(self) -> None:
        self.run("sh", "-c", "squeue -h -o %A | sort -u | xargs -r scancel -s KILL", check=False)
        wait_until(lambda: not self.run("squeue", "-h", "-o", "%A", check=False).strip(), 30)


@contextmanager
def running_slurm(**options: str) -> Iterator[SlurmCluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        what = f"these programs are missing: {', '.join(missing)}" if missing else "it can only be started by root"
        raise RuntimeError(f"The tests marked slurm need a real Slurm, but {what}. Leave them out with: -m 'not slurm'")
    base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    base.rmdir()
    created = [name for name in ACCOUNTS if not _account_exists(name)]
    for name in created:
        subprocess.run(["useradd", "--create-home", name], check=True, capture_output=True)
    environment = {**os.environ, "NODE_FEATURES": "1", **options}
    try:
        done = subprocess.run(
            ["bash", str(TOOLS / "start-slurm.sh"), str(base)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"Slurm did not start:\n{done.stdout}")
        yield SlurmCluster(base, _variables(base / "env.sh"))
    finally:
        subprocess.run(["bash", str(TOOLS / "stop-slurm.sh"), str(base), "--wipe"], timeout=120, check=False)
        for name in created:
            subprocess.run(["userdel", "--remove", name], check=False, capture_output=True)


def _account_exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _variables(path: Path) -> dict[str, str]:
    found = {}
    for line in path.read_text().splitlines():
        if line.startswith("export "):
            for word in line.removeprefix("export ").split():
                name, _, value = word.partition("=")
                found[name] = value
    return found


def wait_until(check: Callable[[], T], seconds: float = 15) -> T:
    """The first true answer. Fails when there is none in time."""
    end = time.monotonic() + seconds
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"did not happen within {seconds} s: {check}")
        time.sleep(0.15)


def start_command(command: str = "true", **changes: object) -> StartCommand:
    """One worker with two GPUs of n0, unless changed."""
    given: dict[str, object] = {
        "attempt": uuid4(),
        "job_id": 7,
        "job_name": "train",
        "team": "vision",
        "account": ACCOUNTS[0],
        "command": command,
        "slots": (WorkerSlot("n0", (0, 1)),),
        "gpu_model": "h100",
        "gpus_per_worker": 2,
        "walltime": timedelta(minutes=5),
    }
    return StartCommand(**(given | changes))  # type: ignore[arg-type]


def stop_command(attempt: UUID, grace: float = 0, backend_id: str = "") -> StopCommand:
    return StopCommand(attempt, timedelta(seconds=grace), "cancel", backend_id)


def report(backend: SlurmBackend, attempt: UUID) -> RunReport | None:
    return next((run for run in backend.observe("", [attempt]).runs if run.attempt == attempt), None)


def wait_for(backend: SlurmBackend, attempt: UUID, *states: RunState, seconds: float = 15) -> RunReport:
    """The first report in one of ``states``; final ones when none are given."""

    def there() -> RunReport | None:
        found = report(backend, attempt)
        if found is None:
            return None
        return found if (found.state in states if states else found.state.final) else None

    try:
        return wait_until(there, seconds)  # type: ignore[return-value]
    except AssertionError:
        raise AssertionError(f"attempt {attempt} is {report(backend, attempt)}, not {states or 'final'}") from None


def output_of(backend: SlurmBackend, attempt: UUID) -> str:
    """Empty while there is none."""
    try:
        return backend.logs(attempt).data.decode()
    except NotFound:
        return ""
