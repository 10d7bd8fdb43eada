"""Reservations, backfill and fillers (4.5), and the windows that are treated the same way.

A promise is a set of devices that belongs to somebody from an instant on. Who starts now may use a device only if it
ends before every promise on that device begins; interruptible work may use it until then, as a filler.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduling.engine.placement import Reduction, View, place, reduced_view, whole_view, workers_that_fit
from scheduling.engine.snapshot import GPU, Attempt, AttemptState, Job, Placement, Request, Slot, WindowKind
from scheduling.engine.work import Promise, Work, amount_of, avoid_bits, may_borrow, placement_amount

#: An attempt past its walltime is reckoned to end this many seconds from now.
OVERDUE = 60.0

#: How many instants at which enough is free one search for a reservation tries against the promises.
SEARCH_STEPS = 64


def window_promises(work: Work) -> None:
    """Windows that are not over yet, as promises of the pools they touch; wakes at their edges."""
    for window in work.state.windows:
        if window.ends <= work.now:
            continue
        work.wake(window.begins)
        work.wake(window.ends)
        team = None
        if window.kind is WindowKind.RESERVATION and window.team is not None:
            team = work.state.teams.index.get(window.team)
        for number, pool in work.pools.items():
            nodes = 0
            for node in window.nodes:
                if node in pool.index:
                    nodes |= 1 << pool.index[node]
            if nodes:
                work.promises[number].append(
                    Promise(window.begins, window.ends, (), nodes, window=window.name, team=team)
                )


def conflicts(work: Work, job: Job, pool: int, begins: float, ends: float) -> list[Promise]:
    """Promises of others that overlap a run of ``job`` from ``begins`` to ``ends``."""
    promises = work.promises[pool]
    if not promises:
        return []
    found = []
    path = work.state.teams.path[work.state.leaf(job)]
    for promise in promises:
        if promise.begins >= ends or promise.ends <= begins or promise.job == job.id:
            continue
        if promise.team is not None and promise.team in path and promise.begins <= begins and ends <= promise.ends:
            continue  # an advance reservation of its own team
        found.append(promise)
    return found


def taken_off(promises: Iterable[Promise]) -> tuple[dict[int, int], int]:
    """Devices by node position, and whole nodes, that promises take."""
    removed: dict[int, int] = {}
    closed = 0
    for promise in promises:
        closed |= promise.nodes
        for position, devices in promise.devices:
            removed[position] = removed.get(position, 0) | devices
    return removed, closed


def without(work: Work, pool: int, promises: Iterable[Promise], *, base: View | None = None) -> View:
    """What is left of a pool when promises are kept."""
    state = work.pools[pool]
    removed, closed = taken_off(promises)
    if not removed and not closed:
        return base or whole_view(state)
    return reduced_view(state, removed, closed, base=base)


def now_without(work: Work, pool: int, promises: list[Promise]) -> View:
    """As ``without`` for what is free now: the view for the same promises is kept and brought up to date."""
    state = work.pools[pool]
    if not promises:
        return whole_view(state)
    key = (pool, *map(id, promises))
    kept = work.reductions.get(key)
    if kept is None:
        kept = work.reductions[key] = Reduction(state, *taken_off(promises))
    return kept.view()


def strict_view(work: Work, job: Job, pool: int) -> View:
    """What ``job`` may use now without getting in the way of any promise."""
    if not work.promises[pool]:
        return whole_view(work.pools[pool])
    ends = work.now + work.walltime(job, pool)
    return now_without(work, pool, conflicts(work, job, pool, work.now, ends))


def filler_view(work: Work, job: Job, pool: int) -> View:
    """What an interruptible ``job`` may use now, to leave when a promise falls due: current windows stay closed."""
    grace = job.request.grace
    ends = work.now + work.walltime(job, pool)
    kept = [
        promise
        for promise in conflicts(work, job, pool, work.now, ends)
        if (promise.begins <= work.now + grace and promise.window is not None) or promise.begins <= work.now
    ]
    return now_without(work, pool, kept)


def filler_until(work: Work, job: Job, pool: int, placement: Placement) -> float | None:
    """When the first promise on the devices of ``placement`` falls due; ``None`` = it is on none."""
    state = work.pools[pool]
    ends = work.now + work.walltime(job, pool)
    due: float | None = None
    for promise in conflicts(work, job, pool, work.now, ends):
        devices = dict(promise.devices)
        for slot in placement:
            position = state.index[slot.node]
            if promise.nodes >> position & 1 or devices.get(position, 0) & slot.devices:
                due = promise.begins if due is None else min(due, promise.begins)
                break
    return due


def expected_end(work: Work, attempt: Attempt) -> float:
    """When its walltime ends it (4.5), at the earliest a little from now."""
    if attempt.id in work.evicted or attempt.state is AttemptState.STOPPING:
        until = attempt.stopping_until
        if until is None:
            until = work.now + attempt.job.request.grace
        return max(until, work.now)
    end = attempt.started + work.walltime(attempt.job, attempt.pool)
    return end if end > work.now else work.now + OVERDUE


def yields_to(attempt: Attempt, job: Job) -> bool:
    """A filler leaves for the reservation of a job that was waiting when it started."""
    return attempt.filler and attempt.job.id != job.id and job.submitted <= attempt.started


End = tuple[float, int, Attempt]


def releases(work: Work, pool: int, job: Job) -> list[End]:
    """(expected end, id, attempt) of what runs in a pool, soonest first; fillers leave for ``job`` if they must."""
    known = work.ends_of.get(pool)
    if known is None:
        known = work.ends_of[pool] = Ends(work, pool)
    return known.rows(work, job)


class Ends:
    """Expected ends of one pool's attempts, sorted once a cycle; what the cycle adds or evicts is merged in."""

    def __init__(self, work: Work, pool: int) -> None:
        state = work.pools[pool]
        self._pool = pool
        self._running: list[End] = [
            (expected_end(work, attempt), number, attempt)
            for number, attempt in work.state.by_pool[pool].items()
            if state.usable == state.every or any(state.usable >> state.index[s.node] & 1 for s in attempt.placement)
        ]
        self._running.sort()  # ids differ: attempts are never compared
        self._fillers = [row[2] for row in self._running if row[2].filler]
        self._started: list[End] = []
        #: The last answer, with what it depends on.
        self._last: tuple[tuple[int, int, tuple[int, ...]], list[End]] | None = None
        self._seen = 0

    def rows(self, work: Work, job: Job) -> list[End]:
        for start in work.starts[self._seen :]:
            if start.pool == self._pool:
                started = work.state.jobs[start.job]
                run = Attempt(-start.job, started, self._pool, start.placement, work.now, workers=start.workers)
                self._started.append((work.now + work.walltime(started, self._pool), run.id, run))
        self._seen = len(work.starts)
        leaving = {a.id: a for a in self._fillers if yields_to(a, job) and a.id not in work.evicted}
        key = (self._seen, len(work.evicted), tuple(leaving))
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        running = work.state.by_pool[self._pool]
        evicted = {number: running[number] for number in work.evicted if number in running}
        early = [(work.now + a.job.request.grace, a.id, a) for a in leaving.values()]
        early += [(expected_end(work, a), a.id, a) for a in evicted.values()]
        if not early and not self._started:
            return self._running
        kept = self._running
        if early:
            kept = [row for row in kept if row[1] not in leaving and row[1] not in evicted]
        rows = sorted([*kept, *self._started, *early])
        self._last = (key, rows)
        return rows


