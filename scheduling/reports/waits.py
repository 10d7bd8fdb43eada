"""How long does a new experiment wait?

The cohort is every job whose first attempt could have started (submitted, not-before reached, dependencies met) inside
the range. Jobs that still wait are censored at the cut-off (Kaplan-Meier); jobs cancelled before they ever started are
counted apart. Re-queues (after an eviction or a failure) are kept apart from first starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from django.db import connection
from numpy.typing import NDArray

from scheduling.reports.estimators import Curve, Percentile, kaplan_meier
from scheduling.reports.scope import Scope

#: Upper bounds of the sizes that jobs are grouped by, in GPUs.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
GROUPINGS = ("team", "pool", "workload_class", "size", "hour")


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds. ``key`` is what the group is of: a team or pool id, a class, a size in words, a local hour."""

    key: object
    curve: Curve
    cancelled: int

    @property
    def n(self) -> int:
        return self.curve.n

    @property
    def still_waiting(self) -> int:
        return self.curve.censored

    def percentile(self, share: float) -> Percentile:
        return self.curve.percentile(share)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Jobs waiting at the cut-off by their first blocker, and the GPUs they ask for."""

    code: str
    jobs: int
    gpus: float


@dataclass(frozen=True, slots=True)
class WaitReport:
    first: Waits
    requeued: Waits
    groups: dict[str, list[Waits]]
    blocked: list[Blocked]


@dataclass(slots=True)
class _Cohort:
    """Parallel arrays, one entry per key of the query; waits as arrays of microseconds."""

    keys: list[tuple[int, int | None, str, int, int]]
    waits: list[NDArray[np.int64]]
    kinds: list[str]


# Waits leave the database as one byte string per group: a million numbers in well under a second.
_FIRST = """
SELECT team_id, pool_id, workload_class, size, hour, kind,
       string_agg(int8send((extract(epoch FROM wait) * 1000000)::bigint), ''::bytea)
FROM (
    SELECT t.team_id, t.pool_id, j.workload_class, width_bucket(t.gpus, %(sizes)s::numeric[]) AS size,
           extract(hour FROM t.eligible_at AT TIME ZONE %(zone)s)::int AS hour,
           'started' AS kind, greatest(t.started_at - t.eligible_at, interval '0') AS wait
    FROM scheduling_attempt t JOIN scheduling_job j ON j.id = t.job_id
    WHERE t.number = 1 AND t.eligible_at >= %(since)s AND t.eligible_at < %(until)s AND {started}
    UNION ALL
    SELECT j.team_id, j.pools[1], j.workload_class, width_bucket(j.workers * greatest(j.gpus, 1), %(sizes)s::int[]),
           extract(hour FROM j.eligible_at AT TIME ZONE %(zone)s)::int,
           CASE j.state WHEN 'waiting' THEN 'waiting' ELSE 'cancelled' END,
           greatest(coalesce(j.finished_at, %(until)s) - j.eligible_at, interval '0')
    FROM scheduling_job j
    WHERE j.first_started_at IS NULL AND j.state IN ('waiting', 'cancelled', 'failed')
      AND j.eligible_at >= %(since)s AND j.eligible_at < %(until)s AND NOT j.held AND j.unmet_dependencies = 0 AND {never}
) AS x GROUP BY 1, 2, 3, 4, 5, 6
"""

_REQUEUED = """
SELECT kind, string_agg(int8send((extract(epoch FROM wait) * 1000000)::bigint), ''::bytea) FROM (
    SELECT 'started' AS kind, greatest(t.started_at - t.eligible_at, interval '0') AS wait
    FROM scheduling_attempt t JOIN scheduling_job j ON j.id = t.job_id
    WHERE t.number > 1 AND t.eligible_at >= %(since)s AND t.eligible_at < %(until)s AND {started}
    UNION ALL
    SELECT CASE j.state WHEN 'waiting' THEN 'waiting' ELSE 'cancelled' END,
           greatest(coalesce(j.finished_at, %(until)s) - j.eligible_at, interval '0')
    FROM scheduling_job j
    WHERE j.first_started_at IS NOT NULL AND j.state = 'waiting'
      AND j.eligible_at >= %(since)s AND j.eligible_at < %(until)s AND {never}
) AS x GROUP BY 1
"""

_BLOCKED = """
SELECT coalesce(g.code, CASE WHEN j.held THEN 'held' WHEN j.unmet_dependencies > 0 THEN 'dependency' ELSE 'new' END),
       count(*), sum(j.workers * greatest(j.gpus, coalesce(j.share, 1)))::float
