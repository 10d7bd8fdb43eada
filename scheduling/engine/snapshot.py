"""What the engine reads: one instant of the whole installation, frozen.

Conventions of every class here:

* amounts of GPU are ``int`` in millionths of one device (``GPU`` = 1,000,000), so that shares add and
  compare exactly; a whole device is ``GPU``;
* instants and durations are ``float`` seconds on one common origin (POSIX in the live loop, the start of
  the scenario in a simulation);
* identifiers are ``int``; names are for people and for the last tie-break of design.md 4.2;
* collections are tuples, and their order means nothing: whatever order matters is derived from ids.

Section numbers refer to design.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType

#: One whole device in the engine's unit of amount.
GPU = 1_000_000

HOUR = 3600.0
DAY = 24 * HOUR


class Priority(IntEnum):
    """Order inside a leaf team; a larger number goes first (4.2)."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    URGENT = 3


class WorkloadClass(StrEnum):
    TRAINING = "training"
    BATCH = "batch"
    INTERACTIVE = "interactive"
    INFERENCE = "inference"


class NodeState(StrEnum):
    """``DRAINED`` keeps what runs and takes nothing new (4.4); ``DOWN`` has lost what ran."""

    UP = "up"
    DOWN = "down"
    DRAINED = "drained"


class WindowKind(StrEnum):
    MAINTENANCE = "maintenance"
    RESERVATION = "reservation"


class AttemptState(StrEnum):
    """Where a run stands. ``STOPPING`` holds its GPUs until its grace is over."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class Discipline(StrEnum):
    """How the queue is walked. All but ``FAIR_SHARE`` exist for comparison in simulations."""

    FAIR_SHARE = "fair-share"
    FIFO = "fifo"
    SHORTEST = "shortest"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True)
class Policy:
    """The names and defaults of section 4. Durations in seconds."""

    half_life: float = 7 * DAY
    #: ``k`` of 4.1; 0 turns usage history off.
    history_weight: float = 1.0
    min_runtime: float = 300.0
    reservation_depth: int = 8
    default_walltime: float = DAY
    #: Longest walltime that may borrow without being interruptible; ``None`` = never.
    fragile_borrowing: float | None = None
    plan_timeout: float = 600.0
    #: GPU-hours of work that may be lost per GPU gained by moving attempts (4.9).
    consolidation_budget: float = 0.25
    backoff: float = 30.0
    backoff_max: float = HOUR
    infrastructure_retries: int = 3
    grow_after: float = 600.0
    #: Seconds of work lost by any restart, on top of the time since the checkpoint (4.8).
    restart_cost: float = 0.0
    discipline: Discipline = Discipline.FAIR_SHARE


@dataclass(frozen=True, slots=True)
class Cluster:
    id: int
    name: str
    #: Names of the topology levels, widest first; the node itself is not named here.
    levels: tuple[str, ...] = ()
    reachable: bool = True


@dataclass(frozen=True, slots=True)
class Pool:
    """The nodes of one cluster that have the same GPU model."""

    id: int
    name: str
    cluster: int
    #: Bytes of memory of one device; 0 = unknown (a share by memory then does not fit).
    memory: int = 0
    #: Overrides ``Policy.default_walltime`` for jobs without walltime.
    default_walltime: float | None = None
    #: Work done per hour relative to the reference model; estimates scale durations with it.
    relative_speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Node:
    id: int
    name: str
    pool: int
    gpus: int
    #: One domain name per level of the cluster, widest first; "" where the node has none.
    domains: tuple[str, ...] = ()
    state: NodeState = NodeState.UP
    #: Whether its GPUs may be split into shares.
    shareable: bool = False
    #: Device indices that are broken and take nothing (bit i = device i); they count as down.
    broken: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """A team's claim on one pool. ``limit`` ``None`` = no hard maximum."""

    guaranteed: int = 0
    limit: int | None = None
    weight: float = 1.0


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Team:
    id: int
    name: str
    parent: int | None = None
    #: By pool id; a missing pool means ``NO_QUOTA``.
    quotas: Mapping[int, Quota] = field(default_factory=lambda: MappingProxyType({}))
    #: Decayed GPU-hours by pool id, as of ``Snapshot.now`` (4.1). Leaves only; parents are summed.
    used: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Request:
    """The shape of a job: everything about it that placement, admission and eviction look at.

    Many jobs share one instance: loaders intern equal requests, and the engine then judges a shape once.
    Either ``gpus`` ≥ 1 (whole devices per worker) or exactly one of ``share`` (millionths of one device)
    and ``share_memory`` (bytes of one device) is set, with one worker.
    """

    #: Acceptable pools, best first.
    pools: tuple[int, ...]
    gpus: int = 0
    share: int = 0
    share_memory: int = 0
    workers: int = 1
    #: Below ``workers`` for elastic jobs (4.11).
    min_workers: int = 1
    interruptible: bool = False
    #: Seconds between checkpoints; ``None`` = an eviction loses all work.
    checkpoint_every: float | None = None
    grace: float = 0.0
    #: Name of a topology level, "node" for the node itself; ``None`` = anywhere in the pool.
    level: str | None = None
    #: With ``level``: must hold (``required``) or would be nice (``preferred``).
    required: bool = False
    workload: WorkloadClass = WorkloadClass.TRAINING

    @property
    def elastic(self) -> bool:
        return self.min_workers < self.workers

    @property
    def fractional(self) -> bool:
        return self.gpus == 0


