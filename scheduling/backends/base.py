"""The contract between the portal and a cluster (design.md 5).

A back end translates; it decides nothing. ``start`` and ``stop`` are idempotent by the attempt's UUID: sent
twice, or again after a crash between doing and recording, they change nothing the second time. All instants are
aware UTC datetimes. Implementations never use the database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol, runtime_checkable
from uuid import UUID


class BackendError(Exception):
    """Base of what a back end raises; anything else is a defect of the back end."""


class Unreachable(BackendError):
    """No answer, or a failure that may pass (HTTP 5xx, time-out). Retry later; jobs keep their state."""


class Rejected(BackendError):
    """The cluster refused this command for good; the message holds its own words. The attempt fails."""


class NotFound(BackendError):
    """The cluster knows no such attempt (or has forgotten its log)."""


class NodeCondition(StrEnum):
    UP = "up"
    DOWN = "down"
    DRAINED = "drained"


class RunState(StrEnum):
    """Where a cluster says an attempt stands."""

    QUEUED = "queued"  # accepted, not running yet
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"  # ended by a stop of ours or by somebody on the cluster
    PREEMPTED = "preempted"  # evicted by the cluster itself
    NODE_FAILED = "node_failed"
    #: Put back into the cluster's own queue behind our back; the back end has cancelled it there.
    REQUEUED = "requeued"

    @property
    def final(self) -> bool:
        return self not in (RunState.QUEUED, RunState.RUNNING, RunState.STOPPING)


class Cause(StrEnum):
    """Why a run did not succeed, as far as the cluster can tell (values of ``models.ledger.Cause``)."""

    NONE = ""
    USER = "user"
    OUT_OF_MEMORY = "oom"
    NODE = "node"
    XID = "xid"
    NETWORK = "network"
    PREEMPTION = "preemption"
    WALLTIME = "walltime"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    name: str
    gpu_model: str
    gpus: int
    #: Bytes per device; 0 = the cluster does not say.
    gpu_memory: int = 0
    #: Domain by topology level.
    domains: Mapping[str, str] = field(default_factory=dict)
    condition: NodeCondition = NodeCondition.UP
    reason: str = ""
    shareable: bool = False
    #: Device UUIDs by index, where known.
    uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """What a cluster consists of."""

    #: Product and version, for people.
    version: str
    #: Topology level names, widest first.
    levels: tuple[str, ...]
    nodes: tuple[NodeInfo, ...]
    #: What the portal should know and tell (missing features, limits).
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """One worker's place: device indices on a node (as the ledger has them; a cluster may choose others)."""

    node: str
    devices: tuple[int, ...]
    #: 1 = whole devices; below 1, that part of the one device named.
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class StartCommand:
    """Everything a cluster needs to run one attempt."""

    attempt: UUID
    job_id: int
    job_name: str
    team: str
    #: Account on the cluster under which it runs.
    account: str
    command: str
    slots: tuple[WorkerSlot, ...]
    gpu_model: str
    gpus_per_worker: int
    image: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = ""
    walltime: timedelta | None = None
    grace: timedelta = timedelta(0)
    #: Which attempt of the job this is, from 1.
    number: int = 1
    interruptible: bool = False
    #: Simulated back end only.
    simulation: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class StopCommand:
    """End an attempt: a signal at once, the end after ``grace`` at the latest."""

    attempt: UUID
    grace: timedelta
    reason: str
    backend_id: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """The cluster has accepted the attempt (or had accepted it before)."""

    backend_id: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a cluster says about one attempt."""

    attempt: UUID
    state: RunState
    backend_id: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None
    cause: Cause = Cause.NONE
    #: The cluster's own words.
    detail: str = ""
    #: Node name -> device indices actually in use, where the cluster tells.
    devices: Mapping[str, tuple[int, ...]] | None = None
    last_checkpoint_at: datetime | None = None
    first_result_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class NodeReport:
    name: str
    condition: NodeCondition
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One device's measurement (see ``models.telemetry.GPUSample``)."""

    node: str
    device: int
    at: datetime
    seconds: int
    activity: float | None
    metric: str = ""
    power_watts: float | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """All that changed since ``since`` (or everything, when ``complete``)."""

    at: datetime
    runs: tuple[RunReport, ...]
    nodes: tuple[NodeReport, ...]
    #: Hand this to the next ``observe``.
    cursor: str = ""
    #: True when every attempt the cluster knows is listed: what is missing from it is lost.
    complete: bool = True
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of an attempt's output from ``offset``; ``end`` is where to read on, ``finished`` when no more comes."""

    offset: int
    data: bytes
    end: int
    finished: bool


@runtime_checkable
class Backend(Protocol):
    """One connected cluster."""

    def describe(self) -> Description:
        """Nodes, GPUs, topology. Raises ``Unreachable``, or ``Rejected`` for wrong credentials or versions."""
        ...

    def start(self, command: StartCommand) -> Started:
        """Run it on exactly the chosen nodes. Idempotent by UUID. Raises ``Unreachable``, ``Rejected``."""
        ...

    def stop(self, command: StopCommand) -> None:
        """Signal, grace, end. Idempotent; an attempt that has ended already is no error. Raises ``Unreachable``,
        ``NotFound`` when the cluster never heard of it."""
        ...

    def observe(self, since: str, attempts: Sequence[UUID]) -> Observation:
        """What became of ``attempts`` (those the ledger believes open) and of the nodes. Raises ``Unreachable``."""
        ...

    def logs(self, attempt: UUID, *, offset: int = 0, limit: int = 1 << 20, backend_id: str = "") -> LogChunk:
        """Raises ``Unreachable``, ``NotFound``."""
        ...
