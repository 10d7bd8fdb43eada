"""How much sits idle? The state of every GPU-second (design.md 7.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django.db import connection

from scheduling.reports.hours import Use, ratio, read, typical_week
from scheduling.reports.intervals import Interval
from scheduling.reports.scope import Scope


@dataclass(frozen=True, slots=True)
class Pieces:
    """Free whole GPUs by how many lie together on one node: time-weighted mean number of such nodes."""

    pool: int
    by_size: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Utilization:
    """Amounts in GPU-microseconds. ``week`` is keyed by local weekday (0 = Monday) and hour."""

    total: Use
    buckets: list[Interval]
    series: list[Use]
    by_pool: dict[int, Use]
    by_team: dict[int, Use]
    week: dict[tuple[int, int], Use]
    pieces: list[Pieces]

    @property
    def idle_share(self) -> float | None:
        """idle / (capacity - down): what could have been used and was not given to anybody."""
        return ratio(self.total.idle, self.total.capacity - self.total.out_of_service)

    @property
    def coverage(self) -> float | None:
        """Share of the allocated time that was measured."""
        return ratio(self.total.measured, self.total.allocated)

    @property
    def busy_share(self) -> float | None:
        """Measured activity over the measured allocated time."""
        return ratio(self.total.busy, self.total.measured)


def utilization(scope: Scope) -> Utilization:
    table = read(scope, scope.step)
    by_bucket = table.by("bucket")
    return Utilization(
        total=table.total,
        buckets=table.buckets,
        series=[by_bucket.get((position,), Use()) for position in range(len(table.buckets))],
        by_pool={pool: use for (pool,), use in table.by("pool").items()},  # type: ignore[misc]
        by_team={team: use for (team,), use in table.by("team").items() if team is not None},  # type: ignore[misc]
        week=typical_week(scope),
        pieces=free_pieces(scope) if scope.whole else [],
    )


def free_pieces(scope: Scope) -> list[Pieces]:
    """Mean number of nodes with so many free GPUs, weighted by how long each recorded state lasted in the range."""
    pools = None if scope.pools is None else sorted(scope.pools)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH state AS (
                SELECT pool_id, pieces, greatest(at, %(since)s) AS s,
                       least(coalesce(lead(at) OVER (PARTITION BY pool_id ORDER BY at), %(until)s), %(until)s) AS e
                FROM (
                    SELECT b.* FROM scheduling_pool p CROSS JOIN LATERAL (
                        SELECT coalesce(max(x.at), '-infinity') AS at FROM scheduling_poolstate x
                        WHERE x.pool_id = p.id AND x.at <= %(since)s
                    ) AS f JOIN scheduling_poolstate b ON b.pool_id = p.id AND b.at >= f.at AND b.at < %(until)s
                    WHERE %(pools)s::bigint[] IS NULL OR p.id = ANY(%(pools)s)
                ) AS rows
            ), weighted AS (
                SELECT pool_id, pieces, extract(epoch FROM e - s) AS seconds FROM state WHERE s < e
            ), whole AS (SELECT pool_id, sum(seconds) AS seconds FROM weighted GROUP BY 1)
            SELECT w.pool_id, v.key::int, (sum(v.value::numeric * w.seconds) / o.seconds)::float
            FROM weighted w JOIN whole o USING (pool_id) CROSS JOIN LATERAL jsonb_each_text(w.pieces) AS v
            GROUP BY w.pool_id, v.key::int, o.seconds ORDER BY 1, 2
            """,
            {"since": scope.since, "until": scope.end, "pools": pools},
        )
        found: dict[int, dict[int, float]] = {}
        for pool, size, nodes in cursor.fetchall():
            found.setdefault(pool, {})[size] = nodes
    return [Pieces(pool, sizes) for pool, sizes in found.items()]
