"""Whose turn it is (4.2).

From the root, at each level the child with, in this order: its next job would keep it within its guarantee; smaller
allocated / share; smaller usage; older next job; name. Inside a leaf: priority, submit time, id.

After a decision only the teams on one path change, so each step costs the depth of the tree, not its size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from scheduling.engine.snapshot import Job
from scheduling.engine.state import WaitClass
from scheduling.engine.work import Work, ratio


@dataclass(slots=True)
class Candidate:
    """The job whose turn it is, and the pool it tries now."""

    leaf: int
    job: Job
    wait_class: WaitClass
    pool: int
    #: Millionths of a GPU it asks for there.
    amount: int


#: The five criteria of 4.2; the team, so that no two entries are equal; the candidate below it.
Entry = tuple[bool, float, float, float, str, int, Candidate]


class LeafQueue:
    """A leaf's jobs in order, class by class; whole classes can be dropped at once."""

    __slots__ = ("_heads", "_next", "leaf", "pool_at")

    def __init__(self, leaf: int, classes: dict[tuple[int, int], WaitClass]) -> None:
        self.leaf = leaf
        self._heads = [
            (-wait_class.priority, wait_class.jobs[0][0], wait_class.jobs[0][1], 0, wait_class)
            for wait_class in classes.values()
        ]
        heapq.heapify(self._heads)
        #: Which of its acceptable pools the next job tries.
        self.pool_at = 0

    def head(self) -> tuple[Job, WaitClass] | None:
        if not self._heads:
            return None
        _, _, _, at, wait_class = self._heads[0]
        return wait_class.jobs[at][2], wait_class

    def next_job(self) -> None:
        """The head is decided; go on with the one behind it."""
        priority, _, _, at, wait_class = self._heads[0]
        at += 1
        self.pool_at = 0
        if at < len(wait_class.jobs):
            submitted, number, _ = wait_class.jobs[at]
            heapq.heapreplace(self._heads, (priority, submitted, number, at, wait_class))
        else:
            heapq.heappop(self._heads)

    def drop_class(self) -> None:
        """Nothing of the head's class can start in this cycle."""
        self.pool_at = 0
        heapq.heappop(self._heads)


class Turns:
    """The walk over the team tree."""

    def __init__(self, work: Work, admits: Callable[[WaitClass, int], bool]) -> None:
        """``admits(class, pool)``: False once nothing of a class can start in a pool in this cycle."""
        self._work = work
        self._admits = admits
        teams = work.state.teams
        self.queues = {leaf: LeafQueue(leaf, classes) for leaf, classes in work.state.queues.items()}
        #: By parent: the best entry below each of its teams.
        self._children: dict[int | None, dict[int, Entry]] = {}
        for leaf in self.queues:
            for team in teams.path[leaf]:
                self._children.setdefault(teams.parent[team], {})
        for leaf in self.queues:
            self.refresh(leaf)

    def next(self) -> Candidate | None:
        top = self._children.get(None)
        return min(top.values())[-1] if top else None

    def refresh(self, leaf: int) -> None:
        """Something on the path of ``leaf`` changed: its next job, or what the path holds."""
        teams = self._work.state.teams
        candidate = self._candidate(leaf)
        for team in teams.path[leaf]:
            siblings = self._children[teams.parent[team]]
            if team != leaf:
                below = self._children.get(team)
                candidate = min(below.values())[-1] if below else None
            if candidate is None:
                siblings.pop(team, None)
            else:
                siblings[team] = self._entry(team, candidate)

    def _candidate(self, leaf: int) -> Candidate | None:
        queue = self.queues[leaf]
        while (head := queue.head()) is not None:
            job, wait_class = head
            pools = job.request.pools
            while queue.pool_at < len(pools) and not self._admits(wait_class, pools[queue.pool_at]):
                queue.pool_at += 1
            if queue.pool_at < len(pools):
                pool = pools[queue.pool_at]
                return Candidate(leaf, job, wait_class, pool, self._work.pools[pool].amount(job.request) or 0)
            queue.drop_class()
        return None

    def _entry(self, team: int, candidate: Candidate) -> Entry:
        work, pool = self._work, candidate.pool
        allocated = work.held[pool].allocated[team]
        return (
            allocated + candidate.amount > work.state.teams.guaranteed[pool][team],
            ratio(allocated, work.share(pool, team)),
            work.usage(pool, team),
            candidate.job.submitted,
            work.state.teams.names[team],
            team,
            candidate,
        )
