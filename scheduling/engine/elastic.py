"""Elastic jobs that grow back (4.11), and consolidation (4.9): attempts that go on elsewhere or larger.

Both stop an attempt that restarts at once from its checkpoint on capacity held for it.
"""

from __future__ import annotations

from scheduling.engine.backfill import strict_view
from scheduling.engine.decisions import EvictionReason, NewHold
from scheduling.engine.placement import View, place, reduced_view
from scheduling.engine.pool import PoolState, positions
from scheduling.engine.reclaim import Victim, Victims, lost_work, restart_with
from scheduling.engine.snapshot import GPU, HOUR, Attempt, AttemptState, Job, Placement, Slot
from scheduling.engine.work import Work, may_start

#: A checkpoint this fresh (seconds) counts as "at a checkpoint": work since then is as good as none.
FRESH_CHECKPOINT = 60.0

#: Nodes that one search for a consolidation looks at.
CONSOLIDATION_NODES = 32


def grow(work: Work, contested: set[int]) -> dict[int, float]:
    """Let shrunken elastic attempts grow back; ``contested``: pools for which somebody waits.

    Returns since when the missing GPUs of each attempt have been free, for the next cycle.
    """
    since: dict[int, float] = {}
    for pool, attempts in work.state.by_pool.items():
        if pool in contested or not work.pools[pool].reachable:
            continue
        for number in sorted(work.state.shrunken[pool]):
            attempt = attempts[number]
            if attempt.state is not AttemptState.RUNNING or number in work.evicted:
                continue
            placement = _larger(work, attempt)
            if placement is None:
                continue
            free_since = since[number] = work.state.growable_since.get(number, work.now)
            if work.now - free_since < work.state.policy.grow_after:
                work.wake(free_since + work.state.policy.grow_after)
            elif not _at_checkpoint(work, attempt):
                _wake_at_next_checkpoint(work, attempt)
            else:
                restart_with(
                    work,
                    attempt,
                    placement,
                    EvictionReason.GROW,
                    attempt.job.id,
                    f"4.11: {len(placement)} instead of {attempt.workers} workers, free since {free_since:g}",
                )
    return since


def _at_checkpoint(work: Work, attempt: Attempt) -> bool:
    last = attempt.checkpoint_before(work.now)
    return last is not None and 0 <= work.now - last <= FRESH_CHECKPOINT


def _wake_at_next_checkpoint(work: Work, attempt: Attempt) -> None:
    every = attempt.regular_checkpoints
    if every is not None:
        last = attempt.checkpoint_before(work.now)
        work.wake((attempt.started if last is None else last) + every)


def _larger(work: Work, attempt: Attempt) -> Placement | None:
    """Its own slots and as many more as are missing and free, at most all."""
    job, pool = attempt.job, attempt.pool
    state = work.pools[pool]
    view = strict_view(work, job, pool)
    within = None
    if job.request.required and job.request.level is not None:
        within = _domain_of(state, attempt, job.request.level)
    for more in range(job.request.workers - attempt.workers, 0, -1):
        if not may_start(work, job, pool, more * job.request.gpus * GPU):
            continue
        extra = place(view, job.request, more, work.gradient(pool), within=within)
        if extra is not None:
            return tuple(sorted((*attempt.placement, *extra), key=lambda slot: (slot.node, slot.devices)))
    return None


def _domain_of(state: PoolState, attempt: Attempt, level: str) -> int:
    """Nodes of the domain that an attempt runs in."""
    mine = 0
    for slot in attempt.placement:
        mine |= 1 << state.index[slot.node]
    if level not in state.levels:
        return mine
    for domain in state.domains[state.levels.index(level)].values():
        if mine & ~domain == 0:
            return domain
    return mine


def consolidate(work: Work, job: Job, pool: int, victims: Victims) -> bool:
    """Move interruptible attempts off one node so that a worker of ``job`` fits there (4.9).

    Every moved attempt restarts at once on devices free now; the work lost is less than the budget per GPU gained.
    """
    request = job.request
    if not request.gpus or request.workers > 1:
        return False
    view = strict_view(work, job, pool)
    if view.free_devices() < request.gpus:
        return False
    state = work.pools[pool]
    budget = work.state.policy.consolidation_budget * HOUR * request.gpus
    best: tuple[float, int, list[tuple[Attempt, Placement]]] | None = None
    spots = sorted(victims.by_node, key=lambda p: (-view.mask(p).bit_count(), p))
    for position in [p for p in spots if view.allowed >> p & 1][:CONSOLIDATION_NODES]:
        found = _clear(work, job, pool, position, victims, view)
        if found is not None:
            loss = sum(lost_work(work, attempt) for attempt, _ in found)
            if loss < budget and (best is None or (loss, position) < best[:2]):
                best = (loss, position, found)
    if best is None:
        return False
    loss, position, moves = best
    gone = 0
    for attempt, _ in moves:
        for slot in attempt.placement:
            if state.index[slot.node] == position:
                gone |= slot.devices
    text = f"4.9: moved for job {job.name}, {loss / HOUR:.3f} GPU-hours lost for {request.gpus} GPUs gained"
    for attempt, placement in moves:
        restart_with(work, attempt, placement, EvictionReason.CONSOLIDATION, job.id, text)
    _hold_cleared(work, job, pool, position, gone, [attempt for attempt, _ in moves])
    return True


def _clear(
    work: Work, job: Job, pool: int, position: int, victims: Victims, view: View
) -> list[tuple[Attempt, Placement]] | None:
    """Attempts to move off a node and where each goes, or ``None``."""
    state = work.pools[pool]
    missing = job.request.gpus - view.mask(position).bit_count()
    if missing <= 0 or state.whole[position].bit_count() < job.request.gpus:
        return None
    trial = state.copy()
    moves: list[tuple[Attempt, Placement]] = []
    others = ((1 << len(state.nodes)) - 1) & ~(1 << position)
    for victim in victims.by_node[position]:
        if missing <= 0:
            break
        if not _movable(work, victim, position):
            continue
        now = strict_view(work, victim.attempt.job, pool)
        target = reduced_view(trial, now.removed, trial.usable & ~now.allowed)
        placement = place(
            target, victim.attempt.job.request, victim.attempt.workers, work.gradient(pool), within=others
        )
        if placement is not None:
            trial.take(placement)
            moves.append((victim.attempt, placement))
            missing -= victim.devices[position].bit_count()
    return moves if missing <= 0 else None


def _movable(work: Work, victim: Victim, position: int) -> bool:
    """Whole devices, all on this node, not touched by this cycle yet."""
    return (
        victim.number not in work.evicted
        and not victim.shares
        and set(victim.devices) == {position}
        and bool(victim.attempt.job.request.gpus)
    )


def _hold_cleared(work: Work, job: Job, pool: int, position: int, gone: int, moved: list[Attempt]) -> None:
    state = work.pools[pool]
    order = [*positions(state.free[position]), *positions(gone)]
    devices = sum(1 << device for device in order[: job.request.gpus])
    grace = max(attempt.job.request.grace for attempt in moved)
    expires = work.now + grace + work.state.policy.plan_timeout
    placement = (Slot(state.nodes[position].id, devices),)
    victims = tuple(attempt.id for attempt in moved)
    work.hold(job, NewHold(job.id, pool, placement, expires, victims, 1))