FROM scheduling_job j LEFT JOIN scheduling_reasongroup g ON g.id = j.reason_group_id
WHERE j.state = 'waiting' AND {never} GROUP BY 1 ORDER BY 3 DESC
"""


def waits(scope: Scope) -> WaitReport:
    cohort = _first_starts(scope)
    return WaitReport(
        first=_group(cohort, None, range(len(cohort.keys))),
        requeued=_requeued(scope),
        groups={name: _groups(cohort, position) for position, name in enumerate(GROUPINGS_IN_KEY)},
        blocked=_blocked(scope),
    )


#: Order of the keys in ``_FIRST``.
GROUPINGS_IN_KEY = ("team", "pool", "workload_class", "size", "hour")


def first_start(scope: Scope) -> Waits:
    """Only the whole, without groups: for the overview."""
    cohort = _first_starts(scope)
    return _group(cohort, None, range(len(cohort.keys)))


def _parameters(scope: Scope) -> dict[str, object]:
    return {
        "since": scope.since,
        "until": scope.end,
        "zone": scope.zone.key,
        "sizes": [bound + 1 for bound in SIZES],
        "teams": None if scope.teams is None else sorted(scope.teams),
        "pools": None if scope.pools is None else sorted(scope.pools),
        "classes": None if scope.classes is None else sorted(scope.classes),
    }


def _where(sql: str, scope: Scope) -> str:
    started, never = ["TRUE"], ["TRUE"]
    if scope.teams is not None:
        started.append("t.team_id = ANY(%(teams)s)")
        never.append("j.team_id = ANY(%(teams)s)")
    if scope.pools is not None:
        started.append("t.pool_id = ANY(%(pools)s)")
        never.append("j.pools && %(pools)s::bigint[]")
    if scope.classes is not None:
        started.append("j.workload_class = ANY(%(classes)s)")
        never.append("j.workload_class = ANY(%(classes)s)")
    return sql.format(started=" AND ".join(started), never=" AND ".join(never))


def _first_starts(scope: Scope) -> _Cohort:
    cohort = _Cohort([], [], [])
    with connection.cursor() as cursor:
        cursor.execute("SET jit = off")
        cursor.execute(_where(_FIRST, scope), _parameters(scope))
        for team, pool, workload, size, hour, kind, packed in cursor.fetchall():
            cohort.keys.append((team, pool, workload, size, hour))
            cohort.kinds.append(kind)
            cohort.waits.append(np.frombuffer(packed, dtype=">i8"))
    return cohort


def _group(cohort: _Cohort, key: object, places: object) -> Waits:
    parts: dict[str, list[NDArray[np.int64]]] = {"started": [], "waiting": [], "cancelled": []}
    for place in places:  # type: ignore[attr-defined]
        parts[cohort.kinds[place]].append(cohort.waits[place])

    def seconds(kind: str) -> NDArray[np.float64]:
        return np.concatenate(parts[kind]) / 1e6 if parts[kind] else np.empty(0)

    return Waits(
        key, kaplan_meier(seconds("started"), seconds("waiting")), sum(part.size for part in parts["cancelled"])
    )


def _groups(cohort: _Cohort, position: int) -> list[Waits]:
    places: dict[object, list[int]] = {}
    for place, key in enumerate(cohort.keys):
        places.setdefault(key[position], []).append(place)
    return [_group(cohort, key, places[key]) for key in sorted(places, key=lambda key: (key is None, key))]  # type: ignore[type-var]


def _requeued(scope: Scope) -> Waits:
    parts = {"started": np.empty(0), "waiting": np.empty(0), "cancelled": np.empty(0)}
    with connection.cursor() as cursor:
        cursor.execute(_where(_REQUEUED, scope), _parameters(scope))
        for kind, packed in cursor.fetchall():
            parts[kind] = np.frombuffer(packed, dtype=">i8") / 1e6
    return Waits(None, kaplan_meier(parts["started"], parts["waiting"]), int(parts["cancelled"].size))


def _blocked(scope: Scope) -> list[Blocked]:
    with connection.cursor() as cursor:
        cursor.execute(_where(_BLOCKED, scope), _parameters(scope))
        return [Blocked(*row) for row in cursor.fetchall()]


def size_label(bucket: int) -> str:
    """``3–4 GPUs`` for the position that ``SIZES`` gives."""
    low = 1 if bucket == 0 else SIZES[bucket - 1] + 1
    if bucket >= len(SIZES):
        return f"over {SIZES[-1]} GPUs"
    high = SIZES[bucket]
    return f"{high} GPU{'s' if high > 1 else ''}" if low == high else f"{low}–{high} GPUs"
