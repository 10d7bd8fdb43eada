"""Settings of a Slurm connection."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from scheduling.backends.fields import DISPATCH_PARALLEL, ConfigError, ConfigField, read_settings

RunAs = Literal["root", "sudo", "self"]

FIELDS: tuple[ConfigField, ...] = (
    ConfigField(
        "transport",
        "How to reach Slurm",
        "commands: sbatch, squeue … on this host or over SSH; rest: slurmrestd.",
        kind="choice",
        choices=("commands", "rest"),
        default="commands",
    ),
    ConfigField(
        "output_directory",
        "Output folder",
        "Absolute path on a file system shared by all nodes and the submit host, writable by every account "
        "(mode 1777). Holds each attempt's output and its start and end marks.",
        required=True,
    ),
    ConfigField(
        "partition",
        "Partition",
        "Submit to this partition, and take only its nodes. Empty: the default one, all nodes.",
    ),
    ConfigField("qos", "QOS", "Quality of service to submit with. Empty: the account's default."),
    ConfigField(
        "reservation",
        "Reservation",
        "Submit into this Slurm reservation; nodes reserved by others count as drained.",
    ),
    ConfigField(
        "charge_account",
        "Charge to",
        "Slurm account to charge: none (the person's default) or team (the team's name).",
        kind="choice",
        choices=("none", "team"),
        default="none",
    ),
    ConfigField(
        "gpu_models",
        "GPU names",
        "One TYPE=MODEL a line, where the GPU type in Slurm's Gres is not the model's name here; =MODEL for GPUs "
        "without a type.",
        kind="list",
        default=(),
    ),
    ConfigField(
        "levels",
        "Topology from features",
        "One LEVEL=PREFIX a line, widest first: the node feature that begins with PREFIX names the domain. Empty: "
        "Slurm's own topology, where the transport can read it.",
        kind="list",
        default=(),
    ),
    ConfigField(
        "cpus_per_gpu", "CPUs per GPU", "Asked for with every job. Empty: Slurm's default.", kind="integer", minimum=1
    ),
    ConfigField(
        "memory_per_gpu",
        "Memory per GPU, MiB",
        "Asked for with every job. Empty: Slurm's default.",
        kind="integer",
        minimum=1,
    ),
    ConfigField(
        "launch_patience",
        "Patience with a launch, seconds",
        "A job that Slurm calls running, whose script has not begun after so long, is ended and started again.",
        kind="integer",
        minimum=30,
        maximum=86400,
        default=300,
    ),
    ConfigField(
        "checkpoint_directory",
        "Checkpoint folder",
        "Shared folder; each job gets a subfolder, its path in GPUPORTAL_CHECKPOINT_DIR. Empty: none.",
    ),
    ConfigField(
        "containers",
        "Container runtime",
        "Runs the job's image: pyxis (srun --container-image) or apptainer.",
        kind="choice",
        choices=("none", "pyxis", "apptainer"),
        default="none",
    ),
    ConfigField(
        "login_profile",
        "Read /etc/profile",
        "Before the job's command, so that modules work.",
        kind="boolean",
        default=True,
    ),
    ConfigField(
        "instance",
        "Name of this portal",
        "Written into each job's comment; two portals on one cluster need two names.",
        default="gpuportal",
    ),
    ConfigField(
        "timeout",
        "Time-out, seconds",
        "For one command or request.",
        kind="integer",
        minimum=1,
        maximum=600,
        default=30,
    ),
    DISPATCH_PARALLEL,
    # commands
    ConfigField(
        "slurm_conf",
        "slurm.conf",
        "Path for SLURM_CONF. Empty: the default of the host.",
    ),
    ConfigField("bin_directory", "Folder of the commands", "Where sbatch is. Empty: found on the PATH."),
    ConfigField(
        "run_as",
        "Run commands as the person by",
        "root: the portal runs as root (runuser); sudo: sudo -n -u ACCOUNT; self: all jobs under the portal's account.",
        kind="choice",
        choices=("root", "sudo", "self"),
        default="sudo",
    ),
    ConfigField("ssh_host", "Submit host", "Run the commands there over SSH. Empty: on this host."),
    ConfigField("ssh_user", "SSH user", "Account on the submit host."),
    ConfigField("ssh_port", "SSH port", "Usually 22.", kind="integer", minimum=1, maximum=65535, default=22),
    ConfigField("ssh_key_file", "SSH key file", "Private key on this host. Empty: the agent or the default key."),
    ConfigField("ssh_known_hosts", "Known hosts file", "Empty: the default one. The host key is always checked."),
    # rest
    ConfigField(
        "url", "slurmrestd URL", "For example http://slurm:6820, https://slurm/, or unix:/run/slurmrestd.sock."
    ),
    ConfigField(
        "reader", "Account for reading", "Slurm account that sees all jobs (an operator), for listing jobs and nodes."
    ),
    ConfigField("ca_file", "CA file", "To check the certificate of an https URL with."),
    ConfigField(
        "jwt_key",
        "JWT key, base64",
        "Contents of the cluster's jwt_hs256.key, from which tokens are minted.",
        secret=True,
    ),
)

_ACCOUNT = re.compile(r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")
_WORD = re.compile(r"^[A-Za-z0-9_.:@+-]+$")


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """Checked settings; the meaning of each is in ``FIELDS``."""

    transport: Literal["commands", "rest"]
    output_directory: str
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    charge_account: Literal["none", "team"] = "none"
    #: Slurm's GPU type -> our model ("" = GPUs without a type).
    gpu_models: Mapping[str, str] | None = None
    #: (level, feature prefix), widest first.
    levels: tuple[tuple[str, str], ...] = ()
    cpus_per_gpu: int | None = None
    memory_per_gpu: int | None = None
    launch_patience: int = 300
    checkpoint_directory: str = ""
    containers: Literal["none", "pyxis", "apptainer"] = "none"
    login_profile: bool = True
    instance: str = "gpuportal"
    timeout: int = 30
    slurm_conf: str = ""
    bin_directory: str = ""
    run_as: RunAs = "sudo"
    ssh_host: str = ""
    ssh_user: str = ""
    ssh_port: int = 22
    ssh_key_file: str = ""
    ssh_known_hosts: str = ""
    url: str = ""
    reader: str = ""
    ca_file: str = ""
    jwt_key: bytes = b""

    def __repr__(self) -> str:  # the key stays out of logs
        return f"SlurmConfig({self.transport}, {self.url or self.ssh_host or 'this host'})"

    @property
    def personal(self) -> bool:
        """Whether jobs run under the submitting person's account."""
        return self.transport == "rest" or self.run_as != "self"

    def model_of(self, gres_type: str) -> str:
        """Our name of a GPU type of Slurm's; empty when it has none."""
        return (self.gpu_models or {}).get(gres_type, gres_type)

    def type_of(self, model: str) -> str:
        """The reverse of ``model_of``."""
        return next((kind for kind, name in (self.gpu_models or {}).items() if name == model), model)


