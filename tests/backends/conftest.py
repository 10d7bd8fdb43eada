from __future__ import annotations

from collections.abc import Iterator

import pytest

from scheduling.backends.slurm import SlurmBackend
from tests.backends.slurm_cluster import SlurmCluster, running_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A real Slurm: n0, n1 with 8 h100 each, n2, n3 with 8 a100 each."""
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture(params=["commands", "rest"])
def backend(request: pytest.FixtureRequest, slurm: SlurmCluster) -> SlurmBackend:
    return slurm.backend(request.param)