class Future:
    """A pool's free devices as attempts end one after another."""

    def __init__(self, work: Work, pool: int, request: Request) -> None:
        self._state = work.pools[pool]
        self.added: dict[int, int] = {}
        self.buckets = self._state.buckets.copy()
        self._gpus, self._workers = request.gpus, request.workers
        #: Workers that find free devices, promises aside.
        self._fit = workers_that_fit(whole_view(self._state), request.gpus, self._state.usable) if request.gpus else 0
        self._shares: dict[tuple[int, int], int] = {}

    def give_back(self, attempt: Attempt) -> None:
        state = self._state
        for slot in attempt.placement:
            position = state.index[slot.node]
            devices = slot.devices & state.whole[position] & ~state.held[position]
            if slot.share != GPU:
                key = (position, slot.devices.bit_length() - 1)
                taken = self._shares.get(key, state.shares.get(key, 0)) - slot.share
                self._shares[key] = taken
                if taken or key in state.held_shares:
                    continue
            bit = 1 << position
            before = state.free[position] | self.added.get(position, 0)
            after = before | devices
            self.added[position] = self.added.get(position, 0) | devices
            if state.usable & bit and after != before:
                old, new = before.bit_count(), after.bit_count()
                self.buckets[old] &= ~bit
                self.buckets[new] |= bit
                if self._gpus:
                    self._fit += new // self._gpus - old // self._gpus

    def could_fit(self) -> bool:
        """A cheap test that never says no wrongly."""
        return self._gpus == 0 or self._fit >= self._workers

    def view(self) -> View:
        return View(self._state, self.buckets, self._state.usable, {}, self.added)

    def share_fits(self, share: int, allowed: int) -> tuple[int, int] | None:
        """(node position, device) on which a share fits by then."""
        for key in sorted(self._shares):
            position = key[0]
            held = self._state.held_shares.get(key, 0)
            if allowed >> position & 1 and self._shares[key] + held + share <= GPU and (self._shares[key] or held):
                return key
        return None