def parse(config: Mapping[str, object], secret: Mapping[str, object] | None) -> SlurmConfig:
    """Raises ``ConfigError`` naming every field that is wrong."""
    values = read_settings(FIELDS, config, secret)
    errors: dict[str, str] = {}

    def text(name: str) -> str:
        return cast(str, values[name] or "")

    for name in ("output_directory", "checkpoint_directory", "slurm_conf", "bin_directory", "ssh_key_file", "ca_file"):
        path = text(name)
        if path and (not path.startswith("/") or "\n" in path or "%" in path or "\\" in path):
            errors[name] = f"{path!r} must be an absolute path without % and backslash"
    for name in ("partition", "qos", "reservation", "instance", "ssh_host", "ssh_user"):
        if text(name) and (not _WORD.match(text(name)) or text(name).startswith("-")):
            errors[name] = f"{text(name)!r} may only have letters, digits and _ . : @ + -, and not begin with -"
    models = _pairs(values["gpu_models"], "gpu_models", "TYPE=MODEL", errors, empty_key=True)
    if len({model for _, model in models}) < len(models):
        errors["gpu_models"] = "each model may stand there once: a job asks Slurm for exactly one type"
    levels = _pairs(values["levels"], "levels", "LEVEL=PREFIX", errors)
    key = b""
    if text("transport") == "rest":
        key = _rest_settings(text, errors)
    elif text("run_as") == "root" and text("ssh_host") and text("ssh_user") not in ("", "root"):
        errors["run_as"] = "root over SSH needs the SSH user root; use sudo for any other"
    if errors:
        raise ConfigError(errors)
    names = {field.name for field in FIELDS} - {"gpu_models", "levels", "jwt_key", "dispatch_parallel"}
    plain = {name: ("" if values[name] is None and name not in _OPTIONAL_NUMBERS else values[name]) for name in names}
    return SlurmConfig(**plain, gpu_models=dict(models), levels=tuple(levels), jwt_key=key)  # type: ignore[arg-type]


_OPTIONAL_NUMBERS = ("cpus_per_gpu", "memory_per_gpu")


def check_account(account: str) -> str | None:
    """What is wrong with an account to run jobs under; None when nothing is."""
    if not _ACCOUNT.match(account):
        return f"account {account!r} is no valid account name (letters, digits, _ . -, at most 64)"
    if account == "root":
        return "jobs do not run as root: give the person an account on the cluster"
    return None


def _pairs(
    raw: object, field: str, form: str, errors: dict[str, str], *, empty_key: bool = False
) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for line in cast("tuple[str, ...]", raw or ()):
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not value or not (key or empty_key):
            errors[field] = f"{line!r} is not of the form {form}"
        elif key in dict(found):
            errors[field] = f"{key!r} is there twice"
        found.append((key, value))
    return found


def _rest_settings(text: object, errors: dict[str, str]) -> bytes:
    read = cast("type[str]", text)
    url, reader, encoded = read("url"), read("reader"), read("jwt_key")
    if not re.match(r"^(https?://[^/\s]+/?.*|unix:/.+)$", url):
        errors["url"] = f"{url!r} must begin with http://, https:// or unix:/" if url else "is required for rest"
    if not reader:
        errors["reader"] = "is required for rest"
    elif not _ACCOUNT.match(reader):
        errors["reader"] = f"{reader!r} is no valid account name"
    if not encoded:
        errors["jwt_key"] = "is required for rest"
        return b""
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        errors["jwt_key"] = "is not base64 (base64 -w0 jwt_hs256.key prints it)"
        return b""
    if len(key) < 16:
        errors["jwt_key"] = f"has {len(key)} bytes; Slurm's keys have 32"
    return key
