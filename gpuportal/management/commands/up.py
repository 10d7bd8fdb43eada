"""``manage.py up``: everything on one machine — database, broker, web server, worker and beat."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand

from gpuportal.embedded import Postgres, Redis, Service, dies_with_parent
from gpuportal.errors import SetupError

#: A child that lives at least so long (seconds) was healthy: the next restart is at once.
HEALTHY = 30.0
MOST_PAUSE = 30.0


@dataclass(slots=True)
class Child:
    """One process that is kept alive."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, log_folder: Path, lock: threading.Lock) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.environment, "GPUPORTAL_SUPERVISED": "1"},
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )
        self.started = time.monotonic()
        assert self.process.stdout is not None
        threading.Thread(
            target=_forward, args=(self.name, self.process.stdout, log_folder / f"{self.name}.log", lock), daemon=True
        ).start()

    def kill_group(self, sig: int) -> None:
        """The process and whatever it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, sig)


def _forward(name: str, stream: IO[bytes], path: Path, lock: threading.Lock) -> None:
    with path.open("ab", buffering=0) as log:
        for line in stream:
            log.write(line)
            with lock:
                sys.stdout.write(f"{name:6} | {line.decode(errors='replace')}")
                sys.stdout.flush()


class Command(BaseCommand):
    help = (
        "Run the whole portal on this machine: embedded PostgreSQL and Redis (unless DATABASE_URL and REDIS_URL are "
        "set), web server, Celery worker and beat. Ctrl-C stops everything."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
        parser.add_argument("--port", type=int, default=8000, help="port of the web server (default 8000)")
        parser.add_argument("--web-workers", type=int, default=1, help="web server processes (default 1)")
        parser.add_argument("--demo", choices=["yes", "no", "ask"], default=settings.GPUPORTAL_DEMO,
                            help="load the demonstration into an empty database (default from GPUPORTAL_DEMO)")  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["port"] <= 65_535:
            raise SetupError(f"--port: {options['port']} is not from 1 to 65535")
        data: Path = settings.GPUPORTAL_DATA
        lock = self._lock(data)
        if lock is None:
            self._point_to_the_other(data)
            return
        _free(options["host"], options["port"])
        self.stopping = False
        self.print_lock = threading.Lock()
        services = self._services(data)
        children: list[Child] = []
        try:
            self._wait_and_prepare(options)
            address = f"http://{options['host']}:{options['port']}"
            (data / "up.json").write_text(json.dumps({"pid": os.getpid(), "address": address}))
            signal.signal(signal.SIGTERM, self._stop)
            signal.signal(signal.SIGINT, self._stop)
            children = self._children(options)
            for child in children:
                child.start(data / "logs", self.print_lock)
            self._announce(address)
            self._watch(children, services)
        finally:
            self._shut_down(children, services)
            (data / "up.json").unlink(missing_ok=True)

    # -- beginning ---------------------------------------------------------------------------------------------

    def _lock(self, data: Path) -> IO[str] | None:
        """Only one at a time in a data folder; the lock goes with the process, even after kill -9."""
        (data / "logs").mkdir(parents=True, exist_ok=True)
        file = (data / "up.lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file

    def _point_to_the_other(self, data: Path) -> None:
        try:
            other = json.loads((data / "up.json").read_text())
        except (OSError, ValueError):
            self.stdout.write("GPU Portal is starting in this data folder already; wait a moment.")
            return
        self.stdout.write(f"GPU Portal is running already: {other['address']} (process {other['pid']}).")

    def _services(self, data: Path) -> list[Service]:
        services: list[Service] = []
        if settings.EMBEDDED_DATABASE:
            postgres = Postgres(data)
            postgres.start()
            postgres.create_database(settings.DATABASES["default"]["NAME"])
            services.append(postgres)
        if settings.EMBEDDED_REDIS:
            redis = Redis(data)
            redis.start()
            services.append(redis)
        return services

    def _wait_and_prepare(self, options: dict[str, Any]) -> None:
        call_command("migrate", verbosity=0, interactive=False)
        call_command("collectstatic", verbosity=0, interactive=False)
        from scheduling.services.demo import database_is_empty

        if database_is_empty() and self._wants_demo(options["demo"]):
            call_command("demo", yes=True)

    def _wants_demo(self, answer: str) -> bool:
        if answer == "ask" and sys.stdin.isatty():
            text = input("The database is empty. Load the demonstration (a week of a real trace)? [Y/n] ")
            return text.strip().lower() in ("", "y", "yes")
        return answer == "yes"

    def _children(self, options: dict[str, Any]) -> list[Child]:
        python = sys.executable
        web = [
            python, "-m", "granian", "--interface", "wsgi", "--host", options["host"], "--port", str(options["port"]),
            "--workers", str(options["web_workers"]), "--blocking-threads", "8", "--no-ws", "--log-level", "warning",
            "gpuportal.wsgi:application",
        ]  # fmt: skip
        celery = [python, "-m", "celery", "-A", "gpuportal"]
        queues = "cycle,dispatch,reconcile,default"
        worker = [*celery, "worker", "--queues", queues, "--concurrency", "3", "--loglevel", "INFO", "--without-mingle"]
        beat = [*celery, "beat", "--loglevel", "INFO", "--pidfile="]
        return [
            Child("web", web, environment={"GPUPORTAL_BIND": f"{options['host']}:{options['port']}"}),
            Child("worker", [*worker, "--without-gossip", "--hostname", "portal@%h"]),
            Child("beat", beat),
        ]

    def _announce(self, address: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self.stopping:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/healthz", timeout=2):
                with self.print_lock:
                    self.stdout.write(self.style.SUCCESS(f"\nGPU Portal is running: {address}\nCtrl-C stops it.\n"))
                    self.stdout.flush()
                return
            time.sleep(0.2)
        self.stderr.write(f"The web server does not answer at {address} yet; see its log above.")

    # -- running -----------------------------------------------------------------------------------------------

    def _stop(self, *_: Any) -> None:
        self.stopping = True

    def _watch(self, children: list[Child], services: list[Service]) -> None:
        logs: Path = settings.GPUPORTAL_DATA / "logs"
        while not self.stopping:
            for service in services:
                if service.process is not None and service.process.poll() is not None:
                    self.stderr.write(f"{service.name} ended ({service.process.returncode}); it is started again.")
                    service.start()
            for child in children:
                self._keep_alive(child, logs)
            time.sleep(0.5)

    def _keep_alive(self, child: Child, logs: Path) -> None:
        process = child.process
        if process is not None and process.poll() is not None:
            child.kill_group(signal.SIGKILL)  # what it left behind
            lived = time.monotonic() - child.started
            child.failures = 0 if lived > HEALTHY else child.failures + 1
            pause = 0.0 if child.failures <= 1 else min(MOST_PAUSE, 2.0 ** (child.failures - 1))
            child.restart_at = time.monotonic() + pause
            child.process = None
            self.stderr.write(f"{child.name} ended ({process.returncode}); it is started again in {pause:.0f} s.")
        if child.process is None and time.monotonic() >= child.restart_at:
            child.start(logs, self.print_lock)

    def _shut_down(self, children: list[Child], services: list[Service]) -> None:
        for child in children:
            if child.process is not None and child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + 15
        for child in children:
            if child.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.1, deadline - time.monotonic()))
                child.kill_group(signal.SIGKILL)
        for service in reversed(services):
            service.stop()


def _free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SetupError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port with --port"
            ) from None
