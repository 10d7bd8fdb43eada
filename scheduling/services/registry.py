"""From a cluster's row to its back end."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from scheduling.backends.base import Backend
from scheduling.backends.simulated import SimulatedBackend
from scheduling.models import Cluster, ClusterKind
from scheduling.services import clock
from scheduling.services.secrets import unseal


def backend_for(cluster: Cluster) -> Backend:
    """The back end that speaks to this cluster. Raises ``Rejected`` for settings that cannot work."""
    return build(cluster.kind, cluster.name, cluster.config, unseal(cluster))


def build(kind: str, name: str, config: dict[str, object], secret: dict[str, object]) -> Backend:
    """From settings alone, before a cluster is saved."""
    if kind == ClusterKind.SIMULATED:
        return SimulatedBackend(config, store=simulated_store(name), now=clock.now)
    if kind == ClusterKind.SLURM:
        from scheduling.backends import slurm

        return slurm.from_config(config, secret)
    if kind == ClusterKind.KUBERNETES:
        from scheduling.backends import kubernetes

        return kubernetes.from_config(config, secret)
    raise ValueError(f"{kind!r} is not one of {', '.join(ClusterKind.values)}")


def simulated_store(name: str) -> Path:
    """Where a simulated cluster keeps what was started on it."""
    return Path(settings.GPUPORTAL_DATA) / "simulated" / f"{name}.sqlite"
