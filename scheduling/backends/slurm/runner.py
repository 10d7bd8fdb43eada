"""Running a command here or on a submit host, as the portal or as a person."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduling.backends.base import Unreachable
from scheduling.backends.slurm.config import SlurmConfig

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What ssh itself exits with when there is no connection (ssh(1)).
_SSH_FAILED = 255


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: bytes
    err: str


class Runner(Protocol):
    def run(self, argv: Sequence[str], *, account: str = "", stdin: bytes = b"") -> Result:
        """Run ``argv`` in a clean environment; ``account`` empty = as the portal. Raises ``Unreachable`` when it
        cannot be run at all or does not end in time."""
        ...


def identity_prefix(config: SlurmConfig, account: str) -> list[str]:
    """Words to put before a command so that it runs as ``account``."""
    if not account or config.run_as == "self":
        return []
    if config.run_as == "root":
        return ["runuser", "-u", account, "--"]
    return ["sudo", "-n", "-H", "-u", account, "--"]


def clean_environment(config: SlurmConfig) -> dict[str, str]:
    """All that a command sees: sbatch passes its environment on to the job."""
    path = f"{config.bin_directory}:{_PATH}" if config.bin_directory else _PATH
    found = {"PATH": path, "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    if config.slurm_conf:
        found["SLURM_CONF"] = config.slurm_conf
    return found


class LocalRunner:
    """Commands on this host."""

    def __init__(self, config: SlurmConfig) -> None:
        self._config = config

    def run(self, argv: Sequence[str], *, account: str = "", stdin: bytes = b"") -> Result:
        environment = clean_environment(self._config)
        words = [*identity_prefix(self._config, account), *argv]
        if account and self._config.run_as != "self":
            # runuser and sudo may bring variables of their own.
            given = [f"{name}={value}" for name, value in environment.items()]
            words = [*identity_prefix(self._config, account), "env", "-i", *given, *argv]
        return _run(words, environment, stdin, self._config.timeout, argv[0])


class SSHRunner:
    """Commands on a submit host. ssh joins its arguments into one line for the remote shell, so each is quoted."""

    def __init__(self, config: SlurmConfig, *, program: str = "ssh") -> None:
        self._config = config
        self._program = program

    def run(self, argv: Sequence[str], *, account: str = "", stdin: bytes = b"") -> Result:
        config = self._config
        given = [f"{name}={value}" for name, value in clean_environment(config).items()]
        remote = [*identity_prefix(config, account), "env", "-i", *given, *argv]
        words = [
            self._program, "-T", "-p", str(config.ssh_port),
            "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", f"ConnectTimeout={min(config.timeout, 15)}",
            "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
        ]  # fmt: skip
        if config.ssh_key_file:
            words += ["-i", config.ssh_key_file, "-o", "IdentitiesOnly=yes"]
        if config.ssh_known_hosts:
            words += ["-o", f"UserKnownHostsFile={config.ssh_known_hosts}"]
        target = f"{config.ssh_user}@{config.ssh_host}" if config.ssh_user else config.ssh_host
        result = _run([*words, "--", target, shlex.join(remote)], {"PATH": _PATH}, stdin, config.timeout, argv[0])
        if result.code == _SSH_FAILED:
            raise Unreachable(f"no SSH connection to {target}: {result.err.strip()}")
        return result


def _run(words: Sequence[str], environment: dict[str, str], stdin: bytes, timeout: int, name: str) -> Result:
    try:
        done = subprocess.run(
            list(words), input=stdin, capture_output=True, env=environment, timeout=timeout, check=False, cwd="/"
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{name} did not end within {timeout} s") from None
    except OSError as error:
        raise Unreachable(f"{words[0]} cannot be run: {error.strerror}") from error
    return Result(done.returncode, done.stdout, done.stderr.decode(errors="replace"))
