"""The states of every GPU-microsecond (design.md 7.1) out of the ledger, as one SQL statement.

Every interval is two steps, ``+rate`` at its start and ``-rate`` at its end. A step adds to its own hour what is left
of it, and a whole hour to each later one: so the cost does not depend on how long anything ran, and all sums are
integers (millionths of a GPU times microseconds).

Which state wins: a node that is *down* beats an allocation on it (told apart as ``overlap``); an allocation beats
*drained*, *maintenance* and *unknown* of its node. Inside an allocation: start-up and grace, then lost work, then
measured without activity, then productive; work without a measurement is unknown. What nobody holds is split by the
pool's recorded state into reserved, stranded and free.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from scheduling.reports.intervals import epoch_us

#: Columns of ``HourlyUse`` in the order of the codes below.
CAPACITY, DOWN, MAINTENANCE, RESERVED, STRANDED, STARTUP, NO_ACTIVITY, LOST_FAILED = range(1, 9)
LOST_PREEMPTED, PRODUCTIVE, UNKNOWN, BUSY, MEASURED, OVERLAP = range(9, 15)

COLUMNS: dict[str, int] = {
    "capacity": CAPACITY,
    "down": DOWN,
    "maintenance": MAINTENANCE,
    "reserved": RESERVED,
    "stranded": STRANDED,
    "startup": STARTUP,
    "no_activity": NO_ACTIVITY,
    "lost_failed": LOST_FAILED,
    "lost_preempted": LOST_PREEMPTED,
    "productive": PRODUCTIVE,
    "unknown": UNKNOWN,
    "busy": BUSY,
    "measured": MEASURED,
    "overlap": OVERLAP,
}
ALLOCATED = ("startup", "no_activity", "lost_failed", "lost_preempted", "productive", "unknown")

#: Columns of the result, in order.
RESULT = (
    "hour", "pool_id", "team_id", "workload_class", "capacity", "down", "maintenance", "free", "stranded", "reserved",
    "startup", "no_activity", "lost_failed", "lost_preempted", "productive", "unknown", "busy", "measured", "overlap",
    "excess",
)  # fmt: skip


def _us(expression: str) -> str:
    return f"(extract(epoch FROM {expression}) * 1000000)::bigint"


_NODE_INTERVALS = f"""
off AS MATERIALIZED (
    SELECT n.node_id, n.state, greatest({_us("lower(n.during)")}, %(since_us)s) AS s,
           least(coalesce({_us("upper(n.during)")}, %(until_us)s), %(until_us)s) AS e
    FROM scheduling_nodeinterval n WHERE n.during && tstzrange(%(since)s, %(until)s)
), down_nodes AS MATERIALIZED (
    SELECT node_id, range_agg(int8range(s, e)) AS during FROM off WHERE state = 'down' AND s < e GROUP BY node_id
)"""

# Work begins when the cluster confirms the start and ends when the stop is asked for; of a run that ended badly,
# the work since its last checkpoint (all of it without one) is lost.
_PARTS = f"""
span_of AS MATERIALIZED (
    SELECT a.id, a.gpu_id, a.pool_id, a.team_id, j.workload_class, (a.share * 1000000)::bigint AS rate,
           greatest({_us("lower(a.during)")}, %(since_us)s) AS s,
           least(coalesce({_us("upper(a.during)")}, %(until_us)s), %(until_us)s) AS e,
           {_us("t.running_at")} AS running, {_us("t.stop_requested_at")} AS stopping,
           {_us("t.last_checkpoint_at")} AS checkpoint, t.outcome
    FROM scheduling_allocation a
    JOIN scheduling_attempt t ON t.id = a.attempt_id
    JOIN scheduling_job j ON j.id = t.job_id
    WHERE a.during && tstzrange(%(since)s, %(until)s)
), work AS MATERIALIZED (
    SELECT *, least(greatest(coalesce(running, e), s), least(greatest(coalesce(stopping, e), s), e)) AS w0,
           least(greatest(coalesce(stopping, e), s), e) AS w1
    FROM span_of WHERE s < e
), loss AS MATERIALIZED (
    SELECT *, CASE WHEN outcome IN ('failed', 'timed_out', 'node_failed', 'lost', 'preempted')
                   THEN least(greatest(coalesce(checkpoint, w0), w0), w1) ELSE w1 END AS l0
    FROM work
), held AS MATERIALIZED (
    SELECT l.id, l.gpu_id, l.pool_id, l.team_id, l.workload_class, l.rate, v.code, v.s, v.e
    FROM loss l CROSS JOIN LATERAL (VALUES
        ({STARTUP}, l.s, l.w0), ({UNKNOWN}, l.w0, l.l0),
        (CASE l.outcome WHEN 'preempted' THEN {LOST_PREEMPTED} ELSE {LOST_FAILED} END, l.l0, l.w1),
        ({STARTUP}, l.w1, l.e)
    ) AS v(code, s, e) WHERE v.s < v.e
), on_down AS MATERIALIZED (
    SELECT h.*, d.during FROM held h JOIN scheduling_gpu g ON g.id = h.gpu_id JOIN down_nodes d ON d.node_id = g.node_id
    WHERE d.during && int8range(h.s, h.e)
), part AS MATERIALIZED (
    SELECT h.* FROM held h WHERE NOT EXISTS (SELECT 1 FROM on_down o WHERE o.id = h.id AND o.s = h.s)
    UNION ALL
    SELECT o.id, o.gpu_id, o.pool_id, o.team_id, o.workload_class, o.rate, o.code, lower(r), upper(r)
    FROM on_down o CROSS JOIN LATERAL unnest(int8multirange(int8range(o.s, o.e)) - o.during) AS r
)"""

_MEASURED = f"""
seen AS MATERIALIZED (
    SELECT p.pool_id, p.team_id, p.workload_class, p.rate, greatest(p.s, m.s) AS s, least(p.e, m.e) AS e,
           m.active, m.activity
    FROM (
        SELECT x.allocation_id, x.active, x.activity, {_us("lower(x.during)")} AS s, {_us("upper(x.during)")} AS e
        FROM scheduling_activityspan x WHERE x.during && tstzrange(%(since)s, %(until)s)
    ) AS m
    JOIN part p ON p.id = m.allocation_id AND p.code = {UNKNOWN} AND p.s < m.e AND m.s < p.e
)"""

_PIECES = f"""
piece AS (
    SELECT pool_id, team_id, workload_class, code, s, e, rate::numeric AS rate FROM part
    UNION ALL
    SELECT s.pool_id, s.team_id, s.workload_class, v.code, s.s, s.e, v.rate FROM seen s CROSS JOIN LATERAL (VALUES
        ({UNKNOWN}, -s.rate::numeric), (CASE WHEN s.active THEN {PRODUCTIVE} ELSE {NO_ACTIVITY} END, s.rate::numeric),
        ({BUSY}, s.rate * s.activity), ({MEASURED}, s.rate::numeric)
    ) AS v(code, rate)
    UNION ALL
    SELECT o.pool_id, o.team_id, o.workload_class, {OVERLAP}, lower(r), upper(r), o.rate
    FROM on_down o CROSS JOIN LATERAL unnest(int8multirange(int8range(o.s, o.e)) * o.during) AS r
    UNION ALL
    SELECT pool_id, NULL, '', {CAPACITY}, greatest({_us("lower(exists)")}, %(since_us)s),
           least(coalesce({_us("upper(exists)")}, %(until_us)s), %(until_us)s), 1000000
    FROM scheduling_gpu WHERE exists && tstzrange(%(since)s, %(until)s)
    UNION ALL
    SELECT g.pool_id, NULL, '', c.code, greatest(o.s, {_us("lower(g.exists)")}),
           least(o.e, coalesce({_us("upper(g.exists)")}, o.e)), 1000000
    FROM off o JOIN scheduling_gpu g ON g.node_id = o.node_id
    CROSS JOIN LATERAL (SELECT CASE o.state WHEN 'maintenance' THEN {MAINTENANCE} WHEN 'unknown' THEN {UNKNOWN}
                               ELSE {DOWN} END AS code) AS c
    UNION ALL
    SELECT h.pool_id, NULL, '', c.code, greatest(o.s, h.s), least(o.e, h.e), -h.rate
    FROM off o JOIN scheduling_gpu g ON g.node_id = o.node_id JOIN held h ON h.gpu_id = g.id AND h.s < o.e AND o.s < h.e
    CROSS JOIN LATERAL (SELECT CASE o.state WHEN 'maintenance' THEN {MAINTENANCE} WHEN 'unknown' THEN {UNKNOWN}
                               ELSE {DOWN} END AS code) AS c
    WHERE o.state <> 'down'
    UNION ALL
    SELECT q.pool_id, NULL, '', v.code, greatest(q.s, %(since_us)s), least(coalesce(q.e, %(until_us)s), %(until_us)s),
           v.rate
    FROM (
        SELECT b.pool_id, b.reserved, b.stranded, {_us("b.at")} AS s,
               {_us("lead(b.at) OVER (PARTITION BY b.pool_id ORDER BY b.at)")} AS e
        FROM scheduling_pool p CROSS JOIN LATERAL (
            SELECT coalesce(max(x.at), '-infinity') AS at FROM scheduling_poolstate x
            WHERE x.pool_id = p.id AND x.at <= %(since)s
        ) AS f JOIN scheduling_poolstate b ON b.pool_id = p.id AND b.at >= f.at AND b.at < %(until)s
    ) AS q CROSS JOIN LATERAL (VALUES ({RESERVED}, q.reserved * 1000000), ({STRANDED}, q.stranded * 1000000))
        AS v(code, rate)
    WHERE v.rate > 0
), step AS (
    SELECT p.pool_id, coalesce(p.team_id, 0) AS team, p.workload_class, p.code, v.at / 3600000000 AS hour,
           v.rate * ((v.at / 3600000000 + 1) * 3600000000 - v.at) AS partial, v.rate AS delta
    FROM piece p CROSS JOIN LATERAL (VALUES (p.s, p.rate), (p.e, -p.rate)) AS v(at, rate)
    WHERE p.s < p.e
)"""


def _pivot() -> str:
    sums = ", ".join(
        f"coalesce(sum(partial) FILTER (WHERE code = {code}), 0) AS p{code},"
        f" coalesce(sum(delta) FILTER (WHERE code = {code}), 0) AS d{code}"
        for code in COLUMNS.values()
    )
    running = ", ".join(
        f"p{code} + 3600000000 * (sum(d{code}) OVER earlier - d{code}) AS c{code}" for code in COLUMNS.values()
    )
    again = ", ".join(f"sum(p{code}) AS p{code}, sum(d{code}) AS d{code}" for code in COLUMNS.values())
    zeros = ", ".join("0, 0" for _ in COLUMNS)
    # Hours without a step are added as rows of zeros: an outer join would be planned on estimates that are far off.
    return f"""
