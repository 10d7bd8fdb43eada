"""What the pool looked like during a simulated past: free, stranded and wanted GPUs from instant to instant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal

from scheduling.engine.simulation import Run, SimJob
from scheduling.models import Pool, PoolState


class _Sweep:
    """Changes by instant, summed up in their order. Amounts are whole GPUs; a node that is down counts as nothing."""

    def __init__(self, run: Run) -> None:
        self.free = {node.id: node.gpus for node in run.scenario.nodes}
        self.down: set[int] = set()
        self.demand = 0
        #: instant -> (node, GPUs) that are taken (negative) or given back.
        self.devices: dict[float, list[tuple[int, int]]] = defaultdict(list)
        self.wanted: dict[float, int] = defaultdict(int)
        self.nodes: dict[float, list[tuple[int, bool]]] = defaultdict(list)
        for job in run.jobs.values():
            self._job(job)
        for event in run.scenario.events:
            self.nodes[event.at] += [(node, event.data["is"] == "down") for node in event.data["nodes"]]

    def _job(self, job: SimJob) -> None:
        amount = job.spec.request.gpus * job.spec.request.workers
        since: float | None = job.spec.at
        for ran in job.attempts:
            self._waited(since, ran.start, amount)
            for slot in ran.placement:
                count = slot.devices.bit_count()
                self.devices[ran.start].append((slot.node, -count))
                if ran.end is not None:
                    self.devices[ran.end].append((slot.node, count))
            since = ran.end
        if job.state == "waiting":
            self._waited(since, None, amount)

    def _waited(self, since: float | None, until: float | None, amount: int) -> None:
        if since is not None and since != until:
            self.wanted[since] += amount
            if until is not None:
                self.wanted[until] -= amount

    def instants(self) -> list[float]:
        return sorted({0.0, *self.devices, *self.wanted, *self.nodes})

    def advance(self, at: float) -> None:
        for node, count in self.devices.get(at, ()):
            self.free[node] += count
        for node, down in self.nodes.get(at, ()):
            (self.down.add if down else self.down.discard)(node)
        self.demand += self.wanted.get(at, 0)


def pool_states(run: Run, at: Callable[[float], datetime], pool: Pool) -> Iterator[PoolState]:
    """A row for every instant at which something changed.

    What was reserved is not told apart from what was stranded: the simulation keeps no record of reservations.
    """
    sweep = _Sweep(run)
    before: tuple[object, ...] = ()
    last: datetime | None = None
    for instant in sweep.instants():
        sweep.advance(instant)
        up = [count for node, count in sweep.free.items() if node not in sweep.down]
        free = sum(up)
        now = (free, sweep.demand)
        when = at(instant)
        if now == before or when == last:
            continue
        before, last = now, when
        yield PoolState(
            pool=pool,
            at=when,
            free=Decimal(free),
            reserved=Decimal(0),
            stranded=Decimal(min(free, sweep.demand)),
            demand=Decimal(sweep.demand),
            pieces={str(size): number for size, number in sorted(Counter(up).items()) if size},
        )
