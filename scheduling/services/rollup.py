"""Hourly roll-ups of the ledger: brought up to date, rebuilt, verified.

The roll-up is a copy: dropping and rebuilding it gives the same rows. Hours that the ledger's triggers marked
(``DirtyRange``) are worked out anew, and so is every hour since the last run; the running hour is left to the reader
(``reports.hours``), who counts running jobs up to the present.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import Max, Min

from scheduling.models import DirtyRange, HourlyUse, RollupState
from scheduling.reports.intervals import hour_ceil, hour_floor
from scheduling.reports.ledger_sql import RESULT, STATES, parameters
from scheduling.services import clock

#: Hours worked out in one statement; bounds memory and the length of a transaction.
CHUNK = timedelta(days=92)
#: pg_advisory_xact_lock key: one writer of the roll-up at a time.
LOCK = 0x9907_0110


@dataclass(frozen=True, slots=True)
class Problem:
    """A difference between the ledger and what adds up. Amounts in GPU-microseconds."""

    hour: datetime
    pool: str
    message: str

    def __str__(self) -> str:
        return f"{self.hour:%Y-%m-%d %H:%M}Z pool {self.pool}: {self.message}"


def roll_up(now: datetime | None = None) -> int:
    """Bring the roll-up up to the last full hour; returns how many hours were worked out. Twice changes nothing."""
    began = time.monotonic()
    now = now or clock.now()
    with transaction.atomic():
        _lock()
        state, _ = RollupState.objects.select_for_update().get_or_create(pk=1)
        until = hour_floor(now)
        since = state.rolled_until or _beginning()
        taken = list(DirtyRange.objects.values_list("id", "since", "until"))
        ranges = [(hour_floor(first), min(hour_ceil(last), until)) for _, first, last in taken]
        if since is not None:
            ranges.append((hour_floor(since), until))
        hours = 0
        for first, last in _merged(ranges):
            hours += _write(first, last)
        DirtyRange.objects.filter(id__in=[row[0] for row in taken]).delete()
        if since is not None:
            state.rolled_until = max(until, state.rolled_until or until)
        state.finished_at, state.seconds = now, time.monotonic() - began
        state.save()
    return hours


def rebuild(now: datetime | None = None, progress: Callable[[float], None] | None = None) -> int:
    """Throw the roll-up away and work it out again from the ledger; the rows are the same. Returns the hours."""
    began = time.monotonic()
    now = now or clock.now()
    with transaction.atomic():
        _lock()
        state, _ = RollupState.objects.select_for_update().get_or_create(pk=1)
        DirtyRange.objects.all().delete()
        HourlyUse.objects.all().delete()
        since, until = _beginning(), hour_floor(now)
        hours = 0
        if since is not None:
            first = start = hour_floor(since)
            while start < until:
                stop = min(start + CHUNK, until)
                hours += _write(start, stop)
                start = stop
                if progress is not None:
                    progress((stop - first) / (until - first))
            state.rolled_until = until
        state.finished_at, state.seconds = now, time.monotonic() - began
        state.save()
    return hours


def verify_rollups(since: datetime, until: datetime) -> list[Problem]:
    """Every hour: the states add up to the capacity, nothing is negative, and the roll-up equals the ledger.

    ``since`` and ``until`` are cut to full hours. At most 1,000 problems are returned.
    """
    since, until = hour_ceil(since), hour_floor(until)
    problems: list[Problem] = []
    with connection.cursor() as cursor:
        start = since
        while start < until and len(problems) < 1000:
            stop = min(start + CHUNK, until)
            cursor.execute(
                f"SELECT p.name, x.* FROM ({_DIFFERENCES}) AS x LEFT JOIN scheduling_pool p ON p.id = x.pool_id LIMIT 1000",
                parameters(start, stop),
            )
            for pool, hour, _, capacity, states, negative, differing in cursor.fetchall():
                if capacity != states:
                    problems.append(
                        Problem(hour, pool, f"capacity {capacity} but the states add up to {states} GPU-microseconds")
                    )
                if negative:
                    problems.append(Problem(hour, pool, f"more held than there is: {negative} GPU-microseconds"))
                if differing:
                    problems.append(
                        Problem(hour, pool, f"{differing} rows differ from the ledger: rebuild the roll-up")
                    )
            start = stop
    return problems


_ADDED = (
    "capacity", "down", "maintenance", "free", "stranded", "reserved", "startup", "no_activity", "lost_failed",
    "lost_preempted", "productive", "unknown", "busy", "measured", "overlap", "excess",
)  # fmt: skip
_KEY = "hour, pool_id, team_id, workload_class"
_DIFFERENCES = f"""
WITH fresh ({", ".join(RESULT)}) AS ({STATES}),
stored AS (
    SELECT {", ".join(RESULT)} FROM scheduling_hourlyuse WHERE hour >= %(since)s AND hour < %(until)s
), differing AS (
    SELECT hour, pool_id, count(*) AS rows FROM (
        (SELECT * FROM fresh EXCEPT ALL SELECT * FROM stored) UNION ALL (SELECT * FROM stored EXCEPT ALL SELECT * FROM fresh)
    ) AS d GROUP BY 1, 2
), sums AS (
    SELECT hour, pool_id, sum(capacity) AS capacity,
           sum({" + ".join(c for c in _ADDED[1:] if c not in ("busy", "measured", "overlap", "excess"))}) AS states,
           sum(least(free, 0)) AS negative
    FROM fresh GROUP BY 1, 2
)
SELECT coalesce(s.hour, d.hour) AS hour, coalesce(s.pool_id, d.pool_id) AS pool_id, coalesce(s.capacity, 0),
       coalesce(s.states, 0), coalesce(-s.negative, 0), coalesce(d.rows, 0)
FROM sums s FULL JOIN differing d ON d.hour = s.hour AND d.pool_id = s.pool_id
WHERE s.capacity IS DISTINCT FROM s.states OR s.negative < 0 OR d.rows > 0
ORDER BY 1, 2
"""


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])


def _beginning() -> datetime | None:
    """First instant of which the ledger knows anything; ``None`` while there is no hardware."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT least((SELECT min(lower(exists)) FROM scheduling_gpu),"
            " (SELECT min(started_at) FROM scheduling_attempt))"
        )
        first: datetime | None = cursor.fetchone()[0]
    return first


def _merged(ranges: list[tuple[datetime, datetime]]) -> list[tuple[datetime, datetime]]:
    merged: list[tuple[datetime, datetime]] = []
    for since, until in sorted(row for row in ranges if row[0] < row[1]):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((since, until))
    return merged


def _write(since: datetime, until: datetime) -> int:
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM scheduling_hourlyuse WHERE hour >= %s AND hour < %s", [since, until])
        # Estimates of the many steps are far too high, and compiling the plan would cost more than running it.
        cursor.execute("SET LOCAL jit = off")
        cursor.execute("SET LOCAL work_mem = '128MB'")
        cursor.execute(f"INSERT INTO scheduling_hourlyuse ({', '.join(RESULT)}) {STATES}", parameters(since, until))
    return int((until - since) / timedelta(hours=1))


def rolled_range() -> tuple[datetime | None, datetime | None]:
    """First hour in the roll-up and the end of its last one."""
    bounds = HourlyUse.objects.aggregate(first=Min("hour"), last=Max("hour"))
    return bounds["first"], bounds["last"] and bounds["last"] + timedelta(hours=1)