wide AS MATERIALIZED (
    SELECT pool_id, team, workload_class, hour, {sums} FROM step GROUP BY 1, 2, 3, 4
), filled AS (
    SELECT pool_id, team, workload_class, hour, {again} FROM (
        SELECT * FROM wide UNION ALL
        SELECT k.pool_id, k.team, k.workload_class, h.hour, {zeros} FROM (
            SELECT pool_id, team, workload_class, min(hour) AS first, max(hour) AS last FROM wide GROUP BY 1, 2, 3
        ) AS k CROSS JOIN LATERAL generate_series(k.first, k.last) AS h(hour)
    ) AS u GROUP BY 1, 2, 3, 4
), dense AS MATERIALIZED (
    SELECT pool_id, team, workload_class, hour, {running} FROM filled
    WINDOW earlier AS (PARTITION BY pool_id, team, workload_class ORDER BY hour)
)"""


def _result() -> str:
    held = " + ".join(f"c{COLUMNS[name]}" for name in ALLOCATED)
    idle = f"c{CAPACITY} - c{DOWN} - c{MAINTENANCE} - c{UNKNOWN} - coalesce(t.held, 0)"
    nonzero = " OR ".join(f"c{code} <> 0" for code in COLUMNS.values())

    def column(code: int) -> str:
        return f"(c{code} * 0.000001)::numeric(28,6)"

    own = ", ".join(column(COLUMNS[name]) for name in (*ALLOCATED, "busy", "measured", "overlap"))
    nobody = """(free * 0.000001)::numeric(28,6), (stranded * 0.000001)::numeric(28,6),
           (reserved * 0.000001)::numeric(28,6)"""
    return f"""
