"""Plain queues, for comparison in simulations only: first come first served, or shortest first.

No quotas, no eviction, no backfill: whoever is blocked blocks everybody behind it in that pool. Placement is 4.4.
"""

from __future__ import annotations

from scheduling.engine.backfill import strict_view
from scheduling.engine.decisions import Start
from scheduling.engine.placement import place
from scheduling.engine.snapshot import Discipline, Job
from scheduling.engine.work import Work, amount_of


def in_line(work: Work) -> None:
    """Start jobs in the order of the line until the head of each pool's line does not fit."""
    blocked: set[int] = set()
    for job in _line(work):
        open_pools = [number for number in job.request.pools if number not in blocked]
        if not open_pools:
            if len(blocked) == len(work.pools):
                return
            continue
        if not _start(work, job, open_pools):
            blocked.update(open_pools)


def _line(work: Work) -> list[Job]:
    jobs = [row[2] for classes in work.state.queues.values() for group in classes.values() for row in group.jobs]
    if work.state.policy.discipline is Discipline.SHORTEST:
        return sorted(jobs, key=lambda job: (job.duration or 0.0, job.submitted, job.id))
    return sorted(jobs, key=lambda job: (job.submitted, job.id))


def _start(work: Work, job: Job, pools: list[int]) -> bool:
    for number in pools:
        pool = work.pools[number]
        if not pool.reachable or pool.amount(job.request) is None:
            continue
        view = strict_view(work, job, number)
        placement = place(view, job.request, job.request.workers, work.gradient(number))
        if placement is not None:
            start = Start(job.id, number, placement, job.request.workers)
            work.start(job, number, placement, amount_of(pool, job.request), start)
            return True
    return False