@dataclass(frozen=True, slots=True)
class Job:
    """A job that is not finished: waiting, or carried by an :class:`Attempt` that is running."""

    id: int
    name: str
    team: int
    request: Request
    priority: Priority = Priority.NORMAL
    #: Submit time; kept through evictions, so a victim keeps its place (4.8).
    submitted: float = 0.0
    #: Longest time an attempt may take; ``None`` = the pool's default for planning, no limit for running.
    walltime: float | None = None
    held: bool = False
    #: Names of the jobs it still waits for.
    unmet: tuple[str, ...] = ()
    not_before: float = 0.0
    #: Earliest next attempt after a failure (4.10).
    backoff_until: float = 0.0
    #: The team's budget is used up and set to block (name of the budget's team).
    budget_exhausted: str | None = None
    #: Nodes that failed its last attempt: tried last (4.4).
    avoid: frozenset[int] = frozenset()
    #: Set by the caller when no hardware of the installation could ever run it: the reason in words.
    #: The engine works out the same thing itself for what it can see.
    unsatisfiable: str | None = None
    #: ``Discipline.SHORTEST`` only: the true duration in seconds.
    duration: float | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """What one worker holds on one node: a bit per whole device, or a share of exactly one device."""

    node: int
    #: Bit i = device index i.
    devices: int
    #: Millionths of the one device in ``devices``; ``GPU`` for whole devices.
    share: int = GPU


Placement = tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of a job that holds GPUs now."""

    id: int
    job: Job
    pool: int
    placement: Placement
    started: float
    state: AttemptState = AttemptState.RUNNING
    #: Work up to here is safe; ``None`` = nothing saved in this attempt yet (loss counts from ``started``).
    last_checkpoint: float | None = None
    #: Started on reserved GPUs (4.5).
    filler: bool = False
    #: With ``STOPPING``: when its GPUs are free at the latest.
    stopping_until: float | None = None
    #: Workers it runs with now (elastic jobs: between ``min_workers`` and ``workers``).
    workers: int = 1
    #: Simulations: it checkpoints every so many seconds from ``started`` on; the last one follows from the time.
    regular_checkpoints: float | None = None

    def checkpoint_before(self, now: float) -> float | None:
        """Instant of the last checkpoint of this attempt up to ``now``, or ``None``."""
        every = self.regular_checkpoints
        if every is None:
            return self.last_checkpoint
        done = int((now - self.started) / every + 1e-9)
        return self.started + done * every if done > 0 else None


@dataclass(frozen=True, slots=True)
class Hold:
    """Capacity that an eviction plan frees, kept for the job it was made for (4.8)."""

    job: int
    pool: int
    placement: Placement
    #: When the promise lapses (made + ``plan_timeout``).
    expires: float
    #: Attempts whose end it waits for.
    victims: tuple[int, ...] = ()
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Window:
    """Nodes taken out for a time: maintenance, or an advance reservation for one team."""

    id: int
    name: str
    kind: WindowKind
    nodes: tuple[int, ...]
    begins: float
    ends: float
    #: ``RESERVATION`` only: the team (and those below it) whose jobs may use the nodes meanwhile.
    team: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one cycle looks at. Nothing else exists for the engine."""

    now: float
    policy: Policy
    clusters: tuple[Cluster, ...]
    pools: tuple[Pool, ...]
    nodes: tuple[Node, ...]
    teams: tuple[Team, ...]
    waiting: tuple[Job, ...] = ()
    running: tuple[Attempt, ...] = ()
    holds: tuple[Hold, ...] = ()
    windows: tuple[Window, ...] = ()
    #: Since when the missing GPUs of a running elastic attempt have been free, by attempt id (4.11).
    growable_since: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