held_in AS (
    SELECT pool_id, hour, sum({held}) AS held FROM dense WHERE team <> 0 GROUP BY 1, 2
), nobody AS (
    SELECT d.*, i.idle - r.reserved - f.stranded AS free, r.reserved, f.stranded,
           c{RESERVED} + c{STRANDED} - r.reserved - f.stranded AS excess
    FROM dense d LEFT JOIN held_in t USING (pool_id, hour)
    CROSS JOIN LATERAL (SELECT {idle} AS idle) AS i
    CROSS JOIN LATERAL (SELECT least(c{RESERVED}, greatest(i.idle, 0)) AS reserved) AS r
    CROSS JOIN LATERAL (SELECT least(c{STRANDED}, greatest(i.idle, 0) - r.reserved) AS stranded) AS f
    WHERE team = 0
)
SELECT to_timestamp(hour * 3600), pool_id, team, workload_class, 0, 0, 0, 0, 0, 0, {own}, 0
FROM dense WHERE team <> 0 AND ({nonzero})
UNION ALL
SELECT to_timestamp(hour * 3600), pool_id, NULL, '', {column(CAPACITY)}, {column(DOWN)}, {column(MAINTENANCE)},
       {nobody}, 0, 0, 0, 0, 0, {column(UNKNOWN)}, 0, 0, 0, (excess * 0.000001)::numeric(28,6)
FROM nobody WHERE {nonzero}
"""


#: Parameters: ``parameters(since, until)``. One row per UTC hour, pool, team and class; columns ``RESULT``.
STATES = "WITH " + ",".join((_NODE_INTERVALS, _PARTS, _MEASURED, _PIECES, _pivot(), _result()))


def parameters(since: datetime, until: datetime) -> dict[str, datetime | int]:
    """For ``STATES``: the ledger between two instants; ``until`` is at most the present."""
    if since >= until:
        raise ValueError(f"since {since.isoformat()} must be before until {until.isoformat()}")
    return {
        "since": since,
        "until": until,
        "since_us": epoch_us(since),
        "until_us": epoch_us(until),
    }


def hour_of(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def hours_between(since: datetime, until: datetime) -> int:
    return int((until - since) / timedelta(hours=1))
