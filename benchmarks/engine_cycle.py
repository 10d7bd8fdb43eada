"""One cycle of the engine on large installations: time, and the peak of memory.

python -m benchmarks.engine_cycle [SIZE …]     SIZE: small, large, fill, gang
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable

from scheduling.engine.plan import plan
from scheduling.engine.snapshot import (
    GPU,
    Attempt,
    Cluster,
    Job,
    Node,
    Policy,
    Pool,
    Priority,
    Quota,
    Request,
    Slot,
    Snapshot,
    Team,
)

SHAPES = [(1, 1)] * 60 + [(1, 2)] * 12 + [(1, 4)] * 12 + [(1, 8)] * 10 + [(2, 8)] * 4 + [(4, 8)] * 2


def tree(leaves: int, capacity: int) -> list[Team]:
    """Three levels: departments, groups, leaves; guarantees add up to the capacity."""
    departments = max(1, leaves // 50)
    groups = max(1, leaves // 8)
    each = capacity // leaves
    teams: list[Team] = []
    below_group = [sum(1 for leaf in range(leaves) if leaf % groups == g) for g in range(groups)]
    below_department = [sum(below_group[g] for g in range(groups) if g % departments == d) for d in range(departments)]
    for d in range(departments):
        teams.append(Team(len(teams) + 1, f"d{d}", None, {1: Quota(below_department[d] * each * GPU)}))
    for g in range(groups):
        teams.append(Team(len(teams) + 1, f"g{g}", 1 + g % departments, {1: Quota(below_group[g] * each * GPU)}))
    for leaf in range(leaves):
        parent = 1 + departments + leaf % groups
        teams.append(Team(len(teams) + 1, f"t{leaf}", parent, {1: Quota(each * GPU)}))
    return teams


def snapshot(nodes: int, leaves: int, running: int, waiting: int, *, seed: int = 1) -> Snapshot:
    """A nearly full pool of 8-GPU nodes in racks of 16, with a queue of mixed shapes."""
    dice = random.Random(seed)
    teams = tree(leaves, nodes * 8)
    leaf_ids = [team.id for team in teams[-leaves:]]
    rows = tuple(Node(n + 1, f"n{n}", 1, 8, (f"r{n // 16}",)) for n in range(nodes))
    requests = [
        Request((1,), gpus=g, workers=w, min_workers=w, interruptible=free, checkpoint_every=1800.0 if free else None)
        for w, g in SHAPES
        for free in (True, False)
    ]
    free = [8] * nodes
    attempts: list[Attempt] = []
    at = 0
    while len(attempts) < running and at < nodes:
        size = dice.choice([1, 2, 4, 4, 8, 8])
        if size > free[at]:
            at += 1
            continue
        devices = ((1 << size) - 1) << (8 - free[at])
        free[at] -= size
        number = len(attempts) + 1
        request = Request((1,), gpus=size, interruptible=dice.random() < 0.6, checkpoint_every=1800.0)
        job = Job(
            1_000_000 + number, f"r{number}", dice.choice(leaf_ids), request, walltime=dice.choice([None, 86_400.0])
        )
        attempts.append(Attempt(number, job, 1, (Slot(at + 1, devices),), started=-dice.random() * 80_000))
    jobs = tuple(
        Job(
            n + 1,
            f"j{n}",
            dice.choice(leaf_ids),
            dice.choice(requests),
            Priority(dice.choice([0, 1, 1, 1, 2])),
            -dice.random() * 1e5,
            dice.choice([None, 3600.0, 14_400.0, 86_400.0]),
        )
        for n in range(waiting)
    )
    return Snapshot(
        0.0, Policy(), (Cluster(1, "c", ("rack",)),), (Pool(1, "p", 1),), rows, tuple(teams), jobs, tuple(attempts)
    )


def fill() -> Snapshot:
    """4,000 one-GPU jobs on 500 empty nodes."""
    base = snapshot(500, 40, 0, 0)
    leaf = base.teams[-1].id
    request = Request((1,), gpus=1, interruptible=True)
    jobs = tuple(Job(n + 1, f"j{n}", leaf - n % 40, request, submitted=float(n)) for n in range(4000))
    return Snapshot(5000.0, base.policy, base.clusters, base.pools, base.nodes, base.teams, jobs)


def gang() -> Snapshot:
    """The large installation, and first in line a gang of 80 GPUs that cannot run."""
    base = snapshot(10_000, 500, 20_000, 100_000)
    request = Request((1,), gpus=8, workers=10, min_workers=10, interruptible=True)
    first = Job(999_999, "gang", base.teams[-1].id, request, Priority.URGENT, -1e9)
    return Snapshot(
        0.0, base.policy, base.clusters, base.pools, base.nodes, base.teams, (first, *base.waiting), base.running
    )


CASES: dict[str, tuple[str, Callable[[], Snapshot]]] = {
    "small": ("1,250 nodes, 100 teams, 2,500 running, 10,000 waiting", lambda: snapshot(1250, 100, 2500, 10_000)),
    "large": (
        "10,000 nodes, 500 teams, 20,000 running, 100,000 waiting",
        lambda: snapshot(10_000, 500, 20_000, 100_000),
    ),
    "fill": ("4,000 one-GPU jobs fill 500 nodes", fill),
    "gang": ("large, with an 80-GPU gang that cannot run", gang),
}


def measure(name: str, repeats: int = 3) -> str:
    text, make = CASES[name]
    made = make()
    rows = []
    for explain in (True, False):
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            decided = plan(made, explain=explain)
            times.append(time.perf_counter() - began)
        rows.append((min(times), decided))
    (with_reasons, decided), (without, _) = rows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"| {text} | {with_reasons * 1000:,.0f} | {without * 1000:,.0f} | {len(decided.starts):,} | "
        f"{len(decided.evictions):,} | {len(decided.blocked):,} | {peak:,.0f} |"
    )


HEADER = (
    "| case | cycle, ms | without reasons, ms | starts | evictions | explained | peak, MB |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main(names: list[str]) -> None:
    print(HEADER)
    for name in names or list(CASES):
        print(measure(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
