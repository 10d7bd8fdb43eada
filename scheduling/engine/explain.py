"""Why each job waits (4.12): all blockers in the order of their codes, with numbers, and what would help.

Worked out on what a cycle leaves behind. Hardware is judged once per request and pool, claims once per team and
amount, and jobs of a class share one tuple, so a long queue costs little more than a short one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduling.engine.backfill import conflicts, strict_view, without
from scheduling.engine.decisions import CODE_ORDER, Blocked, Blocker, Code, NewHold, Remedy
from scheduling.engine.placement import View, place, scopes, whole_view, workers_that_fit
from scheduling.engine.pool import PoolState
from scheduling.engine.snapshot import GPU, Job, Request
from scheduling.engine.state import WaitClass
from scheduling.engine.work import (
    Promise,
    Work,
    gang_over_guarantee,
    may_borrow,
    over_guarantee,
    over_limit,
    ratio,
)


@dataclass(slots=True)
class _Hardware:
    """What one request meets in one pool."""

    blockers: tuple[Blocker, ...]
    #: Whole workers that could start now, by placement alone.
    workers: int
    #: Largest number of GPUs one worker could have now.
    largest: int
    fits: bool


class Explainer:
    """Takes down why a class was blocked when its turn came, and tells every job in the end."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.started: set[int] = set()
        self.held: dict[int, NewHold] = {}
        #: (leaf, request number, priority, walltime that matters, pool) -> blockers met there at its turn.
        self._seen: dict[tuple[int, int, int, float, int], tuple[Blocker, ...]] = {}
        self._hardware: dict[tuple[int, int, float, int], tuple[int, _Hardware]] = {}
        self._fits_before: dict[tuple[int, int], bool] = {}
        self._free_before: dict[int, int] = {}
        #: Every ``_Hardware`` of the cycle: blockers are told apart by identity.
        self._kept: list[_Hardware] = []
        self._with_remedy: dict[tuple[int, Remedy | None], Blocker] = {}
        self._shared: dict[tuple[int, int, int, float], tuple[Blocker, ...]] = {}
        #: By request number (``State.class_key``), as all tables of requests here.
        self._impossible: dict[int, str | None] = {}
        self._impossible_in: dict[tuple[int, int], bool] = {}
        self._other_pools: dict[int, int | None] = {}

    def note(self, job: Job, leaf: int, pool: int) -> None:
        """A job is blocked in a pool, now that it is its turn."""
        key = (*self._class_key(job, leaf), pool)
        if key not in self._seen:
            self._seen[key] = tuple(self._in_pool(job, leaf, self.work.pools[pool]))

    def blocked(self) -> tuple[Blocked, ...]:
        """One entry per waiting job that this cycle does not start, in the order of the queue."""
        self.started = {start.job for start in self.work.starts}
        self.held = {hold.job: hold for hold in self.work.holds}
        return tuple(self._run())

    def _class_key(self, job: Job, leaf: int) -> tuple[int, int, int, float]:
        """What jobs have in common that are blocked alike: a shorter one that may not be interrupted can fare
        otherwise than a longer one, where promises are about or ``fragile_borrowing`` is set."""
        walltime = 0.0
        if not job.request.interruptible:
            walltime = job.walltime if job.walltime is not None else -1.0
        return (leaf, self.work.state.class_key(job)[1], int(job.priority), walltime)

    def _run(self) -> Iterator[Blocked]:
        state = self.work.state
        position = 0
        for leaf in self._leaves_in_order():
            rows: list[tuple[int, float, int, tuple[Blocker, ...]]] = []
            for group in state.queues.get(leaf, {}).values():
                rows += self._group(group, leaf)
            rows.sort()
            for _, _, number, blockers in rows:
                position += 1
                yield Blocked(number, position, blockers)
        for number in sorted({*state.parked, *state.holds}):
            job = state.jobs.get(number)
            if job is not None and number not in self.started:
                position += 1
                yield Blocked(number, position, self._blockers(job, state.leaf(job)))

    def _group(self, group: WaitClass, leaf: int) -> Iterator[tuple[int, float, int, tuple[Blocker, ...]]]:
        """(order of 4.2, id, blockers) of the jobs of one class; without an own reason they share one tuple."""
        started, held, priority = self.started, self.held, -group.priority
        impossible = self._never(group.jobs[0][2]) is not None
        interruptible = group.request.interruptible
        shared: dict[float | None, tuple[Blocker, ...]] = {}
        for submitted, number, job in group.jobs:
            if number in started:
                continue
            if impossible or number in held:
                yield (priority, submitted, number, self._blockers(job, leaf))
                continue
            walltime = None if interruptible else job.walltime
            blockers = shared.get(walltime)
            if blockers is None:
                blockers = shared[walltime] = self._blockers(job, leaf)
            yield (priority, submitted, number, blockers)

    def _leaves_in_order(self) -> list[int]:
        """Leaves in the order of 4.2 as the cycle leaves them."""
        teams = self.work.state.teams
        pools = sorted(self.work.pools)

        def key(team: int) -> tuple[float, str]:
            ratios = [
                ratio(self.work.held[p].allocated[team], self.work.share(p, team))
                for p in pools
                if self.work.wants_of_team(p, team)
            ]
            return (min(ratios, default=0.0), teams.names[team])

        order: list[int] = []

        def walk(siblings: list[int]) -> None:
            for team in sorted(siblings, key=key):
                if teams.children[team]:
                    walk(teams.children[team])
                else:
                    order.append(team)

        walk(teams.roots)
        return order

    # -- one job -----------------------------------------------------------------------------------------------

    def _blockers(self, job: Job, leaf: int) -> tuple[Blocker, ...]:
        impossible = job.unsatisfiable or self._never(job)
        own = self._own(job, impossible)
        if impossible is not None:
            return own
        hold = self.held.get(job.id) or self.work.state.holds.get(job.id)
        if hold is not None and job.id not in self.work.released:
            waiting = Blocker(Code.AWAITING_EVICTION, pool=hold.pool, job=job.id, until=hold.expires)
            return (*own, waiting)
        key = self._class_key(job, leaf)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = self._class_blockers(job, leaf)
        return (*own, *shared) if own else shared

    def _own(self, job: Job, impossible: str | None) -> tuple[Blocker, ...]:
        """Blockers that are this job's alone."""
        now = self.work.now
        found = []
        if impossible is not None:
            found.append(Blocker(Code.UNSATISFIABLE, detail=impossible))
        if job.held:
            found.append(Blocker(Code.HELD))
        if job.unmet:
            found.append(Blocker(Code.DEPENDENCY, detail=", ".join(job.unmet)))
        if job.not_before > now:
            found.append(Blocker(Code.NOT_BEFORE, until=job.not_before))
        if job.backoff_until > now:
            found.append(Blocker(Code.BACKOFF, until=job.backoff_until))
        if job.budget_exhausted is not None:
            found.append(Blocker(Code.BUDGET_EXHAUSTED, detail=job.budget_exhausted))
        return tuple(found)

    def _never(self, job: Job) -> str | None:
        """In words why no hardware of the installation could ever run it (4.12), else ``None``."""
        number = self.work.state.class_key(job)[1]
        if number not in self._impossible:
            self._impossible[number] = never(self.work.pools, job.request)
        return self._impossible[number]

    def _never_here(self, job: Job, pool: PoolState) -> bool:
        key = (self.work.state.class_key(job)[1], pool.pool.id)
        if key not in self._impossible_in:
            self._impossible_in[key] = never({pool.pool.id: pool}, job.request) is not None
        return self._impossible_in[key]

    # -- one class ---------------------------------------------------------------------------------------------

    def _class_blockers(self, job: Job, leaf: int) -> tuple[Blocker, ...]:
        found: list[tuple[int, int, Blocker]] = []
        for rank, number in enumerate(job.request.pools):
            pool = self.work.pools.get(number)
            if pool is None or self._never_here(job, pool):
                continue
            met = self._seen.get((*self._class_key(job, leaf), number))
            for blocker in self._in_pool(job, leaf, pool) if met is None else met:
                found.append((CODE_ORDER[blocker.code], rank, blocker))
        found.sort(key=lambda row: row[:2])
        return tuple(blocker for _, _, blocker in found)

    def _in_pool(self, job: Job, leaf: int, pool: PoolState) -> Iterator[Blocker]:
        work, number = self.work, pool.pool.id
        amount = pool.amount(job.request) or 0
        hardware = self._on_hardware(job, pool)
        yield from self._claims(job, leaf, pool, amount, hardware)
        if not pool.reachable:
            cluster = work.state.clusters[pool.pool.cluster]
            yield Blocker(
                Code.CLUSTER_UNAVAILABLE, pool=number, detail=cluster.name, remedy=self._other_pool(job, leaf)
            )
            return
        started = work.started_in[number]
        if not hardware.fits and len(started) > (leaf in started) and self._fitted_before(job, number):
            yield Blocker(Code.FAIR_SHARE, pool=number, asked=amount, free=self._free_when_it_began(number))
        for blocker in hardware.blockers:
            yield self._remedied(blocker, self._capacity_remedy(job, leaf, pool, blocker, hardware))

    def _free_when_it_began(self, pool: int) -> int:
        free = self._free_before.get(pool)
        if free is None:
            free = self._free_before[pool] = whole_view(self.work.state.pools[pool]).free_devices() * GPU
        return free

    def _remedied(self, blocker: Blocker, remedy: Remedy | None) -> Blocker:
        """One object for all jobs that meet the same; ``blocker`` belongs to a ``_Hardware`` that is kept."""
        key = (id(blocker), remedy)
        known = self._with_remedy.get(key)
        if known is None:
            known = self._with_remedy[key] = replace(blocker, remedy=remedy)
        return known

    def _claims(self, job: Job, leaf: int, pool: PoolState, amount: int, hardware: _Hardware) -> Iterator[Blocker]:
        work, number = self.work, pool.pool.id
        held, teams = work.held[number], work.state.teams
        team = over_limit(work, number, leaf, amount)
        if team is not None:
            bound = teams.limit[number][team] or 0
            in_use = held.allocated[team] + held.stopping[team]
            yield Blocker(
                Code.LIMIT,
                pool=number,
                team=teams.rows[team].id,
                limit=bound,
                in_use=in_use,
                asked=amount,
                remedy=self._smaller(job, bound - in_use, hardware) or self._other_pool(job, leaf),
            )
        if not may_borrow(work, job):
            if hardware.fits:
                team = over_guarantee(work, number, leaf, amount)
            else:
                team = gang_over_guarantee(work, job, number, leaf, hardware.workers)
            if team is not None:
                guaranteed = teams.guaranteed[number][team]
                remedy = Remedy("interruptible") if hardware.fits else None
                yield Blocker(
                    Code.GUARANTEE,
                    pool=number,
                    team=teams.rows[team].id,
                    limit=guaranteed,
                    in_use=held.fragile[team],
                    asked=amount,
                    remedy=remedy or self._smaller(job, guaranteed - held.fragile[team], hardware),
                )

    # -- hardware ----------------------------------------------------------------------------------------------

    def _on_hardware(self, job: Job, pool: PoolState) -> _Hardware:
        number = pool.pool.id
        matters = bool(self.work.promises[number])
        # A window reserved for a team makes the same request fare differently in different teams.
        leaf = self.work.state.leaf(job) if any(p.team is not None for p in self.work.promises[number]) else -1
        walltime = self.work.walltime(job, number) if matters else 0.0
        key = (self.work.state.class_key(job)[1], number, walltime, leaf)
        version = self.work.version[number]
        known = self._hardware.get(key)
        # What did not fit earlier in the cycle does not fit later: capacity only shrinks.
        if known is None or (known[1].fits and known[0] != version):
            known = self._hardware[key] = (version, self._look(job, pool))
            self._kept.append(known[1])
        return known[1]

    def _look(self, job: Job, pool: PoolState) -> _Hardware:
        work, number, request = self.work, pool.pool.id, job.request
        view = strict_view(work, job, number)
        gradient = work.gradient(number)
        least = request.min_workers
        if place(view, request, least, gradient) is not None:
            return _Hardware((), request.workers, view.largest_block(), fits=True)
        workers = 0
        if request.gpus:
            workers = workers_that_fit(view, request.gpus, view.allowed)
        everything = whole_view(pool)
        if place(everything, request, least, gradient) is not None:
            blockers = tuple(self._promised(job, pool))
        else:
            blockers = (self._short_of(job, pool, everything),)
        return _Hardware(blockers, workers, view.largest_block(), fits=False)

    def _short_of(self, job: Job, pool: PoolState, view: View) -> Blocker:
        request, number = job.request, pool.pool.id
        asked = pool.amount(request, request.min_workers) or 0
        free = view.free_devices() * GPU
        if not request.gpus:
            free += sum(left for left, position, _ in pool.partial if view.allowed >> position & 1)
        if asked > free or not view.allowed:
            return Blocker(Code.NO_CAPACITY, pool=number, asked=asked, free=free)
        if request.required and request.level is not None:
            anywhere = replace(request, required=False, level=None)
            if place(view, anywhere, request.min_workers, self.work.gradient(number)) is not None:
                most = max(
                    (
                        workers_that_fit(view, request.gpus, domain & view.allowed)
                        for domains in scopes(pool, request)
                        for domain in domains
                    ),
                    default=view.largest_block() // request.gpus,
                )
                largest = most * request.gpus * GPU
                return Blocker(Code.TOPOLOGY, pool=number, asked=asked, free=free, largest=largest, level=request.level)
        largest = view.largest_block() * GPU
        if not request.gpus and pool.partial:
            largest = max(largest, pool.partial[-1][0])
        return Blocker(Code.FRAGMENTED, pool=number, asked=asked, free=free, largest=largest)

    def _promised(self, job: Job, pool: PoolState) -> Iterator[Blocker]:
        """Free devices are there, but promised: to whom, and until when."""
        work, number = self.work, pool.pool.id
        ends = work.now + work.walltime(job, number)
        kept = conflicts(work, job, number, work.now, ends)
        windows = [promise for promise in kept if promise.window is not None]
        others = [promise for promise in kept if promise.window is None]
        told = False
        for promises, code in ((others, Code.RESERVED), (windows, Code.MAINTENANCE)):
            if promises and not self._fits_beside(job, number, promises):
                told = True
                yield self._promise_blocker(code, number, promises)
        if not told:
            for promises, code in ((others, Code.RESERVED), (windows, Code.MAINTENANCE)):
                if promises:
                    yield self._promise_blocker(code, number, promises)

    def _promise_blocker(self, code: Code, pool: int, promises: list[Promise]) -> Blocker:
        first = min(promises, key=lambda promise: (promise.begins, promise.job or 0))
        remedy = None
        if first.begins > self.work.now:
            remedy = Remedy("shorter-walltime", value=first.begins - self.work.now)
        return Blocker(code, pool=pool, job=first.job, until=first.ends, detail=first.window or "", remedy=remedy)

    def _fits_beside(self, job: Job, pool: int, promises: list[Promise]) -> bool:
        view = without(self.work, pool, promises)
        return place(view, job.request, job.request.min_workers, self.work.gradient(pool)) is not None

    def _fitted_before(self, job: Job, pool: int) -> bool:
        """Whether it would have had a placement when the cycle began."""
        key = (self.work.state.class_key(job)[1], pool)
        known = self._fits_before.get(key)
        if known is None:
            view = whole_view(self.work.state.pools[pool])
            request = job.request
            found = place(view, request, request.min_workers, self.work.gradient(pool))
            known = self._fits_before[key] = found is not None
        return known

    # -- what would help ---------------------------------------------------------------------------------------

    def _smaller(self, job: Job, room: int, hardware: _Hardware) -> Remedy | None:
        """Fewer workers or GPUs that both the claim and the hardware have room for."""
        request = job.request
        if not request.gpus or room < GPU:
            return None
        workers = min(room // (request.gpus * GPU), request.workers - 1)
        if hardware.fits and workers >= 1:
            return Remedy("fewer-workers", value=float(workers))
        devices = min(room // GPU, hardware.largest, request.gpus - 1)
        if request.workers == 1 and devices >= 1:
            return Remedy("fewer-gpus", value=float(devices * GPU))
        return None

    def _capacity_remedy(
        self, job: Job, leaf: int, pool: PoolState, blocker: Blocker, hardware: _Hardware
    ) -> Remedy | None:
        work, number, request = self.work, pool.pool.id, job.request
        if blocker.remedy is not None:
            return blocker.remedy if blocker.remedy.value is None or blocker.remedy.value >= 60 else None
        if blocker.code is Code.TOPOLOGY:
            return Remedy("drop-topology")
        other = self._other_pool(job, leaf)
        if other is not None:
            return other
        if blocker.code in (Code.NO_CAPACITY, Code.FRAGMENTED) and request.gpus:
            workers = min(hardware.workers, request.workers - 1)
            if workers >= 1 and not request.required and self._allowed(job, leaf, pool, workers):
                return Remedy("fewer-workers", value=float(workers))
            devices = min(hardware.largest, request.gpus - 1)
            if request.workers == 1 and devices >= 1:
                amount = devices * GPU
                if over_limit(work, number, leaf, amount) is None and (
                    may_borrow(work, job) or over_guarantee(work, number, leaf, amount) is None
                ):
                    return Remedy("fewer-gpus", value=float(amount))
        return None

    def _allowed(self, job: Job, leaf: int, pool: PoolState, workers: int) -> bool:
        amount = pool.amount(job.request, workers) or 0
        number = pool.pool.id
        if over_limit(self.work, number, leaf, amount) is not None:
            return False
        return may_borrow(self.work, job) or over_guarantee(self.work, number, leaf, amount) is None

    def _other_pool(self, job: Job, leaf: int) -> Remedy | None:
        """A pool it does not accept so far in which it could start now."""
        if len(self.work.pools) == 1:
            return None
        key = self.work.state.class_key(job)[1]
        if key not in self._other_pools:
            self._other_pools[key] = self._find_other_pool(job)
        number = self._other_pools[key]
        if number is None or not self._allowed(job, leaf, self.work.pools[number], job.request.workers):
            return None
        return Remedy("other-pool", pool=number)

    def _find_other_pool(self, job: Job) -> int | None:
        for number, pool in sorted(self.work.pools.items()):
            if number in job.request.pools or not pool.reachable or pool.amount(job.request) is None:
                continue
            view = strict_view(self.work, job, number)
            if place(view, job.request, job.request.workers, self.work.gradient(number)) is not None:
                return number
        return None


def never(pools: dict[int, PoolState], request: Request) -> str | None:
    """Why no hardware in ``pools`` that a request accepts could ever run it; ``None`` if some could."""
    reasons = []
    for number in request.pools:
        pool = pools.get(number)
        if pool is None:
            if len(pools) > 1 or not pools:
                reasons.append(f"pool {number} is not known")
            continue
        reason = _never_in(pool, request)
        if reason is None:
            return None
        reasons.append(f"{pool.pool.name}: {reason}")
    return "; ".join(reasons) or "it accepts no pool"


def _never_in(pool: PoolState, request: Request) -> str | None:
    if not pool.nodes:
        return "the pool has no nodes"
    if not request.gpus:
        if pool.amount(request) is None:
            return "no device has that much memory"
        return None if pool.shareable else "no node shares its GPUs"
    sizes = [mask.bit_count() for mask in pool.whole]
    largest = max(node.gpus for node in pool.nodes)
    if request.gpus > largest:
        return f"a worker asks for {request.gpus} GPUs, the largest node has {largest}"
    workers = sum(max(size, node.gpus) // request.gpus for size, node in zip(sizes, pool.nodes, strict=True))
    if request.min_workers > workers:
        return (
            f"{request.min_workers} workers with {request.gpus} GPUs each were asked for, "
            f"the whole pool has room for {workers}"
        )
    if request.required and request.level is not None:
        most = _most_in_one_domain(pool, request)
        if request.min_workers > most:
            return f"no {request.level} has room for more than {most} of {request.min_workers} workers"
    return None


def _most_in_one_domain(pool: PoolState, request: Request) -> int:
    fit = [node.gpus // request.gpus for node in pool.nodes]
    if request.level not in pool.levels:
        return max(fit, default=0) if request.level == "node" else 0
    domains = pool.domains[pool.levels.index(request.level)].values()
    return max((sum(n for p, n in enumerate(fit) if domain >> p & 1) for domain in domains), default=0)
