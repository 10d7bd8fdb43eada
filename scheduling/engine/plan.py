"""One cycle: a snapshot in, a plan out, the same plan every time.

The order of a cycle: windows that fall due, capacity held by earlier eviction plans, then job after job in the order of
4.2 — start it, else start it smaller, else evict for it, else reserve for it — and last what may grow back.
"""

from __future__ import annotations

from scheduling.engine.backfill import (
    earliest,
    filler_until,
    filler_view,
    fillers_on,
    promise_for,
    strict_view,
    window_promises,
    yields_to,
)
from scheduling.engine.decisions import EvictionReason, NewHold, Plan, Reserve, ShareRow, Start
from scheduling.engine.discipline import in_line
from scheduling.engine.elastic import consolidate, grow
from scheduling.engine.explain import Explainer
from scheduling.engine.ordering import Candidate, Turns
from scheduling.engine.placement import place, whole_view, workers_that_fit
from scheduling.engine.pool import positions
from scheduling.engine.reclaim import FRUITLESS_SEARCHES, SEARCHES, Claim, Victims, evict, plan_eviction
from scheduling.engine.snapshot import GPU, AttemptState, Discipline, Hold, Job, Placement, Snapshot
from scheduling.engine.state import State, WaitClass
from scheduling.engine.work import (
    Work,
    amount_of,
    avoid_bits,
    elastic_sizes,
    gang_over_guarantee,
    may_borrow,
    may_start,
    over_guarantee,
    over_limit,
    placement_amount,
)


def plan(snapshot: Snapshot, *, explain: bool = True) -> Plan:
    """Decide one cycle. Pure: the same snapshot gives the same plan, in whatever order its rows come.

    ``explain=False`` leaves out what only people read (``blocked``, ``shares``, reservations that matter to nobody).
    Raises ``state.UnknownTeam`` for a job of a team that the snapshot does not have.
    """
    return plan_state(State.of(snapshot), explain=explain)


def plan_state(state: State, *, explain: bool = True) -> Plan:
    """As ``plan`` on a state kept ready; leaves it as it was."""
    work = Work.on(state)
    window_promises(work)
    explainer = Explainer(work) if explain else None
    if state.policy.discipline in (Discipline.FIFO, Discipline.SHORTEST):
        in_line(work)
        growable: dict[int, float] = {}
    else:
        cycle = _Cycle(work, explainer)
        cycle.make_way_for_windows()
        cycle.take_up_holds()
        cycle.go_down_the_queue()
        growable = grow(work, cycle.contested())
    if state.due:
        work.wake(state.due[0][0])
    return Plan(
        now=state.now,
        starts=tuple(work.starts),
        evictions=tuple(work.evictions),
        holds=tuple(work.holds),
        released=tuple(work.released),
        reservations=tuple(work.reservations),
        blocked=explainer.blocked() if explainer is not None else (),
        shares=_share_rows(work) if explain else (),
        growable_since=growable,
        wake_at=work.wake_at,
    )


def _share_rows(work: Work) -> tuple[ShareRow, ...]:
    rows = []
    for pool in work.pools:
        held = work.state.held[pool]
        for team, row in enumerate(work.state.teams.rows):
            share, usage = work.share(pool, team), work.usage(pool, team)
            want = work.wants_of[pool][team]
            allocated = held.allocated[team] + held.stopping[team]
            if want or allocated or usage:
                rows.append(ShareRow(row.id, pool, share, allocated, held.fragile[team], want, usage))
    return tuple(rows)


