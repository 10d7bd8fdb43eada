"""Reservations, backfill and fillers (4.5), and the windows that are treated the same way.

A promise is a set of devices that belongs to somebody from an instant on. Who starts now may use a device only if it
ends before every promise on that device begins; interruptible work may use it until then, as a filler.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduling.engine.placement import View, place, reduced_view, whole_view
from scheduling.engine.snapshot import GPU, Attempt, AttemptState, Job, Placement, Slot, WindowKind
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


def without(work: Work, pool: int, promises: Iterable[Promise], *, base: View | None = None) -> View:
    """What is left of a pool when promises are kept."""
    state = work.pools[pool]
    removed: dict[int, int] = {}
    closed = 0
    for promise in promises:
        closed |= promise.nodes
        for position, devices in promise.devices:
            removed[position] = removed.get(position, 0) | devices
    if not removed and not closed:
        return base or whole_view(state)
    return reduced_view(state, removed, closed, base=base)


def strict_view(work: Work, job: Job, pool: int) -> View:
    """What ``job`` may use now without getting in the way of any promise."""
    ends = work.now + work.walltime(job, pool)
    return without(work, pool, conflicts(work, job, pool, work.now, ends))


def filler_view(work: Work, job: Job, pool: int) -> View:
    """What an interruptible ``job`` may use now, to leave when a promise falls due: current windows stay closed."""
    grace = job.request.grace
    ends = work.now + work.walltime(job, pool)
    kept = [
        promise
        for promise in conflicts(work, job, pool, work.now, ends)
        if (promise.begins <= work.now + grace and promise.window is not None) or promise.begins <= work.now
    ]
    return without(work, pool, kept)


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


def releases(work: Work, pool: int, job: Job) -> list[tuple[float, int, Attempt]]:
    """(expected end, id, attempt) of what runs in a pool, soonest first; fillers leave for ``job`` if they must."""
    rows, fillers = _running_ends(work, pool)
    leaving = [row for row in fillers if yields_to(row[2], job) and row[1] not in work.evicted]
    if not leaving:
        return rows
    gone = {row[1] for row in leaving}
    early = [(work.now + row[2].job.request.grace, row[1], row[2]) for row in leaving]
    return sorted([*early, *(row for row in rows if row[1] not in gone)], key=_by_end)


def _by_end(row: tuple[float, int, Attempt]) -> tuple[float, int]:
    return row[:2]


def _running_ends(work: Work, pool: int) -> tuple[list[tuple[float, int, Attempt]], list[tuple[float, int, Attempt]]]:
    """All attempts of a pool by expected end, and the fillers among them; worked out once until something changes."""
    cached = work.ends_of.get(pool)
    if cached is not None and cached[0] == work.version[pool]:
        return cached[1], cached[2]
    state = work.pools[pool]
    rows = [
        (expected_end(work, attempt), number, attempt)
        for number, attempt in work.state.by_pool[pool].items()
        if state.usable == state.every or any(state.usable >> state.index[s.node] & 1 for s in attempt.placement)
    ]
    for start in work.starts:
        if start.pool == pool:
            started = work.state.jobs[start.job]
            run = Attempt(-start.job, started, pool, start.placement, work.now, workers=start.workers)
            rows.append((work.now + work.walltime(started, pool), run.id, run))
    rows.sort(key=_by_end)
    fillers = [row for row in rows if row[2].filler]
    work.ends_of[pool] = (work.version[pool], rows, fillers)
    return rows, fillers


class Future:
    """A pool's free devices as attempts end one after another."""

    def __init__(self, work: Work, pool: int) -> None:
        self._state = work.pools[pool]
        self.added: dict[int, int] = {}
        self.buckets = self._state.buckets.copy()
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
            if state.usable & bit:
                self.buckets[before.bit_count()] &= ~bit
                self.buckets[after.bit_count()] |= bit

    def could_fit(self, job: Job) -> bool:
        """A cheap test that never says no wrongly."""
        request = job.request
        if not request.gpus:
            return True
        fit = 0
        for free in range(request.gpus, len(self.buckets)):
            nodes = self.buckets[free]
            if nodes:
                fit += free // request.gpus * nodes.bit_count()
                if fit >= request.workers:
                    return True
        return False

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
    future = Future(work, pool)
    done = tried = 0
    for instant in sorted({work.now, *(row[0] for row in rows), *later}):
        first = done
        while done < len(rows) and rows[done][0] <= instant:
            future.give_back(rows[done][2])
            done += 1
        if (first == done and instant not in later and instant != work.now) or not future.could_fit(job):
            continue
        if not _admitted_by_then(work, job, pool, [row[2] for row in rows[:done]]):
            continue
        found = _fits_at(work, job, pool, future, instant, instant + length)
        if found is not None:
            return instant, found
        tried += 1
        if tried >= SEARCH_STEPS:
            return None
    return None


def _admitted_by_then(work: Work, job: Job, pool: int, ended: list[Attempt]) -> bool:
    """Whether the guarantee allows a fragile job once some attempts have ended (4.3)."""
    if may_borrow(work, job):
        return True
    leaf = work.state.leaf(job)
    path = work.state.teams.path[leaf]
    fragile = {team: work.held[pool].fragile[team] for team in path}
    for attempt in ended:
        if not attempt.job.request.interruptible:
            amount = placement_amount(attempt.placement)
            for team in work.state.teams.path[work.state.leaf(attempt.job)]:
                if team in fragile:
                    fragile[team] -= amount
    amount = amount_of(work.pools[pool], job.request)
    guaranteed = work.state.teams.guaranteed[pool]
    return all(fragile[team] + amount <= guaranteed[team] for team in path)


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


def occupants(work: Work, pool: int, placement: Placement) -> list[Attempt]:
    """Running attempts on the devices of a placement, by id."""
    wanted: dict[int, int] = {}
    for slot in placement:
        wanted[slot.node] = wanted.get(slot.node, 0) | slot.devices
    return [
        attempt
        for _, attempt in sorted(work.state.by_pool[pool].items())
        if any(wanted.get(slot.node, 0) & slot.devices for slot in attempt.placement)
    ]
