"""The working state of the engine: what a cycle needs, kept ready between cycles.

``State.of(snapshot)`` builds it; a replay keeps one alive and tells it each change instead. Both give the same plan.
A cycle works on copies and leaves the state as it found it; decisions come back through ``begin``, ``end``,
``hold`` and ``release`` when the caller has carried them out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduling.engine.pool import PoolState
from scheduling.engine.snapshot import (
    HOUR,
    NO_QUOTA,
    Attempt,
    AttemptState,
    Cluster,
    Hold,
    Job,
    Node,
    NodeState,
    Placement,
    Policy,
    Pool,
    Quota,
    Request,
    Snapshot,
    Team,
    Window,
    WindowKind,
)


class UnknownTeam(LookupError):
    """A job names a team that the snapshot does not have."""


@dataclass(slots=True)
class WaitClass:
    """Waiting jobs of one leaf with the same request and priority: judged together."""

    key: tuple[int, int]  # priority, request number
    request: Request
    priority: int
    #: (submitted, id, job), oldest first.
    jobs: list[tuple[float, int, Job]] = field(default_factory=list)


class Teams:
    """The tree by position (order of team ids) with its claims per pool, and what each holds now."""

    def __init__(self, teams: Iterable[Team], pools: Sequence[int]) -> None:
        self.rows = sorted(teams, key=lambda team: team.id)
        self.index = {team.id: position for position, team in enumerate(self.rows)}
        self.parent: list[int | None] = [None if team.parent is None else self.index[team.parent] for team in self.rows]
        self.children: list[list[int]] = [[] for _ in self.rows]
        self.roots: list[int] = []
        for position, parent in enumerate(self.parent):
            (self.roots if parent is None else self.children[parent]).append(position)
        #: From the team itself up to its root.
        self.path: list[tuple[int, ...]] = [self._path(position) for position in range(len(self.rows))]
        self._leaves: dict[int, list[int]] = {}
        self.names = [team.name for team in self.rows]
        self.guaranteed: dict[int, list[int]] = {}
        self.limit: dict[int, list[int | None]] = {}
        self.weight: dict[int, list[float]] = {}
        for pool in pools:
            quotas = [team.quotas.get(pool, NO_QUOTA) for team in self.rows]
            self.guaranteed[pool] = [quota.guaranteed for quota in quotas]
            self.limit[pool] = [quota.limit for quota in quotas]
            self.weight[pool] = [quota.weight for quota in quotas]

    def leaves_below(self, team: int) -> list[int]:
        """Leaf positions at or below a team."""
        found = self._leaves.get(team)
        if found is None:
            below = self.children[team]
            found = [leaf for child in below for leaf in self.leaves_below(child)] if below else [team]
            self._leaves[team] = found
        return found

    def _path(self, position: int) -> tuple[int, ...]:
        path = [position]
        while (parent := self.parent[path[-1]]) is not None:
            path.append(parent)
        return tuple(path)

    def set_quota(self, team: int, pool: int, quota: Quota) -> None:
        position = self.index[team]
        self.guaranteed[pool][position] = quota.guaranteed
        self.limit[pool][position] = quota.limit
        self.weight[pool][position] = quota.weight


@dataclass(slots=True)
class Held:
    """Amounts by team position in one pool; every ancestor includes what is below it."""

    #: Running attempts and holds; what is being evicted no longer counts as its team's.
    allocated: list[int]
    #: Of that, held by jobs that may not be interrupted.
    fragile: list[int]
    #: Still on the devices though told to stop.
    stopping: list[int]

    @classmethod
    def none(cls, teams: int) -> Held:
        return cls([0] * teams, [0] * teams, [0] * teams)

    def copy(self) -> Held:
        return Held(self.allocated.copy(), self.fragile.copy(), self.stopping.copy())


class State:
    """All of the installation that matters to a cycle. Identifiers are those of the snapshot."""

    def __init__(
        self,
        *,
        now: float,
        policy: Policy,
        clusters: Iterable[Cluster],
        pools: Iterable[Pool],
        nodes: Iterable[Node],
        teams: Iterable[Team],
        windows: Iterable[Window] = (),
    ) -> None:
        self.now = now
        self.policy = policy
        self.clusters = {cluster.id: cluster for cluster in clusters}
        by_pool: dict[int, list[Node]] = {}
        for node in nodes:
            by_pool.setdefault(node.pool, []).append(node)
        self.pools: dict[int, PoolState] = {}
        for pool in sorted(pools, key=lambda pool: pool.id):
            cluster = self.clusters[pool.cluster]
            self.pools[pool.id] = PoolState(pool, by_pool.get(pool.id, ()), cluster.levels, reachable=cluster.reachable)
        team_rows = tuple(teams)
        self.teams = Teams(team_rows, tuple(self.pools))
        self.held = {pool: Held.none(len(team_rows)) for pool in self.pools}
        #: Decayed GPU-hours (of whole GPUs) by pool and team position, as of ``now``; leaves only.
        self.used: dict[int, list[float]] = {
            pool: [team.used.get(pool, 0.0) for team in self.teams.rows] for pool in self.pools
        }
        self.windows: tuple[Window, ...] = tuple(sorted(windows, key=lambda window: window.id))
        self.jobs: dict[int, Job] = {}
        #: By leaf position: classes of jobs that could start as far as time and dependencies go.
        self.queues: dict[int, dict[tuple[int, int], WaitClass]] = {}
        #: Waiting, but held, depending, not yet due …: no demand.
        self.parked: dict[int, Job] = {}
        #: (instant, job id): when a parked job becomes due.
        self.due: list[tuple[float, int]] = []
        #: Pending demand by pool and leaf position, millionths.
        self.demand: dict[int, list[int]] = {pool: [0] * len(team_rows) for pool in self.pools}
        self.running: dict[int, Attempt] = {}
        self.by_pool: dict[int, dict[int, Attempt]] = {pool: {} for pool in self.pools}
        #: Interruptible attempts by pool, leaf position and priority: who could be preempted at all (4.7).
        self.preemptible: dict[int, dict[tuple[int, int], int]] = {pool: {} for pool in self.pools}
        #: By pool: attempts that run with fewer workers than they asked for (4.11).
        self.shrunken: dict[int, set[int]] = {pool: set() for pool in self.pools}
        #: By pool: devices of all nodes while every node is up, else None.
        self._all_up: dict[int, int | None] = {}
        self.holds: dict[int, Hold] = {}
        #: The job of each hold as it was when the hold was made: what its amounts are counted by.
        self._hold_jobs: dict[int, Job] = {}
        self.growable_since: dict[int, float] = {}
        #: Where attempts stand, as reclaim wants it; dropped with them.
        self.footprints: dict[int, tuple[Placement, tuple[int, int, dict[int, int], dict[tuple[int, int], int]]]] = {}
        self._request_numbers: dict[Request, int] = {}
        self._requests_by_id: dict[int, tuple[int, Request]] = {}
        #: Waiting workers by whole devices each, by pool: what the fragmentation gradient looks at.
        self.sizes: dict[int, dict[int, int]] = {pool: {} for pool in self.pools}

    @classmethod
    def of(cls, snapshot: Snapshot) -> State:
        state = cls(
            now=snapshot.now,
            policy=snapshot.policy,
            clusters=snapshot.clusters,
            pools=snapshot.pools,
            nodes=snapshot.nodes,
            teams=snapshot.teams,
            windows=snapshot.windows,
        )
        for attempt in snapshot.running:
            state._begin(attempt)
        running = {attempt.job.id: attempt.job for attempt in snapshot.running}
        wanted = {hold.job for hold in snapshot.holds}
        waiting = {job.id: job for job in snapshot.waiting if job.id in wanted}
        for hold in sorted(snapshot.holds, key=lambda hold: hold.job):
            job = waiting.get(hold.job) or running.get(hold.job)
            if job is not None:
                state._add_hold(hold, job)
        state.submit_many(snapshot.waiting)
        state.growable_since = dict(snapshot.growable_since)
        return state

    # -- time --------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Let time pass: usage decays and grows by what is allocated; parked jobs become due.

        Source of the closed form: ∫ 0.5^((t1−s)/h) ds over [t0, t1] = h/ln 2 × (1 − 0.5^((t1−t0)/h)).
        """
        elapsed = now - self.now
        if elapsed > 0:
            half_life = self.policy.half_life
            factor = 0.5 ** (elapsed / half_life)
            gained = half_life / HOUR * (1.0 - factor) / 0.6931471805599453 / 1e6
            for pool, used in self.used.items():
                held = self.held[pool]
                for leaf, value in enumerate(used):
                    amount = held.allocated[leaf] + held.stopping[leaf]
                    if value or amount:
                        used[leaf] = value * factor + amount * gained if not self.teams.children[leaf] else 0.0
        self.now = now
        while self.due and self.due[0][0] <= now:
            _, number = heapq.heappop(self.due)
            job = self.parked.get(number)
            if job is not None and self._startable(job):
                del self.parked[number]
                self._enqueue(job)

    # -- the queue ---------------------------------------------------------------------------------------------

    def submit_many(self, jobs: Iterable[Job]) -> None:
        """As ``submit`` for many that are not known yet: queues are sorted once, demand counted once per class."""
        now = self.now
        groups: dict[tuple[int, int, int], list[tuple[float, int, Job]]] = {}
        for job in jobs:
            number = job.id
            self.jobs[number] = job
            if number in self.holds:
                continue
            if (
                job.held
                or job.unmet
                or job.not_before > now
                or job.backoff_until > now
                or job.budget_exhausted is not None
                or job.unsatisfiable is not None
            ):
                self._park(job)
                continue
            key = (job.team, job.priority, id(job.request))
            group = groups.get(key)
            if group is None:
                groups[key] = [(job.submitted, number, job)]
            else:
                group.append((job.submitted, number, job))
        touched: dict[int, WaitClass] = {}
        for rows in groups.values():
            first = rows[0][2]
            leaf = self.leaf(first)
            wait_class = self._class(first, leaf)
            wait_class.jobs.extend(rows)
            touched[id(wait_class)] = wait_class
            self._count_demand(first, leaf, len(rows))
        for wait_class in touched.values():
            wait_class.jobs.sort()

    def submit(self, job: Job) -> None:
        """A job waits (new, or back after an attempt). Replaces an older row of the same id."""
        if job.id in self.jobs and job.id not in self.holds:
            self.withdraw(job.id)
        self.jobs[job.id] = job
        if job.id in self.holds:
            return
        if self._startable(job):
            self._enqueue(job)
        else:
            self._park(job)

    def withdraw(self, job_id: int) -> None:
        """A job waits no longer: started, cancelled."""
        job = self.jobs.pop(job_id, None)
        if job is None:
            return
        if self.parked.pop(job_id, None) is not None:
            return
        if job_id in self.holds:
            self._drop_hold(self.holds.pop(job_id), self._hold_jobs[job_id])
            return
        leaf = self.leaf(job)
        key = self.class_key(job)
        wait_class = self.queues[leaf][key]
        at = bisect_left(wait_class.jobs, (job.submitted, job.id))
        del wait_class.jobs[at]
        if not wait_class.jobs:
            del self.queues[leaf][key]
            if not self.queues[leaf]:
                del self.queues[leaf]
        self._count_demand(job, leaf, -1)

    def _startable(self, job: Job) -> bool:
        return not (
            job.held
            or job.unmet
            or job.not_before > self.now
            or job.backoff_until > self.now
            or job.budget_exhausted is not None
            or job.unsatisfiable is not None
        )

    def _park(self, job: Job) -> None:
        self.parked[job.id] = job
        if not (job.held or job.unmet or job.budget_exhausted is not None or job.unsatisfiable is not None):
            heapq.heappush(self.due, (max(job.not_before, job.backoff_until), job.id))

    def _enqueue(self, job: Job) -> None:
        leaf = self.leaf(job)
        insort(self._class(job, leaf).jobs, (job.submitted, job.id, job))
        self._count_demand(job, leaf, 1)

    def _class(self, job: Job, leaf: int) -> WaitClass:
        key = self.class_key(job)
        classes = self.queues.setdefault(leaf, {})
        wait_class = classes.get(key)
        if wait_class is None:
            wait_class = classes[key] = WaitClass(key, job.request, job.priority)
        return wait_class

    def _count_demand(self, job: Job, leaf: int, count: int) -> None:
        request = job.request
        for pool in request.pools:
            state = self.pools.get(pool)
            amount = None if state is None else state.amount(request)
            if amount is None:
                continue
            self.demand[pool][leaf] += count * amount
            sizes = self.sizes[pool]
            size = request.gpus or 1
            sizes[size] = sizes.get(size, 0) + count * request.workers

    def leaf(self, job: Job) -> int:
        try:
            return self.teams.index[job.team]
        except KeyError:
            raise UnknownTeam(f"job {job.name}: team {job.team} is not in the snapshot") from None

    def class_key(self, job: Job) -> tuple[int, int]:
        """Equal requests have one number; the identity of the instance is looked up before its equality."""
        request = job.request
        known = self._requests_by_id.get(id(request))
        if known is not None and known[1] is request:
            return (int(job.priority), known[0])
        number = self._request_numbers.setdefault(request, len(self._request_numbers))
        self._requests_by_id[id(request)] = (number, request)
        return (int(job.priority), number)

    # -- what runs ---------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """An attempt holds its devices from now on; its job is taken out of the queue."""
        self.withdraw(attempt.job.id)
        self._begin(attempt)

    def _begin(self, attempt: Attempt) -> None:
        self.running[attempt.id] = attempt
        self.by_pool[attempt.pool][attempt.id] = attempt
        if attempt.workers < attempt.job.request.workers:
            self.shrunken[attempt.pool].add(attempt.id)
        self.pools[attempt.pool].take(attempt.placement)
        self._count_attempt(attempt, 1)

    def end(self, attempt_id: int) -> None:
        attempt = self.running.pop(attempt_id)
        del self.by_pool[attempt.pool][attempt_id]
        self.shrunken[attempt.pool].discard(attempt_id)
        self.pools[attempt.pool].give_back(attempt.placement)
        self._count_attempt(attempt, -1)
        self.growable_since.pop(attempt_id, None)
        self.footprints.pop(attempt_id, None)

    def update_attempt(self, attempt: Attempt) -> None:
        """A checkpoint, or told to stop: everything but its placement may have changed."""
        self._count_attempt(self.running[attempt.id], -1)
        self.running[attempt.id] = self.by_pool[attempt.pool][attempt.id] = attempt
        self._count_attempt(attempt, 1)

    def _count_attempt(self, attempt: Attempt, sign: int) -> None:
        held = self.held[attempt.pool]
        amount = 0
        for slot in attempt.placement:
            amount += slot.devices.bit_count() * slot.share
        amount *= sign
        stopping = attempt.state is AttemptState.STOPPING
        fragile = not attempt.job.request.interruptible
        counted = held.stopping if stopping else held.allocated
        leaf = self.leaf(attempt.job)
        if not fragile and not stopping:
            key = (leaf, int(attempt.job.priority))
            table = self.preemptible[attempt.pool]
            table[key] = table.get(key, 0) + sign
        for team in self.teams.path[leaf]:
            counted[team] += amount
            if fragile:
                held.fragile[team] += amount

    # -- capacity kept by eviction plans ---------------------------------------------------------------------------

    def hold(self, hold: Hold) -> None:
        """Keep capacity for a job; replaces an older hold of it. A job that is moved, shrunk or grown is still
        running then: its hold waits for it to come back to the queue."""
        job = self.jobs.get(hold.job)
        if job is not None:
            self.withdraw(hold.job)
            self.jobs[hold.job] = job
        else:
            job = next(attempt.job for attempt in self.by_pool[hold.pool].values() if attempt.job.id == hold.job)
            old = self.holds.pop(hold.job, None)
            if old is not None:
                self._drop_hold(old, self._hold_jobs[hold.job])
        self._add_hold(hold, job)

    def release(self, job_id: int) -> None:
        """Give a hold up; the job goes on waiting."""
        hold = self.holds.pop(job_id, None)
        if hold is None:
            return
        self._drop_hold(hold, self._hold_jobs[job_id])
        job = self.jobs.get(job_id)
        if job is None:
            return
        if self._startable(job):
            self._enqueue(job)
        else:
            self._park(job)

    def _add_hold(self, hold: Hold, job: Job) -> None:
        self.holds[hold.job] = hold
        self._hold_jobs[hold.job] = job
        self.pools[hold.pool].hold(hold.placement)
        self._count_hold(hold, job, 1)

    def _drop_hold(self, hold: Hold, job: Job) -> None:
        del self._hold_jobs[hold.job]
        self.pools[hold.pool].unhold(hold.placement)
        self._count_hold(hold, job, -1)

    def _count_hold(self, hold: Hold, job: Job, sign: int) -> None:
        held = self.held[hold.pool]
        amount = sign * sum(slot.devices.bit_count() * slot.share for slot in hold.placement)
        for team in self.teams.path[self.leaf(job)]:
            held.allocated[team] += amount
            if not job.request.interruptible:
                held.fragile[team] += amount

    # -- hardware and settings -------------------------------------------------------------------------------------

    def set_node(self, node: Node) -> None:
        self._all_up.pop(node.pool, None)
        self.pools[node.pool].set_node(node)

    def set_cluster(self, cluster: Cluster) -> None:
        self.clusters[cluster.id] = cluster
        for state in self.pools.values():
            if state.pool.cluster == cluster.id:
                state.set_reachable(reachable=cluster.reachable)

    def set_quota(self, team: int, pool: int, quota: Quota) -> None:
        self.teams.set_quota(team, pool, quota)

    def set_windows(self, windows: Iterable[Window]) -> None:
        self.windows = tuple(sorted(windows, key=lambda window: window.id))

    def usable_total(self, pool: int) -> int:
        """Capacity for the fair share (4.1): devices on nodes that are not down and not in maintenance now.

        Drained nodes count while attempts finish on them only as far as they are occupied.
        """
        state = self.pools[pool]
        closed = 0
        for window in self.windows:
            if window.kind is WindowKind.MAINTENANCE and window.begins <= self.now < window.ends:
                for number in window.nodes:
                    if number in state.index:
                        closed |= 1 << state.index[number]
        if pool not in self._all_up:
            up = all(node.state is NodeState.UP for node in state.nodes)
            self._all_up[pool] = sum(mask.bit_count() for mask in state.whole) if up else None
        everything = self._all_up[pool]
        if everything is not None and not closed:
            return everything * 1_000_000
        total = 0
        for position, node in enumerate(state.nodes):
            if (state.down | closed) >> position & 1:
                continue
            if node.state is NodeState.UP:
                total += state.whole[position].bit_count()
            else:
                total += state.occupied[position].bit_count()
        return total * 1_000_000
