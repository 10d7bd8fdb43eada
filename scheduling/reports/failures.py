"""How often do jobs fail and restart? By number and by GPU-hours, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

from django.db import connection

from scheduling.reports.hours import Use, read
from scheduling.reports.scope import Scope

#: Printed beside every figure: how an end is put under a cause.
RULE = (
    "Every attempt that ended in the range counts once. Cause: preemption if it was evicted; walltime if its time ran "
    "out; GPU error if the node told an XID; node if the node went down or the run was lost; out of memory and network "
    "by exit code and the cluster's words; user code for any other failure. Lost GPU-hours: work since the last "
    "checkpoint, all of it without one; a success loses nothing, a run its owner cancelled neither."
)


@dataclass(frozen=True, slots=True)
class Ends:
    """Attempts that ended alike; hours in GPU-hours."""

    outcome: str
    cause: str
    attempts: int
    gpu_hours: float
    lost_gpu_hours: float


@dataclass(frozen=True, slots=True)
class TeamEnds:
    team: int
    attempts: int
    failed: int
    lost_gpu_hours: float


@dataclass(frozen=True, slots=True)
class Suspect:
    """A node with more faults than its share: ``expected`` if all GPU-hours of its pool were alike; ``chance`` is the
    Poisson probability of at least so many."""

    node: str
    pool: int
    faults: int
    expected: float
    chance: float


@dataclass(frozen=True, slots=True)
class Failures:
    ends: list[Ends]
    by_team: list[TeamEnds]
    #: Jobs finished in the range by their number of restarts.
    restarts: dict[int, int]
    suspects: list[Suspect]
    #: GPU-microseconds by state in the range, for goodput.
    use: Use

    @property
    def attempts(self) -> int:
        return sum(row.attempts for row in self.ends)

    @property
    def failed(self) -> int:
        return sum(row.attempts for row in self.ends if row.outcome not in ("succeeded", "cancelled", "preempted"))

    @property
    def failure_share(self) -> float | None:
        """Failed ends over all ends that were not cancelled or evicted."""
        judged = sum(row.attempts for row in self.ends if row.outcome not in ("cancelled", "preempted"))
        return self.failed / judged if judged else None

    @property
    def restarts_per_job(self) -> float | None:
        jobs = sum(self.restarts.values())
        return sum(number * count for number, count in self.restarts.items()) / jobs if jobs else None


# Lost work as in ledger_sql: between the last checkpoint (or the confirmed start) and the stop.
_ENDS = """
SELECT {what}, count(*), count(*) FILTER (WHERE outcome NOT IN ('succeeded', 'cancelled', 'preempted')),
       (sum(gpus * extract(epoch FROM t.ended_at - t.started_at)) / 3600)::float,
       coalesce(sum(gpus * extract(epoch FROM greatest(w.stop - greatest(w.start, w.saved), interval '0')))
           FILTER (WHERE outcome IN ('failed', 'timed_out', 'node_failed', 'lost', 'preempted')) / 3600, 0)::float
FROM scheduling_attempt t {join}
CROSS JOIN LATERAL (SELECT least(coalesce(running_at, t.ended_at), t.ended_at) AS start,
    least(coalesce(stop_requested_at, t.ended_at), t.ended_at) AS stop, last_checkpoint_at AS saved) AS w
WHERE t.ended_at >= %s AND t.ended_at < %s AND {where} GROUP BY {group} ORDER BY {group}
"""

_RESTARTS = """
SELECT least(number - 1, 10), count(*) FROM (
    SELECT max(t.number) AS number FROM scheduling_job j JOIN scheduling_attempt t ON t.job_id = j.id
    WHERE j.finished_at >= %s AND j.finished_at < %s AND {where} GROUP BY j.id
) AS x GROUP BY 1 ORDER BY 1
"""

_FAULTS = """
WITH fault AS (
    SELECT g.node_id, g.pool_id, count(DISTINCT t.id) AS faults
    FROM scheduling_attempt t JOIN scheduling_allocation a ON a.attempt_id = t.id JOIN scheduling_gpu g ON g.id = a.gpu_id
    WHERE t.ended_at >= %s AND t.ended_at < %s AND t.cause IN ('node', 'xid', 'network') AND {where} GROUP BY 1, 2
), size AS (SELECT pool_id, node_id, count(*) AS gpus FROM scheduling_gpu GROUP BY 1, 2),
pool AS (
    SELECT s.pool_id, sum(s.gpus) AS gpus, (SELECT sum(f.faults) FROM fault f WHERE f.pool_id = s.pool_id) AS faults
    FROM size s GROUP BY 1
)
SELECT n.name, f.pool_id, f.faults, (p.faults * s.gpus / p.gpus)::float
FROM fault f JOIN size s USING (node_id) JOIN pool p ON p.pool_id = f.pool_id JOIN scheduling_node n ON n.id = f.node_id
WHERE f.faults > p.faults * s.gpus / p.gpus ORDER BY f.faults - p.faults * s.gpus / p.gpus DESC LIMIT 50
"""


def failures(scope: Scope) -> Failures:
    join = "JOIN scheduling_job j ON j.id = t.job_id" if scope.classes is not None else ""
    where, values = scope.where("t", classes="j.workload_class")
    span = [scope.since, scope.end]
    with connection.cursor() as cursor:
        cursor.execute("SET jit = off")
        cursor.execute(
            _ENDS.format(what="outcome, cause, t.team_id", join=join, where=where, group="1, 2, 3"), [*span, *values]
        )
        rows = cursor.fetchall()
        cursor.execute(_RESTARTS.format(where=scope.where("t", classes="j.workload_class")[0]), [*span, *values])
        restarts = {int(number): count for number, count in cursor.fetchall()}
        suspects = _suspects(cursor, scope) if scope.whole else []
    ends: dict[tuple[str, str], list[float]] = {}
    teams: dict[int, list[float]] = {}
    for outcome, cause, team, attempts, failed, held, lost in rows:
        for sums, parts in ((ends.setdefault((outcome, cause), [0, 0, 0]), (attempts, held, lost)),
                            (teams.setdefault(team, [0, 0, 0]), (attempts, failed, lost))):  # fmt: skip
            for position, part in enumerate(parts):
                sums[position] += part
    return Failures(
        ends=[Ends(*key, int(a), h, lost) for key, (a, h, lost) in sorted(ends.items(), key=lambda row: -row[1][0])],
        by_team=[TeamEnds(team, int(a), int(f), lost) for team, (a, f, lost) in teams.items()],
        restarts=restarts,
        suspects=suspects,
        use=read(scope, by=()).total,
    )


def _suspects(cursor: object, scope: Scope) -> list[Suspect]:
    where, values = scope.where("t")
    cursor.execute(_FAULTS.format(where=where), [scope.since, scope.end, *values])  # type: ignore[attr-defined]
    rows = [
        Suspect(node, pool, faults, expected, at_least(faults, expected))
        for node, pool, faults, expected in cursor.fetchall()  # type: ignore[attr-defined]
    ]
    return [row for row in rows if row.chance < 0.01][:20]


def at_least(count: int, expected: float) -> float:
    """Poisson probability of ``count`` or more."""
    if expected <= 0:
        return 0.0 if count else 1.0
    below = sum(math.exp(k * math.log(expected) - expected - math.lgamma(k + 1)) for k in range(count))
    return max(0.0, 1.0 - below)
