"""Running the real command line in a data folder of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = ("GPUPORTAL_", "DATABASE_URL", "REDIS_URL", "DJANGO_", "PYTEST_", "SECRET_KEY", "FIELD_", "DEBUG", "ALLOWED")


def environment(data: Path, **more: str) -> dict[str, str]:
    """That of somebody who has set nothing but what is given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return {**clean, "GPUPORTAL_DATA": str(data), "PYTHONUNBUFFERED": "1", **more}


def manage(*arguments: str, data: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=environment(data, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(true: Callable[[], Any], seconds: float = 60) -> Any:
    """What ``true`` answers as soon as it is something; fails when it stays nothing."""
    deadline = time.monotonic() + seconds
    while True:
        value = true()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {true}"
        time.sleep(0.2)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that PostgreSQL's own account can reach (pytest's are closed to it)."""
    folder = Path(tempfile.mkdtemp(prefix="gpuportal-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Portal:
    """``manage.py up`` in a data folder."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = free_port()
        self.output = data.with_name(data.name + ".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Portal:
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "up", "--port", str(self.port), "--demo", "no"],
                cwd=ROOT,
                env=environment(self.data),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_until_ready(self, seconds: float = 120) -> None:
        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.said()
            return self.ready()

        try:
            eventually(ready, seconds)
        except AssertionError:
            raise AssertionError(f"not ready within {seconds} s:\n{self.said()[-4000:]}") from None

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                return bool(json.load(answer)["ready"])
        except (OSError, http.client.HTTPException):
            return False

    def cycles(self) -> int:
        import psycopg

        with psycopg.connect(f"postgresql://postgres@/gpuportal?host={self.socket_folder}") as connection:
            row = connection.execute("SELECT coalesce(max(id), 0) FROM scheduling_cycle").fetchone()
        assert row is not None
        return int(row[0])

    @property
    def socket_folder(self) -> Path:
        from gpuportal.paths import socket_folder

        return socket_folder(self.data)

    def processes(self, *words: str) -> list[int]:
        """Processes of this portal whose command line has all the words, oldest first."""
        mark = f"GPUPORTAL_DATA={self.data}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    ours = mark in (entry / "environ").read_bytes().split(b"\0")
                    if line and ours and all(word in line for word in words):
                        found.append(int(entry.name))
        return sorted(found)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(sig)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)
