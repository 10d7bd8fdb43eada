"""Numbers of the overview and of the pools."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.db import connection

from scheduling.models import Job
from teams.models import User

_POOLS = """
SELECT p.id, p.name, c.name, m.name, c.reachable AND c.enabled,
       count(g.id),
       count(g.id) FILTER (WHERE n.state = 'down' OR g.broken),
       count(g.id) FILTER (WHERE n.state = 'drained'),
       coalesce((SELECT sum(a.gpus) FROM scheduling_attempt a WHERE a.pool_id = p.id AND a.state <> 'ended'), 0),
       (SELECT count(*) FROM scheduling_attempt a WHERE a.pool_id = p.id AND a.state <> 'ended'),
       coalesce((SELECT sum(a.gpus) FROM scheduling_attempt a JOIN scheduling_job j ON j.id = a.job_id
                 WHERE a.pool_id = p.id AND a.state <> 'ended' AND j.interruptible), 0)
FROM scheduling_pool p
JOIN scheduling_cluster c ON c.id = p.cluster_id
JOIN scheduling_gpumodel m ON m.id = p.gpu_model_id
LEFT JOIN scheduling_node n ON n.pool_id = p.id AND n.retired_at IS NULL
LEFT JOIN scheduling_gpu g ON g.node_id = n.id AND upper_inf(g.exists)
GROUP BY p.id, c.id, m.id ORDER BY p.name
"""


@dataclass(frozen=True, slots=True)
class PoolNumbers:
    """One pool now; amounts in GPUs."""

    id: int
    name: str
    cluster: str
    model: str
    reachable: bool
    total: int
    down: int
    drained: int
    used: Decimal
    running: int
    interruptible: Decimal

    @property
    def free(self) -> Decimal:
        """On nodes that are up; what drained nodes have left cannot be used."""
        return max(Decimal(0), self.total - self.down - self.drained - self.used)

    def percent(self, amount: Decimal | int) -> str:
        return f"{100 * float(amount) / self.total:.1f}" if self.total else "0"

    @property
    def used_percent(self) -> str:
        return self.percent(self.used)

    @property
    def down_percent(self) -> str:
        return self.percent(self.down + self.drained)


def pool_numbers() -> list[PoolNumbers]:
    with connection.cursor() as cursor:
        cursor.execute(_POOLS)
        return [PoolNumbers(*row) for row in cursor.fetchall()]


def job_counts() -> dict[str, int]:
    """Waiting and running jobs of the whole installation."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT state, count(*) FROM scheduling_job WHERE state IN ('waiting', 'running') GROUP BY state"
        )
        return {"waiting": 0, "running": 0, **dict(cursor.fetchall())}


@dataclass(frozen=True, slots=True)
class TeamNumbers:
    """One of the viewer's teams in one pool."""

    team: str
    pool: str
    guaranteed: Decimal
    limit: Decimal | None
    used: Decimal

    @property
    def borrowed(self) -> Decimal:
        return max(Decimal(0), self.used - self.guaranteed)


def team_numbers(team_ids: list[int], now: datetime) -> list[TeamNumbers]:
    """Guarantee and use of some teams (with what is below them), pool by pool."""
    if not team_ids:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH RECURSIVE tree AS (
                SELECT id AS root, id FROM teams_team WHERE id = ANY(%(teams)s)
                UNION SELECT tree.root, t.id FROM teams_team t JOIN tree ON t.parent_id = tree.id
            )
            SELECT t.name, p.name, q.guaranteed, q."limit",
                   coalesce((SELECT sum(a.gpus) FROM scheduling_attempt a JOIN tree ON tree.id = a.team_id
                             WHERE tree.root = t.id AND a.pool_id = p.id AND a.state <> 'ended'), 0)
            FROM teams_quota q JOIN teams_team t ON t.id = q.team_id JOIN scheduling_pool p ON p.id = q.pool_id
            WHERE q.team_id = ANY(%(teams)s) AND q.during @> %(now)s ORDER BY t.name, p.name LIMIT 200
            """,
            {"teams": team_ids, "now": now},
        )
        return [TeamNumbers(*row) for row in cursor.fetchall()]


def own_jobs(user: User, limit: int = 10) -> list[Job]:
    """The viewer's latest jobs."""
    return list(Job.objects.filter(owner=user).select_related("team", "reason_group").order_by("-id")[:limit])
