"""Whose GPUs may be taken for a blocked job: reclaim between teams (4.6), preemption inside a leaf (4.7), and which
victims lose least (4.8).

A plan is a set of victims together with the placement it makes possible; either both are carried out or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduling.engine.backfill import strict_view
from scheduling.engine.decisions import Evict, EvictionReason, NewHold
from scheduling.engine.placement import View, scopes
from scheduling.engine.pool import PoolState, positions
from scheduling.engine.snapshot import GPU, Attempt, AttemptState, Job, Placement, Slot
from scheduling.engine.work import Work, may_borrow, over_guarantee, placement_amount, ratio, within_share

#: Searches for victims in one cycle: those with a result (the next cycle goes on at once), and those without.
SEARCHES = 64
FRUITLESS_SEARCHES = 256

#: Nodes that one search looks at before it keeps to those with the cheapest candidates.
SPOTS_FOR_ONE_NODE = 256
SPOTS_FOR_A_GANG = 64
DOMAINS = 8


class Victim(NamedTuple):
    """A running attempt that could be stopped, with what that would lose."""

    #: Order of 4.8: lost work in GPU-seconds, later start first, id.
    loss: float
    started: float
    number: int
    attempt: Attempt
    leaf: int
    amount: int
    #: Whole devices by node position.
    devices: dict[int, int]
    #: (node position, device) -> share.
    shares: dict[tuple[int, int], int]
    #: Workers that may be taken from it without stopping the rest for good (4.11).
    surplus: int


@dataclass(slots=True)
class Victims:
    """Interruptible attempts of one pool that have run long enough, cheapest first."""

    rows: list[Victim] = field(default_factory=list)
    by_node: dict[int, list[Victim]] = field(default_factory=dict)
    #: Leaf and priority of each row: a search picks its candidates by rule without looking at the rest.
    leaves: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    priorities: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    #: When the next attempt will have run for ``min_runtime``.
    ripe_at: float | None = None

    @classmethod
    def of(cls, work: Work, pool: int) -> Victims:
        victims = cls()
        policy = work.state.policy
        state = work.pools[pool]
        for attempt in work.state.by_pool[pool].values():
            if not attempt.job.request.interruptible or attempt.state is AttemptState.STOPPING:
                continue
            ripe = attempt.started + policy.min_runtime
            if ripe > work.now:
                victims.ripe_at = ripe if victims.ripe_at is None else min(victims.ripe_at, ripe)
                continue
            leaf, amount, devices, shares = footprint(work, state, attempt)
            saved = attempt.checkpoint_before(work.now)
            since = attempt.started if saved is None else saved
            loss = amount / GPU * (max(0.0, work.now - since) + policy.restart_cost)
            surplus = attempt.workers - attempt.job.request.min_workers
            victims.rows.append(
                Victim(loss, -attempt.started, attempt.id, attempt, leaf, amount, devices, shares, surplus)
            )
        victims.rows.sort()  # ids differ: nothing behind them is compared
        for victim in victims.rows:
            for position in {*victim.devices, *(key[0] for key in victim.shares)}:
                victims.by_node.setdefault(position, []).append(victim)
        victims.leaves = np.array([victim.leaf for victim in victims.rows], np.int32)
        victims.priorities = np.array([int(victim.attempt.job.priority) for victim in victims.rows], np.int32)
        return victims

    def allowed_by(self, claim: Claim) -> Iterator[Victim]:
        """The rows that a rule makes candidates for ``claim``, cheapest first."""
        open_to = np.zeros(len(claim.work.state.teams.rows), np.bool_)
        open_to[claim.victim_leaves()] = True
        mask = open_to[self.leaves]
        mask |= (self.leaves == claim.leaf) & (self.priorities < int(claim.job.priority))
        for at in np.flatnonzero(mask):
            victim = self.rows[at]
            if claim.rule(victim):
                yield victim


def _in_order(victim: Victim) -> tuple[float, float, int]:
    """Order of 4.8."""
    return victim[:3]


Footprint = tuple[int, int, dict[int, int], dict[tuple[int, int], int]]


def footprint(work: Work, pool: PoolState, attempt: Attempt) -> Footprint:
    """(leaf, amount, devices, shares) of an attempt; kept with the state, since a placement never changes."""
    known = work.state.footprints.get(attempt.id)
    if known is not None and known[0] is attempt.placement:
        return known[1]
    devices: dict[int, int] = {}
    shares: dict[tuple[int, int], int] = {}
    for slot in attempt.placement:
        position = pool.index[slot.node]
        if slot.share == GPU:
            devices[position] = devices.get(position, 0) | slot.devices
        else:
            shares[position, slot.devices.bit_length() - 1] = slot.share
    made = (work.state.leaf(attempt.job), placement_amount(attempt.placement), devices, shares)
    work.state.footprints[attempt.id] = (attempt.placement, made)
    return made


def lost_work(work: Work, attempt: Attempt) -> float:
    """GPU-seconds thrown away by stopping it now: since the last checkpoint or the start, plus the restart cost."""
    saved = attempt.checkpoint_before(work.now)
    since = attempt.started if saved is None else saved
    seconds = max(0.0, work.now - since) + work.state.policy.restart_cost
    return placement_amount(attempt.placement) / GPU * seconds


def branches(work: Work, ours: int, theirs: int) -> tuple[int, int] | None:
    """T and V of 4.6: the ancestors of two leaves just below their common parent; ``None`` for one leaf."""
    if ours == theirs:
        return None
    path, other = work.state.teams.path[ours], work.state.teams.path[theirs]
    common = set(path) & set(other)
    t = next(team for team in reversed(path) if team not in common)
    v = next(team for team in reversed(other) if team not in common)
    return t, v


class Claim:
    """A blocked job's right to evict, worked out once per job and pool."""

    def __init__(self, work: Work, job: Job, pool: int, amount: int) -> None:
        self.work, self.job, self.pool, self.amount = work, job, pool, amount
        self.leaf = work.state.leaf(job)
        #: T and V of 4.6 by leaf of the victim, and the rule between them.
        self._sides: dict[int, tuple[int, int] | None] = {}
        self._between: dict[tuple[int, int], str | None] = {}

    def restores_guarantee(self, upto: int) -> bool:
        """(a): T and every team on the reclaimer's side stays within its guarantee."""
        held = self.work.held[self.pool].allocated
        guaranteed = self.work.state.teams.guaranteed[self.pool]
        for team in self.work.state.teams.path[self.leaf]:
            if held[team] + self.amount > guaranteed[team]:
                return False
            if team == upto:
                return True
        return True

    def within_fair_share(self, team: int) -> bool:
        held = self.work.held[self.pool].allocated[team]
        return within_share(self.work, self.pool, team, held + self.amount)

    def possible(self) -> bool:
        """Cheap test before any search: could any rule give anything to this job?"""
        if any(
            self.restores_guarantee(team) or self.within_fair_share(team)
            for team in self.work.state.teams.path[self.leaf]
        ):
            return True
        preemptible = self.work.state.preemptible[self.pool]
        return any(preemptible.get((self.leaf, lower)) for lower in range(int(self.job.priority)))

    def rule(self, victim: Victim) -> str | None:
        """Which rule makes this attempt a candidate: "preemption", "guarantee", "share", or none."""
        if victim.number in self.work.evicted or victim.attempt.job.id == self.job.id:
            return None
        if victim.leaf == self.leaf:
            return "preemption" if victim.attempt.job.priority < self.job.priority else None
        if victim.leaf not in self._sides:
            self._sides[victim.leaf] = branches(self.work, self.leaf, victim.leaf)
        sides = self._sides[victim.leaf]
        return None if sides is None else self._rule_between(*sides)

    def victim_leaves(self) -> list[int]:
        """Leaves of other teams whose attempts a rule makes candidates."""
        teams = self.work.state.teams
        found: list[int] = []
        for t in teams.path[self.leaf]:
            parent = teams.parent[t]
            for v in teams.roots if parent is None else teams.children[parent]:
                if v != t and self._rule_between(t, v):
                    found += teams.leaves_below(v)
        return found

    def _rule_between(self, t: int, v: int) -> str | None:
        key = (t, v)
        if key not in self._between:
            self._between[key] = self._rule_of_sides(t, v)
        return self._between[key]

    def _rule_of_sides(self, t: int, v: int) -> str | None:
        held = self.work.held[self.pool].allocated
        if held[v] <= self.work.state.teams.guaranteed[self.pool][v]:
            return None
        if self.restores_guarantee(t):
            return "guarantee"
        if self.within_fair_share(t) and self._less_served(t, v):
            return "share"
        return None

    def _less_served(self, t: int, v: int) -> bool:
        held = self.work.held[self.pool].allocated
        after = ratio(held[t] + self.amount, self.work.share(self.pool, t))
        before = ratio(held[v], self.work.share(self.pool, v))
        return after < before * (1 - 1e-12)

    def legal(self, taken: Iterable[tuple[Victim, int]]) -> bool:
        """The test of 4.6 and 4.7 on the final set: (victim, amount taken from it), cheapest first."""
        work, pool = self.work, self.pool
        teams = work.state.teams
        held = work.held[pool].allocated.copy()
        guaranteed = teams.guaranteed[pool]
        rules: list[tuple[Victim, str]] = []
        for victim, amount in taken:
            rule = self.rule(victim)
            if rule is None:
                return False
            if rule != "preemption":
                sides = branches(work, self.leaf, victim.leaf)
                if sides is None or held[sides[1]] <= guaranteed[sides[1]]:
                    return False
            rules.append((victim, rule))
            for team in teams.path[victim.leaf]:
                held[team] -= amount
        for victim, rule in rules:
            sides = branches(work, self.leaf, victim.leaf)
            if rule == "share" and sides is not None and held[sides[1]] < guaranteed[sides[1]]:
                return False
        return self._admitted(held) and not self._would_be_taken_back(rules, held)

    def _admitted(self, held: list[int]) -> bool:
        """Admission (4.3) with the victims gone: what they held no longer counts against a limit."""
        teams = self.work.state.teams
        limit = teams.limit[self.pool]
        for team in teams.path[self.leaf]:
            bound = limit[team]
            if bound is not None and held[team] + self.amount > bound:
                return False
        return may_borrow(self.work, self.job) or over_guarantee(self.work, self.pool, self.leaf, self.amount) is None

    def _would_be_taken_back(self, rules: list[tuple[Victim, str]], held: list[int]) -> bool:
        """Whether a victim could in turn evict this job (last sentence of 4.8)."""
        if not self.job.request.interruptible:
            return False
        teams = self.work.state.teams
        guaranteed = teams.guaranteed[self.pool]
        after = held.copy()
        for team in teams.path[self.leaf]:
            after[team] += self.amount
        for victim, rule in rules:
            sides = branches(self.work, self.leaf, victim.leaf)
            if rule == "preemption" or sides is None:
                continue
            t, v = sides
            if after[t] <= guaranteed[t]:
                continue
            side = teams.path[victim.leaf]
            side = side[: side.index(v) + 1]
            if all(after[team] + victim.amount <= guaranteed[team] for team in side):
                return True
        return False


