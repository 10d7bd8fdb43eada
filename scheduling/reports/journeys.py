"""What happened to jobs on their way: first results, evictions, and how good the start estimates were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from django.db import connection

from scheduling.reports.estimators import Curve, Percentile, kaplan_meier, percentile
from scheduling.reports.scope import Scope

# -- time to first result ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstResult:
    """Seconds from submit to the first output; ``key`` a team id or ``None`` for all. Jobs that may still give one
    are censored at the cut-off; jobs that ended without any are counted apart."""

    key: int | None
    curve: Curve
    without: int


_FIRST_RESULT = """
SELECT team_id, kind, string_agg(int8send((extract(epoch FROM took) * 1000000)::bigint), ''::bytea) FROM (
    SELECT j.team_id,
           CASE WHEN r.at <= %(until)s THEN 'given' WHEN j.finished_at IS NULL THEN 'open' ELSE 'without' END AS kind,
           greatest(CASE WHEN r.at <= %(until)s THEN r.at ELSE coalesce(j.finished_at, %(until)s) END - j.submitted_at,
                    interval '0') AS took
    FROM scheduling_job j CROSS JOIN LATERAL (SELECT coalesce(
        j.first_result_at,
        CASE WHEN j.first_result_at IS NULL AND j.checkpoint_every IS NOT NULL THEN (
            SELECT min(m.at) FROM scheduling_attempt t JOIN scheduling_mark m ON m.attempt_id = t.id WHERE t.job_id = j.id) END,
        CASE WHEN j.state = 'succeeded' THEN j.finished_at END) AS at) AS r
    WHERE j.submitted_at >= %(since)s AND j.submitted_at < %(until)s AND {where}
) AS x GROUP BY 1, 2
"""


def first_result(scope: Scope) -> list[FirstResult]:
    """First row: all together; then one per team. First output mark, else first checkpoint, else end of the first
    success (design.md 7)."""
    parts, values = _job_where(scope)
    found: dict[int, dict[str, np.ndarray]] = {}
    with connection.cursor() as cursor:
        cursor.execute("SET jit = off")
        cursor.execute(_FIRST_RESULT.format(where=parts), {"since": scope.since, "until": scope.end, **values})
        for team, kind, packed in cursor.fetchall():
            found.setdefault(team, {})[kind] = np.frombuffer(packed, dtype=">i8") / 1e6

    def row(key: int | None, teams: list[int]) -> FirstResult:
        def joined(kind: str) -> np.ndarray:
            return np.concatenate([found[team].get(kind, np.empty(0)) for team in teams] or [np.empty(0)])

        return FirstResult(key, kaplan_meier(joined("given"), joined("open")), int(joined("without").size))

    return [row(None, sorted(found)), *(row(team, [team]) for team in sorted(found))]


def _job_where(scope: Scope) -> tuple[str, dict[str, object]]:
    parts, values = ["TRUE"], {}
    if scope.teams is not None:
        parts.append("j.team_id = ANY(%(teams)s)")
        values["teams"] = sorted(scope.teams)
    if scope.pools is not None:
        parts.append("j.pools && %(pools)s::bigint[]")
        values["pools"] = sorted(scope.pools)
    if scope.classes is not None:
        parts.append("j.workload_class = ANY(%(classes)s)")
        values["classes"] = sorted(scope.classes)
    return " AND ".join(parts), values


# -- preemption ledger -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Eviction:
    """Evictions of ``victim``'s runs for jobs of ``gainer`` (``None`` = for a window or its own job)."""

    victim: int
    gainer: int | None
    reason: str
    evictions: int
    lost_gpu_hours: float
    gpus: float


def preemptions(scope: Scope) -> list[Eviction]:
    """Runs that ended as preempted in the range; a team sees those it lost and those it gained from."""
    where, values = ["TRUE"], []
    if scope.teams is not None:
        where.append("(t.team_id = ANY(%s) OR f.team_id = ANY(%s))")
        values += [sorted(scope.teams)] * 2
    if scope.pools is not None:
        where.append("t.pool_id = ANY(%s)")
        values.append(sorted(scope.pools))
    if scope.classes is not None:
        where.append("j.workload_class = ANY(%s)")
        values.append(sorted(scope.classes))
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT t.team_id, f.team_id, t.stop_reason, count(*),
                   (sum(t.gpus * extract(epoch FROM greatest(w.stop - greatest(w.start, t.last_checkpoint_at),
                                                             interval '0'))) / 3600)::float, sum(t.gpus)::float
            FROM scheduling_attempt t LEFT JOIN scheduling_job f ON f.id = t.evicted_for_id
            JOIN scheduling_job j ON j.id = t.job_id
            CROSS JOIN LATERAL (SELECT least(coalesce(t.running_at, t.ended_at), t.ended_at) AS start,
                least(coalesce(t.stop_requested_at, t.ended_at), t.ended_at) AS stop) AS w
            WHERE t.outcome = 'preempted' AND t.ended_at >= %s AND t.ended_at < %s AND {" AND ".join(where)}
            GROUP BY 1, 2, 3 ORDER BY 5 DESC
            """,
            [scope.since, scope.end, *values],
        )
        return [Eviction(*row) for row in cursor.fetchall()]


# -- estimates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of the first estimate of each job that started in the range. Errors in seconds, late = positive."""

    n: int
    #: Share that started by the p50 (p90) instant it was told: 0.5 (0.9) would be perfect.
    within_p50: float | None
    within_p90: float | None
    median_error: Percentile
    absolute_error: Percentile


def estimate_accuracy(scope: Scope) -> Accuracy:
    where, values = _job_where(scope)
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT extract(epoch FROM e.started_at - e.p50_at)::float, e.started_at <= e.p90_at FROM (
                SELECT DISTINCT ON (e.job_id) e.* FROM scheduling_estimate e
                WHERE e.started_at >= %(since)s AND e.started_at < %(until)s AND e.p50_at IS NOT NULL
                ORDER BY e.job_id, e.made_at
            ) AS e JOIN scheduling_job j ON j.id = e.job_id WHERE {where}
            """,
            {"since": scope.since, "until": scope.end, **values},
        )
        rows = cursor.fetchall()
    errors = np.array([row[0] for row in rows])
    late = [row[1] for row in rows if row[1] is not None]
    return Accuracy(
        n=len(rows),
        within_p50=float((errors <= 0).mean()) if rows else None,
        within_p90=sum(late) / len(late) if late else None,
        median_error=percentile(errors, 0.5),
        absolute_error=percentile(np.abs(errors), 0.5),
    )