class _Cycle:
    """The walk down the queue with what is known to be hopeless."""

    def __init__(self, work: Work, explainer: Explainer | None) -> None:
        self.work = work
        self.explainer = explainer
        #: (class, pool) -> walltime from which on nothing of the class can start there; 0 = nothing at all.
        self.hopeless: dict[tuple[int, int], float] = {}
        #: (class, pool) that lacks capacity only: its jobs may still get a reservation.
        self.lacks_capacity: set[tuple[int, int]] = set()
        #: (request, workers, pool) -> shortest walltime that had no placement: capacity only shrinks in a cycle.
        self.no_place: dict[tuple[int, int, int], float] = {}
        self.no_filler: dict[tuple[int, int, int], float] = {}
        #: (request, pool) that has no placement even where promises are broken.
        self.full: set[tuple[int, int]] = set()
        self.no_eviction: set[tuple[int, int]] = set()
        self.fruitless = self.found = 0
        self.victims_of: dict[int, Victims] = {}
        self.reserved = dict.fromkeys(work.pools, 0)
        self.matters: dict[int, bool] = {}
        self.waiting_for: set[int] = set()

    # -- windows and holds -------------------------------------------------------------------------------------

    def make_way_for_windows(self) -> None:
        """Interruptible work leaves the nodes of a window in time, with its grace (4.5)."""
        work = self.work
        for pool, promises in work.promises.items():
            for promise in promises:
                nodes = {work.pools[pool].nodes[p].id for p in positions(promise.nodes)}
                for number, attempt in sorted(work.state.by_pool[pool].items()):
                    request = attempt.job.request
                    if not request.interruptible or attempt.state is AttemptState.STOPPING:
                        continue
                    if number in work.evicted or not any(slot.node in nodes for slot in attempt.placement):
                        continue
                    if promise.team is not None and promise.team in work.state.teams.path[work.state.leaf(attempt.job)]:
                        continue
                    due = promise.begins - request.grace
                    if due <= work.now:
                        text = f"4.5: {promise.window} begins"
                        evict(work, attempt, EvictionReason.RESERVATION, None, because=text)
                    else:
                        work.wake(due)

    def take_up_holds(self) -> None:
        """Start what earlier eviction plans made room for; give up what has lapsed (4.8)."""
        work = self.work
        for number in sorted(work.state.holds):
            hold = work.state.holds[number]
            job = work.state.jobs.get(number)
            lapsed = hold.expires <= work.now
            if job is None:  # moved, shrunk or grown: it has not come back to the queue yet
                if lapsed:
                    work.released.append(number)
                continue
            pool = work.pools[hold.pool]
            if lapsed or not self._still_admitted(job, hold) or not self._reachable(hold):
                work.released.append(number)
            elif pool.ready(hold.placement):
                amount = placement_amount(hold.placement)
                pool.unhold(hold.placement)
                work.account(hold.pool, work.state.leaf(job), -amount, fragile=not job.request.interruptible)
                start = Start(
                    number, hold.pool, hold.placement, hold.workers, from_hold=True, because="4.8: capacity held for it"
                )
                work.start(job, hold.pool, hold.placement, amount, start)
            else:
                work.wake(hold.expires)

    def _reachable(self, hold: Hold) -> bool:
        pool = self.work.pools[hold.pool]
        return all(pool.usable >> pool.index[slot.node] & 1 for slot in hold.placement)

    def _still_admitted(self, job: Job, hold: Hold) -> bool:
        """Admission (4.3) once more; the hold itself is counted already."""
        work = self.work
        state = work.state
        if job.held or job.unmet or job.budget_exhausted is not None or job.unsatisfiable is not None:
            return False
        if job.backoff_until > state.now or job.not_before > state.now:
            return False
        leaf = state.leaf(job)
        held, teams = work.held[hold.pool], state.teams
        for team in teams.path[leaf]:
            bound = teams.limit[hold.pool][team]
            if bound is not None and held.allocated[team] > bound:
                return False
        return may_borrow(work, job) or over_guarantee(work, hold.pool, leaf, 0) is None

    # -- the queue ---------------------------------------------------------------------------------------------

    def go_down_the_queue(self) -> None:
        turns = Turns(self.work, self._admits)
        while (candidate := turns.next()) is not None:
            queue = turns.queues[candidate.leaf]
            if self._start(candidate):
                queue.next_job()
                turns.refresh(candidate.leaf)
                continue
            if self.explainer is not None and candidate.pool in self.work.pools:
                self.explainer.note(candidate.job, candidate.leaf, candidate.pool)
            if queue.pool_at + 1 < len(candidate.job.request.pools):
                queue.pool_at += 1
            else:
                self._blocked(candidate)
                queue.next_job()
            turns.refresh(candidate.leaf)

    def _admits(self, wait_class: WaitClass, pool: int) -> bool:
        key = (id(wait_class), pool)
        if self.hopeless.get(key) != 0:
            return True
        return key in self.lacks_capacity and self._may_reserve(pool)

    def _may_reserve(self, pool: int) -> bool:
        return self.reserved[pool] < self.work.state.policy.reservation_depth and self._reservations_matter(pool)

    def _reservations_matter(self, pool: int) -> bool:
        """Nothing is free and no filler runs: a reservation would change nothing, but people want to see it."""
        if self.explainer is not None:
            return True
        known = self.matters.get(pool)
        if known is None:
            state = self.work.pools[pool]
            free = any(nodes & state.usable for nodes in state.buckets[1:]) or bool(state.partial)
            known = free or bool(self.work.fillers(pool))
            self.matters[pool] = known
        return known

    def _start(self, candidate: Candidate) -> bool:
        """Start it, whole or smaller, or evict for it. False = blocked in this pool."""
        work, job, number = self.work, candidate.job, candidate.pool
        key = (id(candidate.wait_class), number)
        pool = work.pools.get(number)
        if pool is None or not pool.reachable or pool.amount(job.request) is None:
            self.hopeless[key] = 0.0
            return False
        known = self.hopeless.get(key)
        if known is not None and work.walltime(job, number) >= known:
            return False
        amount = amount_of(pool, job.request)
        if may_start(work, job, number, amount):
            if self._start_with(candidate, job.request.workers, amount):
                return True
            if self._start_smaller(candidate):
                return True
            if self._make_room(candidate, amount):
                return True
            self._note_hopeless(candidate, key)
            return False
        if self._start_smaller(candidate):
            return True
        if over_limit(work, number, candidate.leaf, amount) is not None:
            if self._make_room(candidate, amount):
                return True
        elif self._lacks_hardware_first(candidate):
            self._note_hopeless(candidate, key)
            return False
        if work.state.policy.fragile_borrowing is None or job.request.interruptible:
            self.hopeless[key] = 0.0
        return False

    def _lacks_hardware_first(self, candidate: Candidate) -> bool:
        """A fragile gang over its guarantee only because its own team still holds the GPUs it waits for."""
        work, job, number = self.work, candidate.job, candidate.pool
        request = job.request
        view = strict_view(work, job, number)
        if place(view, request, request.workers, work.gradient(number)) is not None:
            return False
        placeable = workers_that_fit(view, request.gpus, view.allowed) if request.gpus else 0
        return gang_over_guarantee(work, job, number, candidate.leaf, placeable) is None

    def _start_with(self, candidate: Candidate, workers: int, amount: int) -> bool:
        work, job, number = self.work, candidate.job, candidate.pool
        pool = work.pools[number]
        avoid = avoid_bits(pool, job) if job.avoid else 0
        gradient = work.gradient(number)
        walltime = work.walltime(job, number)
        key = (candidate.wait_class.key[1], workers, number)
        too_long = self.no_place.get(key)
        if too_long is None or walltime < too_long:
            placement = place(strict_view(work, job, number), job.request, workers, gradient, avoid=avoid)
            if placement is not None:
                self._record(candidate, placement, workers, amount, None)
                return True
            if self._same_for_all_teams(number):
                self.no_place[key] = walltime
        if not job.request.interruptible or not work.promises[number]:
            return False
        too_long = self.no_filler.get(key)
        if too_long is not None and walltime >= too_long:
            return False
        placement = place(filler_view(work, job, number), job.request, workers, gradient, avoid=avoid)
        if placement is None:
            if self._same_for_all_teams(number):
                self.no_filler[key] = walltime
            return False
        until = filler_until(work, job, number, placement)
        self._record(candidate, placement, workers, amount, until)
        return True

    def _same_for_all_teams(self, pool: int) -> bool:
        """What does not fit for one team fits for none, unless a window lets one team in."""
        return all(promise.team is None for promise in self.work.promises[pool])

    def _record(
        self, candidate: Candidate, placement: Placement, workers: int, amount: int, until: float | None
    ) -> None:
        work, job, pool = self.work, candidate.job, candidate.pool
        leaf = candidate.leaf
        held = work.held[pool].allocated[leaf]
        because = ""
        if self.explainer is not None:
            because = (
                f"4.2: team {work.state.teams.names[leaf]} holds {held / GPU:g} of guarantee "
                f"{work.state.teams.guaranteed[pool][leaf] / GPU:g}, fair share {work.share(pool, leaf) / GPU:.3f}"
            )
        start = Start(job.id, pool, placement, workers, until is not None, until, because=because)
        if until is not None:
            work.wake(until - job.request.grace)
        work.start(job, pool, placement, amount, start)

    def _start_smaller(self, candidate: Candidate) -> bool:
        """Elastic: as many workers as fit and are admitted, at least ``min_workers`` (4.11)."""
        request = candidate.job.request
        if not request.elastic:
            return False
        pool = self.work.pools[candidate.pool]
        for workers in elastic_sizes(request):
            amount = amount_of(pool, request, workers)
            if may_start(self.work, candidate.job, candidate.pool, amount) and self._start_with(
                candidate, workers, amount
            ):
                return True
        return False

    def _make_room(self, candidate: Candidate, amount: int) -> bool:
        """Reclaim, preempt or move others for it (4.6, 4.7, 4.9)."""
        work, number = self.work, candidate.pool
        key = (id(candidate.wait_class), number)
        if key in self.no_eviction or self.fruitless >= FRUITLESS_SEARCHES or self.found >= SEARCHES:
            return False
        request, job = candidate.job.request, candidate.job
        claim = Claim(work, job, number, amount)
        smaller = None
        if request.elastic:
            smaller = Claim(work, job, number, amount_of(work.pools[number], request, request.min_workers))
        if not claim.possible() and not (smaller and smaller.possible()) and not self._may_consolidate(candidate):
            self.no_eviction.add(key)
            return False
        victims = self._victims(number)
        if victims.rows:
            if plan_eviction(work, claim, request.workers, victims):
                self.matters[number] = True
                self.found += 1
                return True
            if smaller is not None and plan_eviction(work, smaller, request.min_workers, victims):
                self.matters[number] = True
                self.found += 1
                return True
            if may_start(work, job, number, amount) and consolidate(work, job, number, victims):
                return True
            self.fruitless += 1
        if victims.ripe_at is not None:
            work.wake(victims.ripe_at)
        self.no_eviction.add(key)
        return False

    def _may_consolidate(self, candidate: Candidate) -> bool:
        """Enough is free in total, only not on one node (4.9)."""
        request = candidate.job.request
        if not request.gpus or request.workers > 1:
            return False
        return whole_view(self.work.pools[candidate.pool]).free_devices() >= request.gpus

    def _victims(self, pool: int) -> Victims:
        victims = self.victims_of.get(pool)
        if victims is None:
            victims = self.victims_of[pool] = Victims.of(self.work, pool)
        return victims

    def _note_hopeless(self, candidate: Candidate, key: tuple[int, int]) -> None:
        """No placement: for the whole class, unless only a promise is in the way of so long a job."""
        work, job, number = self.work, candidate.job, candidate.pool
        self.lacks_capacity.add(key)
        self.waiting_for.add(number)
        if job.request.interruptible or not work.promises[number]:
            self.hopeless[key] = 0.0
            return
        request = job.request
        shape = (candidate.wait_class.key[1], number)
        walltime = work.walltime(job, number)
        self.hopeless[key] = 0.0
        if shape in self.full:
            return
        if place(whole_view(work.pools[number]), request, request.min_workers, work.gradient(number)) is None:
            self.full.add(shape)
        elif any(work.walltime(row[2], number) < walltime for row in candidate.wait_class.jobs):
            self.hopeless[key] = walltime

    # -- reservations ------------------------------------------------------------------------------------------

    def _blocked(self, candidate: Candidate) -> None:
        """Nothing to start on: a reservation at the earliest time, if it is among the first of a pool (4.5)."""
        work, job = self.work, candidate.job
        best: tuple[float, int, Placement] | None = None
        for pool in job.request.pools:
            if (id(candidate.wait_class), pool) not in self.lacks_capacity or not self._may_reserve(pool):
                continue
            found = earliest(work, job, pool)
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], pool, found[1])
        if best is None:
            return
        at, pool, placement = best
        self.reserved[pool] += 1
        work.reservations.append(Reserve(job.id, pool, placement, at))
        if not self._call_in(job, pool, placement, at):
            work.promises[pool].append(promise_for(work, job, pool, placement, at))

    def _call_in(self, job: Job, pool: int, placement: Placement, at: float) -> bool:
        """Fillers on reserved devices leave in time; the devices are then held for the job."""
        work = self.work
        fillers = [
            attempt
            for attempt in fillers_on(work, pool, placement)
            if yields_to(attempt, job) and attempt.id not in work.evicted and attempt.state is not AttemptState.STOPPING
        ]
        leaving = [attempt for attempt in fillers if at - attempt.job.request.grace <= work.now]
        for attempt in fillers:
            work.wake(at - attempt.job.request.grace)
        if not leaving:
            return False
        for attempt in leaving:
            text = f"4.5: reserved for job {job.name}"
            evict(work, attempt, EvictionReason.RESERVATION, job.id, because=text)
        grace = max(attempt.job.request.grace for attempt in leaving)
        expires = max(at, work.now + grace) + work.state.policy.plan_timeout
        numbers = tuple(attempt.id for attempt in leaving)
        work.hold(job, NewHold(job.id, pool, placement, expires, numbers, job.request.workers))
        work.wake(expires)
        return True

    def contested(self) -> set[int]:
        """Pools for which somebody waits who could use free GPUs."""
        return set(self.waiting_for)