@dataclass(slots=True)
class _Choice:
    """Victims chosen so far, and what they free: node position -> devices."""

    whole: dict[int, Victim] = field(default_factory=dict)
    #: Elastic attempts that only give up workers: victim number -> (victim, slots taken).
    shrunk: dict[int, tuple[Victim, list[Slot]]] = field(default_factory=dict)


def plan_eviction(work: Work, claim: Claim, workers: int, victims: Victims) -> bool:
    """Evict for a job if a rule allows it: records the evictions and the hold, and returns True."""
    job, pool = claim.job, claim.pool
    if not claim.possible():
        return False
    view = strict_view(work, job, pool)
    search = _Search(claim, view, victims, workers)
    found = search.for_gpus() if job.request.gpus else search.for_share()
    if found is None:
        return False
    choice, placement = found
    _commit(work, claim, choice, placement, workers)
    return True


class _Search:
    def __init__(self, claim: Claim, view: View, victims: Victims, workers: int) -> None:
        self.claim, self.view, self.victims, self.workers = claim, view, victims, workers
        self.pool = claim.work.pools[claim.pool]
        self._order: list[int] | None = None

    def candidates(self, position: int) -> list[Victim]:
        """On one node: elastic ones with surplus first (4.11), then the cheapest."""
        rows = [victim for victim in self.victims.by_node.get(position, ()) if self.claim.rule(victim)]
        rows.sort(key=lambda victim: (victim.surplus <= 0, victim[:3]))
        return rows

    # -- whole devices -----------------------------------------------------------------------------------------

    def for_gpus(self) -> tuple[_Choice, Placement] | None:
        """The cheapest legal plan over all domains the job accepts."""
        best: tuple[float, int, _Choice, Placement] | None = None
        for order, (choice, placement) in enumerate(self._plans()):
            taken = self._taken(choice)
            loss = sum(victim.loss for victim, _ in taken)
            if (best is None or loss < best[0]) and self.claim.legal(taken):
                best = (loss, order, choice, placement)
        return None if best is None else (best[2], best[3])

    def _plans(self) -> Iterable[tuple[_Choice, Placement]]:
        request = self.claim.job.request
        one_node = request.gpus * self.workers
        for position in self._spots(self.view.allowed, SPOTS_FOR_ONE_NODE):
            if self.pool.whole[position].bit_count() >= one_node:
                choice = _Choice()
                if self._free_up(choice, position, one_node):
                    yield choice, self._slots(choice, {position: self.workers})
        if self.workers > 1:
            for domains in scopes(self.pool, request):
                for domain in self._worth_trying(domains):
                    plan = self._in_domain(domain & self.view.allowed)
                    if plan is not None:
                        yield plan

    def _worth_trying(self, domains: Iterable[int]) -> list[int]:
        """Domains that hold candidates, those with the cheapest first; a few of very many."""
        cheapest = self._spots(self.view.allowed, SPOTS_FOR_ONE_NODE)
        rank = {position: at for at, position in enumerate(reversed(cheapest), start=1)}
        found: list[tuple[int, int, int]] = []
        for domain in domains:
            best = max((rank[p] for p in cheapest if domain >> p & 1), default=0)
            if best:
                found.append((-best, len(found), domain))
        return [domain for _, _, domain in sorted(found)[:DOMAINS]]

    def _spots(self, nodes: int, most: int) -> list[int]:
        """Nodes with candidates, those with the cheapest first; at most ``most`` of them."""
        if self._order is None:
            order: dict[int, None] = {}
            for victim in self.victims.allowed_by(self.claim):
                order.update(dict.fromkeys(victim.devices))
                order.update((key[0], None) for key in victim.shares)
                if len(order) >= SPOTS_FOR_ONE_NODE:
                    break
            self._order = list(order)
        return [position for position in self._order if nodes >> position & 1][:most]

    def _in_domain(self, nodes: int) -> tuple[_Choice, Placement] | None:
        """Node by node, the cheapest worker first; free devices cost nothing."""
        gpus = self.claim.job.request.gpus
        at: dict[int, int] = {}
        choice = _Choice()
        left = self.workers
        for free in range(len(self.view.buckets) - 1, gpus - 1, -1):
            for position in positions(self.view.buckets[free] & nodes):
                if left:
                    at[position] = min(left, free // gpus)
                    left -= at[position]
        spots = self._spots(nodes, SPOTS_FOR_A_GANG)
        while left:
            best: tuple[float, int] | None = None
            for position in spots:
                if (at.get(position, 0) + 1) * gpus > self.pool.whole[position].bit_count():
                    continue
                price = self._price(choice, position, (at.get(position, 0) + 1) * gpus)
                if price is not None and (best is None or (price, position) < best):
                    best = (price, position)
            if best is None:
                return None
            position = best[1]
            at[position] = at.get(position, 0) + 1
            self._free_up(choice, position, at[position] * gpus)
            left -= 1
        self._put_back(choice, at)
        return choice, self._slots(choice, at)

    def _mask(self, choice: _Choice, position: int) -> int:
        """Devices usable on a node once the chosen victims have gone."""
        gone_shares: dict[int, int] = {}
        mask = 0
        for victim in choice.whole.values():
            mask |= victim.devices.get(position, 0)
            for (node, device), share in victim.shares.items():
                if node == position:
                    gone_shares[device] = gone_shares.get(device, 0) + share
        for _, slots in choice.shrunk.values():
            for slot in slots:
                if self.pool.index[slot.node] == position:
                    mask |= slot.devices
        for device, share in gone_shares.items():
            key = (position, device)
            if self.pool.shares.get(key, 0) == share and key not in self.pool.held_shares:
                mask |= 1 << device
        mask &= ~self.view.removed.get(position, 0) & ~self.pool.held[position] & self.pool.whole[position]
        return mask | self.view.mask(position)

    def _price(self, choice: _Choice, position: int, devices: int) -> float | None:
        trial = _Choice(dict(choice.whole), {n: (v, list(s)) for n, (v, s) in choice.shrunk.items()})
        if not self._free_up(trial, position, devices):
            return None
        return sum(v.loss for v, _ in self._taken(trial)) - sum(v.loss for v, _ in self._taken(choice))

    def _free_up(self, choice: _Choice, position: int, devices: int) -> bool:
        """Choose victims on one node until ``devices`` are usable there, then put back the needless ones."""
        added: list[Victim] = []
        for victim in self.candidates(position):
            missing = devices - self._mask(choice, position).bit_count()
            if missing <= 0:
                break
            if victim.number in choice.whole:
                continue
            if victim.surplus > 0:
                self._shrink(choice, victim, position, missing)
                if victim.number in choice.shrunk:
                    continue
            choice.whole[victim.number] = victim
            added.append(victim)
        if self._mask(choice, position).bit_count() < devices:
            for victim in list(self.candidates(position)):  # surplus was not enough: whole gangs
                if victim.number in choice.shrunk:
                    del choice.shrunk[victim.number]
                    choice.whole[victim.number] = victim
                    added.append(victim)
                    if self._mask(choice, position).bit_count() >= devices:
                        break
        for victim in sorted(added, key=_in_order, reverse=True):
            del choice.whole[victim.number]
            if self._mask(choice, position).bit_count() < devices:
                choice.whole[victim.number] = victim
        return self._mask(choice, position).bit_count() >= devices

    def _shrink(self, choice: _Choice, victim: Victim, position: int, missing: int) -> None:
        taken = choice.shrunk.get(victim.number, (victim, []))[1]
        for slot in victim.attempt.placement:
            if missing <= 0 or len(taken) >= victim.surplus:
                break
            if self.pool.index[slot.node] == position and slot not in taken:
                taken.append(slot)
                missing -= slot.devices.bit_count()
        if taken:
            choice.shrunk[victim.number] = (victim, taken)

    def _put_back(self, choice: _Choice, at: dict[int, int]) -> None:
        gpus = self.claim.job.request.gpus
        for victim in sorted(choice.whole.values(), key=_in_order, reverse=True):
            del choice.whole[victim.number]
            if any(self._mask(choice, p).bit_count() < n * gpus for p, n in at.items()):
                choice.whole[victim.number] = victim

    def _slots(self, choice: _Choice, at: dict[int, int]) -> Placement:
        gpus = self.claim.job.request.gpus
        slots = []
        for position, workers in sorted(at.items()):
            mask = self._mask(choice, position)
            # Free devices first: what a victim leaves comes last and may turn out not to be needed.
            free = self.view.mask(position)
            order = [*positions(free), *positions(mask & ~free)]
            for worker in range(workers):
                devices = sum(1 << d for d in order[worker * gpus : (worker + 1) * gpus])
                slots.append(Slot(self.pool.nodes[position].id, devices))
        return tuple(sorted(slots, key=lambda slot: (slot.node, slot.devices)))

    def _taken(self, choice: _Choice) -> list[tuple[Victim, int]]:
        rows = [(victim, victim.amount) for victim in choice.whole.values()]
        rows += [(victim, placement_amount(tuple(slots))) for victim, slots in choice.shrunk.values()]
        return sorted(rows, key=lambda row: row[0][:3])

    # -- a share -----------------------------------------------------------------------------------------------

    def for_share(self) -> tuple[_Choice, Placement] | None:
        share = self.claim.amount
        best: tuple[float, _Choice, Placement] | None = None
        for position in sorted(self.victims.by_node):
            if not (self.view.allowed & self.pool.shareable) >> position & 1:
                continue
            for device in positions(self.pool.whole[position] & ~self.pool.held[position]):
                if self.view.removed.get(position, 0) >> device & 1:
                    continue
                choice = self._share_device(position, device, share)
                if choice is None:
                    continue
                taken = self._taken(choice)
                loss = sum(victim.loss for victim, _ in taken)
                if (best is None or loss < best[0]) and self.claim.legal(taken):
                    best = (loss, choice, (Slot(self.pool.nodes[position].id, 1 << device, share),))
        return None if best is None else (best[1], best[2])

    def _share_device(self, position: int, device: int, share: int) -> _Choice | None:
        key = (position, device)
        here = [
            victim
            for victim in self.candidates(position)
            if key in victim.shares or victim.devices.get(position, 0) >> device & 1
        ]
        whole = bool(self.pool.occupied[position] >> device & 1)
        used = GPU if whole else self.pool.shares.get(key, 0) + self.pool.held_shares.get(key, 0)
        choice = _Choice()
        for victim in here:
            if used + share <= GPU:
                break
            choice.whole[victim.number] = victim
            used -= GPU if whole else victim.shares[key]
        if used + share > GPU:
            return None
        for victim in sorted(choice.whole.values(), key=_in_order, reverse=True):
            back = GPU if whole else victim.shares[key]
            if used + back + share <= GPU:
                used += back
                del choice.whole[victim.number]
        return choice


def _commit(work: Work, claim: Claim, choice: _Choice, placement: Placement, workers: int) -> None:
    policy = work.state.policy
    numbers: list[int] = []
    longest = 0.0
    rows = sorted(choice.whole.values(), key=_in_order)
    for victim in rows:
        evict(work, victim.attempt, _reason(claim, victim), claim.job.id, because=because(claim, victim))
        numbers.append(victim.number)
        longest = max(longest, victim.attempt.job.request.grace)
    for victim, slots in sorted(choice.shrunk.values(), key=lambda row: row[0][:3]):
        kept = tuple(slot for slot in victim.attempt.placement if slot not in slots)
        text = because(claim, victim)
        restart_with(work, victim.attempt, kept, EvictionReason.SHRINK, claim.job.id, text)
        numbers.append(victim.number)
        longest = max(longest, victim.attempt.job.request.grace)
    expires = work.now + longest + policy.plan_timeout
    work.hold(claim.job, NewHold(claim.job.id, claim.pool, placement, expires, tuple(numbers), workers))
    work.wake(expires)


def _reason(claim: Claim, victim: Victim) -> EvictionReason:
    same = claim.rule(victim) == "preemption"
    return EvictionReason.PREEMPTION if same else EvictionReason.RECLAIM


def because(claim: Claim, victim: Victim) -> str:
    """The rule with its numbers, for the record."""
    work, pool = claim.work, claim.pool
    sides = branches(work, claim.leaf, victim.leaf)
    if sides is None:
        return (
            f"4.7: priority {claim.job.priority.name.lower()} before "
            f"{victim.attempt.job.priority.name.lower()} in team {work.state.teams.names[claim.leaf]}"
        )
    t, v = sides
    held, teams = work.held[pool].allocated, work.state.teams
    part = "(a)" if claim.restores_guarantee(t) else "(b)"
    return (
        f"4.6 {part}: {teams.names[t]} would hold {(held[t] + claim.amount) / GPU:g} of guarantee "
        f"{teams.guaranteed[pool][t] / GPU:g}, share {work.share(pool, t) / GPU:.3f}; {teams.names[v]} holds "
        f"{held[v] / GPU:g} of guarantee {teams.guaranteed[pool][v] / GPU:g}, share {work.share(pool, v) / GPU:.3f}"
    )


def evict(
    work: Work,
    attempt: Attempt,
    reason: EvictionReason,
    for_job: int | None,
    *,
    because: str,
    continue_workers: int = 0,
) -> None:
    """Record one eviction; its GPUs are free when its grace is over."""
    grace = attempt.job.request.grace
    work.evict(
        attempt,
        Evict(attempt.id, reason, for_job, work.now + grace, lost_work(work, attempt), continue_workers, because),
    )


def restart_with(
    work: Work, attempt: Attempt, placement: Placement, reason: EvictionReason, for_job: int | None, because: str
) -> None:
    """Stop an attempt and hold ``placement`` for it to go on with: shrunk, grown or moved."""
    workers = len(placement)
    evict(work, attempt, reason, for_job, because=because, continue_workers=workers)
    expires = work.now + attempt.job.request.grace + work.state.policy.plan_timeout
    work.hold(attempt.job, NewHold(attempt.job.id, attempt.pool, placement, expires, (attempt.id,), workers))
