"""Is it hardware or scheduling that is short? What waited, beside what was free while it waited."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection

from scheduling.reports.scope import Scope


@dataclass(frozen=True, slots=True)
class Shortage:
    """GPU-hours of one pool over the recorded time of the range.

    ``demand`` waited; of it ``stranded`` GPUs were free at the same time and fitted nothing that waited (shape, topology,
    quota): better scheduling or other limits could have used them. ``hardware`` is the rest: no free GPU was there.
    """

    pool: int
    recorded_hours: float
    demand: float
    stranded: float
    reserved: float
    free: float
    #: Hours in which anything waited, and in which it waited although GPUs were free.
    waiting_hours: float
    stranded_hours: float

    @property
    def hardware(self) -> float:
        return self.demand - self.stranded

    @property
    def verdict(self) -> str:
        if self.demand <= 0:
            return "neither"
        return "hardware" if self.hardware >= self.stranded else "scheduling"


def shortage(scope: Scope) -> list[Shortage]:
    pools = None if scope.pools is None else sorted(scope.pools)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH state AS (
                SELECT *, greatest(at, %(since)s) AS s,
                       least(coalesce(lead(at) OVER (PARTITION BY pool_id ORDER BY at), %(until)s), %(until)s) AS e
                FROM (
                    SELECT b.* FROM scheduling_pool p CROSS JOIN LATERAL (
                        SELECT coalesce(max(x.at), '-infinity') AS at FROM scheduling_poolstate x
                        WHERE x.pool_id = p.id AND x.at <= %(since)s
                    ) AS f JOIN scheduling_poolstate b ON b.pool_id = p.id AND b.at >= f.at AND b.at < %(until)s
                    WHERE %(pools)s::bigint[] IS NULL OR p.id = ANY(%(pools)s)
                ) AS rows
            ), weighted AS (SELECT *, extract(epoch FROM e - s) / 3600 AS hours FROM state WHERE s < e)
            SELECT pool_id, sum(hours)::float, sum(demand * hours)::float, sum(least(stranded, demand) * hours)::float,
                   sum(reserved * hours)::float, sum(greatest(free - reserved - stranded, 0) * hours)::float,
                   coalesce(sum(hours) FILTER (WHERE demand > 0), 0)::float,
                   coalesce(sum(hours) FILTER (WHERE stranded > 0), 0)::float
            FROM weighted GROUP BY 1 ORDER BY 1
            """,
            {"since": scope.since, "until": scope.end, "pools": pools},
        )
        return [Shortage(*row) for row in cursor.fetchall()]
