"""What the Slurm back end needs of Slurm, however it is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from scheduling.backends.base import BackendError
from scheduling.backends.slurm.records import SlurmJob, SlurmNode


class BadCredentials(BackendError):
    """Slurm did not accept who the portal says it is. While running this may pass (a key change under way)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes on which the same number of workers runs. A job with several groups becomes a heterogeneous one."""

    nodes: tuple[str, ...]
    workers_per_node: int
    #: Per node: "gpu:h100:4" or "shard:2".
    gres: str


@dataclass(frozen=True, slots=True)
class Submission:
    """One batch job, in no transport's words."""

    attempt: UUID
    #: Empty = the portal's own.
    account: str
    name: str
    comment: str
    groups: tuple[Group, ...]
    script: str
    output: str
    directory: str
    #: Minutes; None = the partition's default.
    time_limit: int | None = None
    #: Seconds before the time limit at which SIGTERM is sent; 0 = not.
    signal_before: int = 0
    cpus_per_worker: int | None = None
    #: MiB per node and worker.
    memory_per_worker: int | None = None
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    charge: str = ""


class Transport(Protocol):
    """Every method raises ``Unreachable`` or ``BadCredentials``; those that change a job also ``Rejected``, and
    ``NotFound`` for a job that Slurm does not know (any more)."""

    def version(self) -> str: ...

    def nodes(self) -> list[SlurmNode]: ...

    def topology(self) -> str | None:
        """The text of ``scontrol show topology``; None when there is none or this transport cannot tell."""
        ...

    def warnings(self) -> tuple[str, ...]:
        """What cannot be done this way."""
        ...

    def check(self, nodes: Sequence[SlurmNode]) -> None:
        """Raises ``Rejected`` when jobs could not be pinned to these nodes."""
        ...

    def jobs(self) -> list[SlurmJob]:
        """All jobs Slurm remembers."""
        ...

    def find(self, attempt: UUID, account: str) -> list[SlurmJob]:
        """The account's jobs that carry this attempt's tag; they may lack everything but id, states and nodes."""
        ...

    def lookup(self, job_id: int) -> list[SlurmJob]:
        """The job with this id, or nothing; with id, states, user, comment, nodes, start and time limit at least."""
        ...

    def submit(self, job: Submission) -> int: ...

    def update(self, job: SlurmJob, *, comment: str, time_limit: int | None) -> None: ...

    def signal(self, job: SlurmJob) -> None:
        """The stop signal to the job's steps; see ``script`` for what becomes of it there."""
        ...

    def cancel(self, job: SlurmJob) -> None:
        """At once. A job that has ended is no error."""
        ...

    def can_read(self) -> bool:
        """Whether the output folder can be read from here."""
        ...

    def read_file(self, path: str, offset: int, limit: int) -> bytes | None:
        """Part of a file, read with its owner's rights; None when there is none."""
        ...
