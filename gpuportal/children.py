"""The processes of ``manage.py up``: started, kept alive, their output forwarded, and none of them left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gpuportal.embedded import dies_with_parent

#: A child that lives at least so long (seconds) was healthy: the next restart is at once.
HEALTHY = 30.0
MOST_PAUSE = 30.0
#: A log file that is larger (bytes) becomes NAME.log.1, in place of the one before.
MOST_LOG = 20 << 20

_print_lock = threading.Lock()


def say(text: str) -> None:
    """A line for the terminal. A terminal that is gone is no reason to stop."""
    with _print_lock, contextlib.suppress(OSError, ValueError):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


@dataclass(slots=True)
class Child:
    """One process that is kept alive."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float = 0.0

    def start(self, data: Path) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.environment, "GPUPORTAL_SUPERVISED": str(data)},
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )
        self.started = time.monotonic()
        assert self.process.stdout is not None
        path = data / "logs" / f"{self.name}.log"
        threading.Thread(target=_forward, args=(self.name, self.process.stdout, path), daemon=True).start()

    def keep_alive(self, data: Path) -> bool:
        """Start it again if it ended, the sooner the longer it had lived; True when a process was started."""
        process = self.process
        if process is not None and process.poll() is not None:
            self.kill_group(signal.SIGKILL)  # what it left behind
            lived = time.monotonic() - self.started
            self.failures = 0 if lived > HEALTHY else self.failures + 1
            pause = 0.0 if self.failures <= 1 else min(MOST_PAUSE, 2.0 ** (self.failures - 1))
            self.restart_at = time.monotonic() + pause
            self.process = None
            say(f"{self.name} ended ({process.returncode}); it is started again in {pause:.0f} s.")
        if self.process is None and time.monotonic() >= self.restart_at:
            self.start(data)
            return True
        return False

    def kill_group(self, sig: int) -> None:
        """The process and whatever it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, sig)


def stop_all(children: Iterable[Child], seconds: float = 15) -> None:
    """Ask each to end; after ``seconds`` they are killed."""
    children = [child for child in children if child.process is not None]
    for child in children:
        if child.process is not None and child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        assert child.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.1, deadline - time.monotonic()))
        child.kill_group(signal.SIGKILL)


def kill_left_over(data: Path, groups: Iterable[int]) -> int:
    """End the children of an ``up`` that was killed, and theirs; returns how many processes there were.

    groups: the process groups that the killed ``up`` wrote down. A number may be somebody else's by now, so a process
    must carry the mark of this data folder as well.
    """
    wanted = set(groups)
    mark = f"GPUPORTAL_SUPERVISED={data}".encode()
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if os.getpgid(int(entry.name)) in wanted and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed


def _forward(name: str, stream: IO[bytes], path: Path) -> None:
    """Every line to the terminal and to the log file; it never stops reading, or the child would stand still."""
    log = path.open("ab", buffering=0)
    try:
        for line in stream:
            with contextlib.suppress(OSError):  # a full disk
                if log.tell() > MOST_LOG:
                    log.close()
                    os.replace(path, path.with_suffix(".log.1"))
                    log = path.open("ab", buffering=0)
                log.write(line)
            say(f"{name:6} | {line.decode(errors='replace').rstrip()}")
    finally:
        log.close()
