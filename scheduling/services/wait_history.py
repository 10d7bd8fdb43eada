"""Why jobs waited, over time: once a minute the first blocker of each waiting job is noted if it has changed.

A row per job and change, not per job and cycle: blockers that come and go within a minute leave no trace, and 100,000
waiting jobs whose reason stays cost no write.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import connection

from scheduling.services import clock

#: A wait that began less than this before a note began with the reason that is noted first.
AT_ONCE = timedelta(minutes=2)

_NOTE = """
INSERT INTO scheduling_waitreason (job_id, code, blocker, since)
SELECT j.id, g.code, coalesce(g.blockers -> 0, '{}'::jsonb),
       CASE WHEN last.code IS NULL AND wait.since > %(at_once)s THEN least(wait.since, %(now)s) ELSE %(now)s END
FROM scheduling_job j
JOIN scheduling_reasongroup g ON g.id = j.reason_group_id
CROSS JOIN LATERAL (
    SELECT coalesce(CASE WHEN j.first_started_at IS NOT NULL
                    THEN (SELECT max(a.ended_at) FROM scheduling_attempt a WHERE a.job_id = j.id) END,
                    j.submitted_at) AS since
) wait
LEFT JOIN LATERAL (
    SELECT w.code FROM scheduling_waitreason w WHERE w.job_id = j.id AND w.since >= wait.since
    ORDER BY w.since DESC LIMIT 1
) last ON true
WHERE j.state = 'waiting' AND last.code IS DISTINCT FROM g.code
"""


def note_wait_reasons(now: datetime | None = None) -> int:
    """Write what has changed since the last call; returns the number of rows."""
    now = now or clock.now()
    with connection.cursor() as cursor:
        cursor.execute(_NOTE, {"now": now, "at_once": now - AT_ONCE})
        return int(cursor.rowcount)
