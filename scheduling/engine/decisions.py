"""What the engine answers: data, never side effects. The caller stores it and carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from scheduling.engine.snapshot import Placement


class EvictionReason(StrEnum):
    RECLAIM = "reclaim"  # 4.6, between teams
    PREEMPTION = "preemption"  # 4.7, inside a leaf team
    RESERVATION = "reservation"  # 4.5, a filler leaves in time
    CONSOLIDATION = "consolidation"  # 4.9, moved: restarts at once elsewhere
    SHRINK = "shrink"  # 4.11, surplus workers taken
    GROW = "grow"  # 4.11, back to more workers at a checkpoint


class Code(StrEnum):
    """Why a job waits (4.12): a closed list, in the order in which blockers are listed."""

    UNSATISFIABLE = "unsatisfiable"
    HELD = "held"
    DEPENDENCY = "dependency"
    NOT_BEFORE = "not-before"
    BACKOFF = "backoff"
    BUDGET_EXHAUSTED = "budget-exhausted"
    LIMIT = "limit"
    GUARANTEE = "guarantee"
    FAIR_SHARE = "fair-share"
    NO_CAPACITY = "no-capacity"
    FRAGMENTED = "fragmented"
    TOPOLOGY = "topology"
    RESERVED = "reserved"
    AWAITING_EVICTION = "awaiting-eviction"
    CLUSTER_UNAVAILABLE = "cluster-unavailable"
    MAINTENANCE = "maintenance"


#: The order of 4.12.
CODE_ORDER: Mapping[Code, int] = MappingProxyType({code: rank for rank, code in enumerate(Code)})


@dataclass(frozen=True, slots=True)
class Remedy:
    """The smallest change that would let the job start now.

    ``change`` is one of ``fewer-gpus`` (``value`` = GPUs in all, millionths), ``fewer-workers`` (``value`` =
    workers), ``other-pool`` (``pool``), ``interruptible``, ``shorter-walltime`` (``value`` = seconds),
    ``drop-topology``.
    """

    change: str
    value: float | None = None
    pool: int | None = None


@dataclass(frozen=True, slots=True)
class Blocker:
    """One reason. Only the fields that belong to its code are set; amounts in millionths of a GPU."""

    code: Code
    pool: int | None = None
    #: The team whose limit or guarantee is meant (it may be an ancestor of the job's team).
    team: int | None = None
    limit: int | None = None  # limit, guarantee: the bound
    in_use: int | None = None  # limit, guarantee: held by that team already
    asked: int | None = None  # what the job asks for, in all
    free: int | None = None  # no-capacity, fragmented, fair-share
    largest: int | None = None  # fragmented: largest block; topology: most inside one domain
    level: str | None = None  # topology
    job: int | None = None  # reserved: for which job; awaiting-eviction: whose GPUs
    until: float | None = None  # reserved, not-before, backoff, maintenance: instant
    detail: str = ""  # dependency names, unsatisfiable in words, cluster or window name
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Start:
    job: int
    pool: int
    placement: Placement
    workers: int
    #: On reserved GPUs; must leave by ``filler_until``.
    filler: bool = False
    filler_until: float | None = None
    #: The job starts on what an eviction plan held for it.
    from_hold: bool = False
    #: Why now, with numbers, for the record: turn key, share and allocation of the team before the start.
    because: str = ""


@dataclass(frozen=True, slots=True)
class Evict:
    attempt: int
    reason: EvictionReason
    #: The job it is done for (``None`` only for windows).
    for_job: int | None
    #: When its GPUs are free at the latest (now + grace).
    free_at: float
    #: Work lost by it, GPU-seconds (restart cost included).
    lost_work: float
    #: Shrink and grow: workers it goes on with; consolidation: all of them. 0 = back to the queue.
    continue_workers: int = 0
    #: Rule and numbers for the record.
    because: str = ""


@dataclass(frozen=True, slots=True)
class NewHold:
    """Keep this capacity for ``job``; replaces an older hold of the same job."""

    job: int
    pool: int
    placement: Placement
    expires: float
    victims: tuple[int, ...]
    workers: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Worked out anew each cycle; stored for people to see."""

    job: int
    pool: int
    placement: Placement
    at: float


@dataclass(frozen=True, slots=True)
class Blocked:
    job: int
    #: Position in the order of 4.2 among all waiting jobs of its pool, from 1.
    position: int
    blockers: tuple[Blocker, ...]


@dataclass(frozen=True, slots=True)
class ShareRow:
    """Fair share of one team in one pool (4.1), for the record and for people."""

    team: int
    pool: int
    share: float  # millionths of a GPU, a real number
    allocated: int  # before this plan's decisions
    fragile: int  # of that, held by jobs that may not be interrupted
    want: int
    usage: float  # u_i of 4.1


@dataclass(frozen=True, slots=True)
class Plan:
    """One cycle's decisions. The order of ``starts`` and ``evictions`` is the order they were made in."""

    now: float
    starts: tuple[Start, ...] = ()
    evictions: tuple[Evict, ...] = ()
    holds: tuple[NewHold, ...] = ()
    #: Jobs whose hold has lapsed or is needed no longer.
    released: tuple[int, ...] = ()
    reservations: tuple[Reserve, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    shares: tuple[ShareRow, ...] = ()
    #: Since when missing GPUs have been free, by attempt id, to be handed back in the next snapshot.
    growable_since: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    #: Earliest later instant at which the same state would be decided otherwise (a minimum run time over,
    #: a reservation due, a not-before or backoff reached …); ``None`` = only an event changes anything.
    wake_at: float | None = None