def earliest(work: Work, job: Job, pool: int) -> tuple[float, Placement] | None:
    """The earliest time at which running jobs' walltimes free a placement that no promise needs, and where."""
    rows = releases(work, pool, job)
    length = work.walltime(job, pool)
    later = sorted({p.ends for p in work.promises[pool] if p.ends > work.now})
    future = Future(work, pool, job.request)
    guarantee = _GuaranteeByThen(work, job, pool)
    done = tried = 0
    instant = work.now
    while True:
        while done < len(rows) and rows[done][0] <= instant:
            future.give_back(rows[done][2])
            guarantee.give_back(rows[done][2])
            done += 1
        if future.could_fit() and guarantee.allows():
            found = _fits_at(work, job, pool, future, instant, instant + length)
            if found is not None:
                return instant, found
            tried += 1
            if tried >= SEARCH_STEPS:
                return None
        while later and later[0] <= instant:
            del later[0]
        upcoming = [rows[done][0]] if done < len(rows) else []
        if later:
            upcoming.append(later[0])
        if not upcoming:
            return None
        instant = min(upcoming)


class _GuaranteeByThen:
    """Whether the guarantee allows a fragile job once some attempts have ended (4.3)."""

    def __init__(self, work: Work, job: Job, pool: int) -> None:
        self._state = work.state
        self._free = may_borrow(work, job)
        self._amount = 0 if self._free else amount_of(work.pools[pool], job.request)
        path = work.state.teams.path[work.state.leaf(job)]
        self._guaranteed = {team: work.state.teams.guaranteed[pool][team] for team in path}
        self._fragile = {team: work.held[pool].fragile[team] for team in path}

    def give_back(self, attempt: Attempt) -> None:
        if self._free or attempt.job.request.interruptible:
            return
        amount = placement_amount(attempt.placement)
        for team in self._state.teams.path[self._state.leaf(attempt.job)]:
            if team in self._fragile:
                self._fragile[team] -= amount

    def allows(self) -> bool:
        return self._free or all(
            self._fragile[team] + self._amount <= guaranteed for team, guaranteed in self._guaranteed.items()
        )


def _fits_at(work: Work, job: Job, pool: int, future: Future, begins: float, ends: float) -> Placement | None:
    kept = conflicts(work, job, pool, begins, ends)
    view = without(work, pool, kept, base=future.view()) if kept else future.view()
    request = job.request
    found = place(view, request, request.workers, work.gradient(pool), avoid=avoid_bits(work.pools[pool], job))
    if found is None and not request.gpus:
        share = work.pools[pool].amount(request)
        key = None if share is None else future.share_fits(share, view.allowed & work.pools[pool].shareable)
        if key is not None and share is not None and not view.removed.get(key[0], 0) >> key[1] & 1:
            found = (Slot(work.pools[pool].nodes[key[0]].id, 1 << key[1], share),)
    return found


def promise_for(work: Work, job: Job, pool: int, placement: Placement, at: float) -> Promise:
    """Devices of a reservation, as a promise to the job."""
    state = work.pools[pool]
    devices: dict[int, int] = {}
    for slot in placement:
        position = state.index[slot.node]
        devices[position] = devices.get(position, 0) | slot.devices
    return Promise(at, at + work.walltime(job, pool), tuple(sorted(devices.items())), job=job.id)


def fillers_on(work: Work, pool: int, placement: Placement) -> list[Attempt]:
    """Fillers that run on the devices of a placement, by id."""
    fillers = work.fillers(pool)
    if not fillers:
        return []
    wanted: dict[int, int] = {}
    for slot in placement:
        wanted[slot.node] = wanted.get(slot.node, 0) | slot.devices
    return [
        attempt for attempt in fillers if any(wanted.get(slot.node, 0) & slot.devices for slot in attempt.placement)
    ]
