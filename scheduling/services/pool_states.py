"""What each pool looks like after a cycle: splits its idle time into free, reserved and stranded (design.md 7.1).

The rule, from what the loop stores:

* *free* here: devices that exist, are not broken, on nodes that are up and in no maintenance, held by nobody (a partly
  shared device counts with its rest);
* *reserved*: of those, the devices that a hold or a reservation names, and those on nodes of an advance reservation;
* *demand*: GPUs asked for by waiting jobs that could start (not held, no dependency, not-before, back-off or exhausted
  budget, satisfiable), in each pool they accept;
* *stranded*: of the free and unreserved ones as many as the demand: they are there, something waits, and nothing fits.

A row is written only when it differs from the pool's last one, and holds until the next.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from datetime import datetime, timedelta
from decimal import Decimal

from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.models import Hold, NodeInterval, PoolState, Reservation, Window
from scheduling.services import clock
from scheduling.services.windows import occurrences

#: First blockers of jobs that could not start whatever was free.
NOT_READY = ("unsatisfiable", "held", "dependency", "not-before", "backoff", "budget-exhausted")

_FREE = """
SELECT g.pool_id, g.node_id, g.index, 1 - coalesce(sum(a.share), 0) AS free
FROM scheduling_gpu g JOIN scheduling_node n ON n.id = g.node_id
LEFT JOIN scheduling_allocation a ON a.gpu_id = g.id AND upper_inf(a.during) AND NOT isempty(a.during)
WHERE upper_inf(g.exists) AND NOT g.broken AND n.state = 'up' AND n.retired_at IS NULL AND NOT (n.id = ANY(%s))
GROUP BY g.id HAVING coalesce(sum(a.share), 0) < 1
"""

_DEMAND = """
SELECT p.pool, sum(j.workers * greatest(j.gpus, coalesce(j.share, CASE WHEN j.gpus = 0 THEN 1 ELSE 0 END)))
FROM scheduling_job j LEFT JOIN scheduling_reasongroup r ON r.id = j.reason_group_id
CROSS JOIN LATERAL unnest(j.pools) AS p(pool)
WHERE j.state = 'waiting' AND NOT j.held AND j.unmet_dependencies = 0 AND j.unsatisfiable = ''
  AND coalesce(r.code, '') <> ALL(%s)
  AND (j.not_before IS NULL OR j.not_before <= %s) AND (j.backoff_until IS NULL OR j.backoff_until <= %s)
GROUP BY 1
"""


@transaction.atomic
def record_pool_states(now: datetime | None = None) -> int:
    """Write what changed since the last call; returns the number of rows."""
    now = now or clock.now()
    maintenance, advance = _windows(now)
    _keep_maintenance_history(maintenance, now)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [0x9907_0111])
        cursor.execute(_FREE, [sorted(maintenance)])
        free = cursor.fetchall()
        cursor.execute(_DEMAND, [list(NOT_READY), now, now])
        demand: dict[int, Decimal] = dict(cursor.fetchall())
        cursor.execute("SELECT id FROM scheduling_pool")
        pools = [row[0] for row in cursor.fetchall()]
        cursor.execute(
            "SELECT DISTINCT ON (pool_id) pool_id, free, reserved, stranded, demand, pieces, at"
            " FROM scheduling_poolstate ORDER BY pool_id, at DESC"
        )
        last = {row[0]: row[1:] for row in cursor.fetchall()}
    named = _reserved_devices()
    sums: dict[int, list[Decimal]] = defaultdict(lambda: [Decimal(0), Decimal(0)])
    whole: dict[int, Counter[int]] = defaultdict(Counter)
    for pool, node, index, amount in free:
        sums[pool][0] += amount
        if node in advance or index in named.get(node, ()):
            sums[pool][1] += amount
        if amount == 1:
            whole[pool][node] += 1
    rows = []
    for pool in pools:
        available, reserved = sums[pool]
        wanted = demand.get(pool, Decimal(0))
        stranded = min(available - reserved, wanted)
        pieces = {str(size): n for size, n in sorted(Counter(whole[pool].values()).items())}
        before = last.get(pool)
        if before is None or (tuple(before[:4]), _pieces(before[4])) != (
            (available, reserved, stranded, wanted),
            pieces,
        ):
            if before is not None and before[5] >= now:
                continue
            rows.append(
                PoolState(
                    pool_id=pool,
                    at=now,
                    free=available,
                    reserved=reserved,
                    stranded=stranded,
                    demand=wanted,
                    pieces=pieces,
                )
            )
    PoolState.objects.bulk_create(rows)
    return len(rows)


def _pieces(value: object) -> dict[str, int]:
    return json.loads(value) if isinstance(value, str) else value  # type: ignore[return-value]


def _reserved_devices() -> dict[int, set[int]]:
    """Device indices by node that holds and reservations name."""
    named: dict[int, set[int]] = defaultdict(set)
    for model in (Hold, Reservation):
        for placement in model.objects.values_list("placement", flat=True):
            for node, devices, _ in placement:
                named[node] |= {index for index in range(devices.bit_length()) if devices >> index & 1}
    return named


def _windows(now: datetime) -> tuple[set[int], set[int]]:
    """Nodes in maintenance, and nodes of an advance reservation, at this moment."""
    found: dict[str, set[int]] = {Window.Kind.MAINTENANCE: set(), Window.Kind.RESERVATION: set()}
    moment = timedelta(microseconds=1)
    for window in Window.objects.filter(cancelled_at=None, begins_at__lte=now).prefetch_related("nodes"):
        if any(begins <= now < ends for begins, ends in occurrences(window, now, now + moment)):
            found[window.kind] |= {node.pk for node in window.nodes.all()}
    return found[Window.Kind.MAINTENANCE], found[Window.Kind.RESERVATION]


def _keep_maintenance_history(nodes: set[int], now: datetime) -> None:
    """Open and close ``maintenance`` intervals; a node that is down or drained anyway keeps that state."""
    open_rows = NodeInterval.objects.select_for_update().filter(during__endswith=None)
    busy = dict(open_rows.values_list("node_id", "state"))
    for row in open_rows.filter(state="maintenance").exclude(node_id__in=nodes):
        row.during = DateTimeTZRange(row.during.lower, max(now, row.during.lower + timedelta(microseconds=1)), "[)")
        row.save(update_fields=["during"])
    NodeInterval.objects.bulk_create(
        NodeInterval(
            node_id=node,
            state="maintenance",
            during=DateTimeTZRange(now, None, "[)"),
            reason="maintenance window",
            actor_label="scheduler",
        )
        for node in sorted(nodes)
        if node not in busy
    )
