"""``manage.py up``: everything on one machine — database, broker, web server, workers and beat."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import IO, Any

import redis
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand

from gpuportal import staticfiles
from gpuportal.children import Child, kill_left_over, say, stop_all
from gpuportal.embedded import Postgres, Redis, Service, in_use
from gpuportal.errors import SetupError

#: The loop has a worker of its own, so that a long roll-up never holds up a start.
LOOP_QUEUES, OTHER_QUEUES, OUTSIDE_QUEUES = "cycle,dispatch,reconcile", "default", "outside"
#: Addresses that mean all of this machine's.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Stopped(Exception):
    """Ctrl-C or SIGTERM while still preparing."""


class Command(BaseCommand):
    help = (
        "Run the whole portal on this machine: embedded PostgreSQL and Redis (unless DATABASE_URL and REDIS_URL are "
        "set), web server, Celery workers and beat. Ctrl-C stops everything."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
        parser.add_argument("--port", type=int, default=8000, help="port of the web server (default 8000)")
        parser.add_argument("--web-workers", type=int, default=1, help="web server processes (default 1)")
        parser.add_argument(
            "--demo",
            choices=["yes", "no", "ask"],
            default=settings.GPUPORTAL_DEMO,
            help="load the demonstration into an empty database (default from GPUPORTAL_DEMO)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.host, self.port, self.data = options["host"], options["port"], Path(settings.GPUPORTAL_DATA)
        if not 1 <= self.port <= 65_535:
            raise SetupError(f"--port: {self.port} is not from 1 to 65535")
        if not 1 <= options["web_workers"] <= 64:
            raise SetupError(f"--web-workers: {options['web_workers']} is not from 1 to 64")
        lock = self._lock()
        if lock is None:
            self._point_to_the_other()
            return
        self._clear_away()
        _must_be_free(self.host, self.port)
        users = in_use(self.data)
        self.stopping = False
        self.preparing = True
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, self._stop)
        services: list[Service] = []
        children: list[Child] = []
        try:
            self._start_services(services)
            accounts = self._prepare(options["demo"])
            self.preparing = False
            children = self._children(options["web_workers"])
            for child in children:
                child.start(self.data)
            self._write_down(children)
            self._announce(accounts)
            self._watch(children, services)
        except Stopped:
            say("Stopped.")
        finally:
            for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(sig, signal.SIG_IGN)  # a second Ctrl-C changes nothing
            stop_all(children)
            for service in reversed(services):
                service.stop()
            self._record.unlink(missing_ok=True)
            users.close()
            lock.close()

    # -- beginning ---------------------------------------------------------------------------------------------

    @property
    def _record(self) -> Path:
        return self.data / "up.json"

    def _lock(self) -> IO[str] | None:
        """Only one at a time in a data folder; the lock goes with the process, even after kill -9."""
        (self.data / "logs").mkdir(parents=True, exist_ok=True)
        file = (self.data / "up.lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file

    def _point_to_the_other(self) -> None:
        try:
            other = json.loads(self._record.read_text())
            say(f"GPU Portal is running already: {other['address']} (process {other['pid']}).")
        except (OSError, ValueError, KeyError):
            say(f"GPU Portal is just starting with the data folder {self.data}; wait a moment.")

    def _clear_away(self) -> None:
        """What an ``up`` that was killed left behind."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kill_left_over(self.data, json.loads(self._record.read_text())["groups"])
        self._record.unlink(missing_ok=True)

    def _write_down(self, children: list[Child]) -> None:
        groups = [child.process.pid for child in children if child.process is not None]
        record = {"pid": os.getpid(), "address": self._address(), "groups": groups}
        beside = self._record.with_suffix(".new")
        beside.write_text(json.dumps(record))
        beside.replace(self._record)

    def _start_services(self, services: list[Service]) -> None:
        if settings.EMBEDDED_DATABASE:
            postgres = Postgres(self.data)
            services.append(postgres)
            postgres.start()
            postgres.create_database(str(settings.DATABASES["default"]["NAME"]))
        if settings.EMBEDDED_REDIS:
            services.append(Redis(self.data))
            services[-1].start()
        else:
            _must_answer(settings.REDIS_URL)

    def _prepare(self, demo: str) -> list[str]:
        """Tables, files, first accounts; returns lines to show at the end."""
        call_command("migrate", verbosity=0, interactive=False)
        staticfiles.collect()
        from scheduling.services.demo import Options, database_is_empty, load_demo

        if not database_is_empty():
            return []
        if self._wants_demo(demo):
            accounts = [(a.role, a.username, a.password) for a in load_demo(Options(), say)]
            title = "The demonstration is loaded. Sign in as (each password works once):"
        else:
            from teams.actors import Actor
            from teams.services.users import create_user

            user, password = create_user(actor=Actor.system("first start"), username="admin", staff_role="admin")
            accounts = [("administrator", user.username, password)]
            title = "Sign in as (the password works once):"
        return [title, *(f"  {role:14} {name:6} {password}" for role, name, password in accounts), ""]

    def _wants_demo(self, answer: str) -> bool:
        if answer == "ask" and sys.stdin.isatty():
            text = input("The database is empty. Load the demonstration (weeks of a real trace)? [Y/n] ")
            return text.strip().lower() in ("", "y", "yes")
        return answer == "yes"

    def _children(self, web_workers: int) -> list[Child]:
        python = sys.executable
        web = [
            *(python, "-m", "granian", "--interface", "wsgi", "--host", self.host, "--port", str(self.port)),
            *("--workers", str(web_workers), "--blocking-threads", "8", "--no-ws", "--log-level", "error"),
            "gpuportal.wsgi:application",
        ]
        celery = [python, "-W", "ignore::UserWarning:celery.platforms", "-m", "celery", "--quiet", "-A", "gpuportal"]
        worker = [*celery, "worker", "--loglevel", "INFO", "--without-mingle", "--without-gossip"]
        shared = {"GPUPORTAL_PUBLIC_URL": os.environ.get("GPUPORTAL_PUBLIC_URL") or self._address()}
        return [
            Child("web", web, shared),
            Child("loop", [*worker, "--queues", LOOP_QUEUES, "--concurrency", "3", "--hostname", "loop@%h"], shared),
            Child(
                "worker", [*worker, "--queues", OTHER_QUEUES, "--concurrency", "1", "--hostname", "other@%h"], shared
            ),
            Child(
                "outside",
                [
                    *worker,
                    "--queues",
                    OUTSIDE_QUEUES,
                    "--pool",
                    "threads",
                    "--concurrency",
                    "2",
                    "--hostname",
                    "outside@%h",
                ],
                shared,
            ),
            Child("beat", [*celery, "beat", "--loglevel", "WARNING", "--pidfile="], shared),
        ]

    def _address(self) -> str:
        host = EVERYWHERE.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def _announce(self, accounts: list[str]) -> None:
        deadline = time.monotonic() + 60
        while not self.stopping:
            if _answers(f"{self._address()}/healthz"):
                say("\n".join(["", f"GPU Portal is running: {self._address()}", *accounts, "Ctrl-C stops it.", ""]))
                break
            if time.monotonic() > deadline:
                say("\n".join([f"The web server does not answer at {self._address()} yet; see above.", *accounts]))
                break
            time.sleep(0.2)
        if self.host in EVERYWHERE and "ALLOWED_HOSTS" not in os.environ:
            say("Set ALLOWED_HOSTS to the names by which others reach this machine.")

    # -- running -----------------------------------------------------------------------------------------------

    def _stop(self, *_: Any) -> None:
        self.stopping = True
        if self.preparing:
            raise Stopped

    def _watch(self, children: list[Child], services: list[Service]) -> None:
        while not self.stopping:
            for service in services:
                self._keep_serving(service)
            if any([child.keep_alive(self.data) for child in children]):
                self._write_down(children)
            time.sleep(0.5)

    def _keep_serving(self, service: Service) -> None:
        """Also one that was found running at the start, and has ended with whoever had started it."""
        if service.process is not None and service.process.poll() is None:
            return
        if service.process is None and service.running():
            return
        say(f"{service.name} ended; it is started again.")
        try:
            service.start()
        except SetupError as error:
            say(str(error))
            time.sleep(2)


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
        return True
    return False


def _must_be_free(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SetupError(f"--host: {host!r} is not an address of this machine: {error.strerror}") from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            hint = "another --host" if error.errno == errno.EADDRNOTAVAIL else "another port with --port"
            raise SetupError(f"cannot listen on {host}:{port}: {error.strerror}; choose {hint}") from None


def _must_answer(url: str) -> None:
    url = url.replace("redis+socket://", "unix://", 1)
    try:
        with contextlib.closing(redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)) as client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        raise SetupError(f"Redis cannot be reached (REDIS_URL): {error}") from None
