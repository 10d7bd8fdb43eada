"""One cycle's scratch paper: copies of what it will change, and what it has worked out so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduling.engine.decisions import Evict, NewHold, Reserve, Start
from scheduling.engine.fairshare import Claims, at_most, decayed_capacity, fair_shares
from scheduling.engine.placement import Gradient, Reduction
from scheduling.engine.pool import PoolState
from scheduling.engine.snapshot import Attempt, Job, Placement, Request
from scheduling.engine.state import Held, State

if TYPE_CHECKING:
    from scheduling.engine.backfill import Ends


@dataclass(frozen=True, slots=True)
class Promise:
    """Devices of one pool that belong to somebody from ``begins`` to ``ends``: a reservation or a window."""

    begins: float
    ends: float
    #: Devices by node position; a window takes whole nodes, in ``nodes``.
    devices: tuple[tuple[int, int], ...]
    nodes: int = 0
    #: Reservation: for which job. Window: its name, and the team (position) that may use it.
    job: int | None = None
    window: str | None = None
    team: int | None = None


@dataclass(slots=True)
class Work:
    """What a cycle has changed on its copies, by pool."""

    state: State
    now: float
    pools: dict[int, PoolState]
    held: dict[int, Held]
    promises: dict[int, list[Promise]]
    starts: list[Start] = field(default_factory=list)
    evictions: list[Evict] = field(default_factory=list)
    holds: list[NewHold] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    reservations: list[Reserve] = field(default_factory=list)
    evicted: set[int] = field(default_factory=set)
    #: Attempts that other decisions of this cycle must not touch (shrunk, moved, grown).
    wake_at: float | None = None
    #: Free whole devices by pool when the cycle began, and by whom some of them were taken: for ``fair-share``.
    started_in: dict[int, set[int]] = field(default_factory=dict)
    shares_of: dict[int, list[float]] = field(default_factory=dict)
    wants_of: dict[int, list[int]] = field(default_factory=dict)
    usage_of: dict[int, list[float]] = field(default_factory=dict)
    totals: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, Gradient] = field(default_factory=dict)
    #: Expected ends by pool (backfill).
    ends_of: dict[int, Ends] = field(default_factory=dict)
    fillers_of: dict[int, list[Attempt]] = field(default_factory=dict)
    #: Views by (pool, identities of the promises taken off): promises live as long as the cycle.
    reductions: dict[tuple[int, ...], Reduction] = field(default_factory=dict)
    #: Rises whenever something of a pool changes: cached views compare it.
    version: dict[int, int] = field(default_factory=dict)

    @classmethod
    def on(cls, state: State) -> Work:
        for pool in state.pools.values():
            pool.settle()
        return cls(
            state=state,
            now=state.now,
            pools={number: pool.copy() for number, pool in state.pools.items()},
            held={number: held.copy() for number, held in state.held.items()},
            promises={number: [] for number in state.pools},
            started_in={number: set() for number in state.pools},
            version=dict.fromkeys(state.pools, 0),
        )

    # -- worked out on demand ----------------------------------------------------------------------------------

    def share(self, pool: int, team: int) -> float:
        """Fair share (4.1) as of the beginning of the cycle."""
        shares = self.shares_of.get(pool)
        if shares is None:
            shares = self._work_out_shares(pool)
        return shares[team]

    def usage(self, pool: int, team: int) -> float:
        if pool not in self.usage_of:
            self._work_out_shares(pool)
        return self.usage_of[pool][team]

    def wants_of_team(self, pool: int, team: int) -> int:
        """``want`` of 4.1: what a team holds and asks for, at most its limit; millionths."""
        if pool not in self.wants_of:
            self._work_out_shares(pool)
        return self.wants_of[pool][team]

    def _work_out_shares(self, pool: int) -> list[float]:
        state = self.state
        teams = state.teams
        held = state.held[pool].allocated
        demand = state.demand[pool]
        reachable = state.pools[pool].reachable
        limit = teams.limit[pool]
        total = self.totals[pool] = state.usable_total(pool)
        want = [0] * len(teams.rows)
        for team, below in enumerate(teams.children):
            if not below:
                asked = held[team] + (demand[team] if reachable else 0)
                bound = limit[team]
                want[team] = asked if bound is None else min(bound, asked)
        usage = self._usage(pool, total)
        claims = Claims(teams.roots, teams.children, teams.guaranteed[pool], limit, teams.weight[pool], want, usage)
        shares = fair_shares(claims, total, state.policy.history_weight)
        self.shares_of[pool], self.wants_of[pool], self.usage_of[pool] = shares, want, usage
        return shares

    def _usage(self, pool: int, total: int) -> list[float]:
        """``u_i`` of 4.1 by team position: decayed GPU-hours over the pool's decayed capacity."""
        teams = self.state.teams
        whole = decayed_capacity(total / 1e6, self.state.policy.half_life)
        usage = [0.0] * len(teams.rows)
        if whole <= 0:
            return usage
        for leaf, hours in enumerate(self.state.used[pool]):
            if hours:
                for team in teams.path[leaf]:
                    usage[team] += hours / whole
        return usage

    def fillers(self, pool: int) -> list[Attempt]:
        """Attempts that ran on reserved GPUs when the cycle began, by id."""
        found = self.fillers_of.get(pool)
        if found is None:
            running = self.state.by_pool[pool]
            found = self.fillers_of[pool] = [a for _, a in sorted(running.items()) if a.filler]
        return found

    def gradient(self, pool: int) -> Gradient:
        gradient = self.gradients.get(pool)
        if gradient is None:
            state = self.pools[pool]
            gradient = self.gradients[pool] = Gradient(state.largest, self.state.sizes[pool])
        return gradient

    def walltime(self, job: Job, pool: int) -> float:
        """Seconds that planning reckons with (4.5)."""
        if job.walltime is not None:
            return job.walltime
        own = self.pools[pool].pool.default_walltime
        return self.state.policy.default_walltime if own is None else own

    def wake(self, at: float) -> None:
        if at > self.now and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at

    # -- changes on the copies ---------------------------------------------------------------------------------

    def account(self, pool: int, leaf: int, amount: int, *, fragile: bool) -> None:
        held = self.held[pool]
        for team in self.state.teams.path[leaf]:
            held.allocated[team] += amount
            if fragile:
                held.fragile[team] += amount

    def start(self, job: Job, pool: int, placement: Placement, amount: int, start: Start) -> None:
        leaf = self.state.leaf(job)
        self.pools[pool].take(placement)
        self.account(pool, leaf, amount, fragile=not job.request.interruptible)
        self.starts.append(start)
        self.started_in[pool].add(leaf)
        self.version[pool] += 1

    def evict(self, attempt: Attempt, eviction: Evict) -> None:
        """The victim's GPUs stop counting as its team's; its devices stay taken until it has gone."""
        leaf = self.state.leaf(attempt.job)
        amount = placement_amount(attempt.placement)
        self.account(attempt.pool, leaf, -amount, fragile=False)
        held = self.held[attempt.pool]
        for team in self.state.teams.path[leaf]:
            held.stopping[team] += amount
            if not attempt.job.request.interruptible:
                held.fragile[team] -= amount
        self.evicted.add(attempt.id)
        self.evictions.append(eviction)
        self.version[attempt.pool] += 1

    def hold(self, job: Job, hold: NewHold) -> None:
        self.pools[hold.pool].hold(hold.placement)
        self.account(
            hold.pool,
            self.state.leaf(job),
            placement_amount(hold.placement),
            fragile=not job.request.interruptible,
        )
        self.holds.append(hold)
        self.version[hold.pool] += 1


