"""Slurm as a back end: over its commands or over slurmrestd."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.backends.slurm.backend import SlurmBackend
from scheduling.backends.slurm.commands import CommandTransport
from scheduling.backends.slurm.config import FIELDS, parse
from scheduling.backends.slurm.rest import RestTransport
from scheduling.backends.slurm.runner import LocalRunner, SSHRunner
from scheduling.backends.slurm.transport import Transport

__all__ = ["FIELDS", "SlurmBackend", "from_config"]


def from_config(config: Mapping[str, object], secret: Mapping[str, object] | None = None) -> SlurmBackend:
    """The back end for a cluster's settings (``FIELDS`` describes them). Contacts nothing yet.

    Raises ``ConfigError`` naming every wrong field.
    """
    settings = parse(config, secret)
    transport: Transport
    if settings.transport == "rest":
        transport = RestTransport(settings)
    else:
        transport = CommandTransport(SSHRunner(settings) if settings.ssh_host else LocalRunner(settings))
    return SlurmBackend(settings, transport)