def placement_amount(placement: Placement) -> int:
    """Millionths of a GPU in a placement."""
    return sum(slot.devices.bit_count() * slot.share for slot in placement)


def over_limit(work: Work, pool: int, leaf: int, amount: int) -> int | None:
    """The first team of the path whose limit ``amount`` more would break (4.3); counts what is still stopping."""
    held = work.held[pool]
    limit = work.state.teams.limit[pool]
    for team in work.state.teams.path[leaf]:
        bound = limit[team]
        if bound is not None and held.allocated[team] + held.stopping[team] + amount > bound:
            return team
    return None


def may_borrow(work: Work, job: Job) -> bool:
    """Whether a job may run above the guarantee (4.3): interruptible, or short enough by ``fragile_borrowing``."""
    if job.request.interruptible:
        return True
    longest = work.state.policy.fragile_borrowing
    return longest is not None and job.walltime is not None and job.walltime <= longest


def over_guarantee(work: Work, pool: int, leaf: int, amount: int) -> int | None:
    """The first team of the path whose guarantee fragile work of ``amount`` more would break (4.3)."""
    fragile = work.held[pool].fragile
    guaranteed = work.state.teams.guaranteed[pool]
    for team in work.state.teams.path[leaf]:
        if fragile[team] + amount > guaranteed[team]:
            return team
    return None


def gang_over_guarantee(work: Work, job: Job, pool: int, leaf: int, placeable: int) -> int | None:
    """As ``over_guarantee``, for a job that lacks hardware: what of it could be placed now, at least one worker.

    A gang that waits for GPUs which its own team's jobs hold is short of hardware, not of guarantee: the guarantee
    comes free with the hardware. Starting always takes the whole amount within the guarantee.
    """
    workers = min(max(placeable, 1), job.request.workers)
    return over_guarantee(work, pool, leaf, amount_of(work.pools[pool], job.request, workers))


def may_start(work: Work, job: Job, pool: int, amount: int) -> bool:
    """Admission (4.3), hardware aside."""
    leaf = work.state.leaf(job)
    if over_limit(work, pool, leaf, amount) is not None:
        return False
    return may_borrow(work, job) or over_guarantee(work, pool, leaf, amount) is None


def within_share(work: Work, pool: int, team: int, amount: int) -> bool:
    return at_most(amount, work.share(pool, team))


def ratio(amount: float, share: float) -> float:
    """``allocated / share`` of 4.2; a share of 0 counts as infinite."""
    return amount / share if share > 0 else float("inf")


def avoid_bits(pool: PoolState, job: Job) -> int:
    bits = 0
    for node in job.avoid:
        position = pool.index.get(node)
        if position is not None:
            bits |= 1 << position
    return bits


def amount_of(pool: PoolState, request: Request, workers: int | None = None) -> int:
    """As ``PoolState.amount`` for a request that is known to be expressible there."""
    amount = pool.amount(request, workers)
    if amount is None:
        raise ValueError(f"a share of {request.share_memory} bytes does not fit a device of pool {pool.pool.name}")
    return amount


def elastic_sizes(request: Request) -> Sequence[int]:
    """Smaller numbers of workers an elastic job may start with, largest first (4.11)."""
    return range(request.workers - 1, request.min_workers - 1, -1)
