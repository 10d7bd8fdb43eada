"""Decayed GPU-hours per team and pool (4.1), exact: a checkpoint, plus what attempts held since then.

For an attempt that held g GPUs from a to b, its part of the usage at t is
g × h/ln 2 × (0.5^((t−b)/h) − 0.5^((t−a)/h)), the integral of 0.5^((t−s)/h) over [a, b] (h = half-life).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime

from django.db.models import Q

from scheduling.engine.snapshot import HOUR
from scheduling.models import Attempt, TeamUsage

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Key = tuple[int, int]  # team id, pool id


def part(gpus: float, begins: float, ends: float, now: float, half_life: float) -> float:
    """GPU-hours at ``now`` of ``gpus`` held from ``begins`` to ``ends`` (POSIX seconds)."""
    if ends <= begins:
        return 0.0
    scale = half_life / HOUR / math.log(2)
    left: float = 0.5 ** ((now - ends) / half_life) - 0.5 ** ((now - begins) / half_life)
    return gpus * scale * left


def decayed_usage(now: datetime, half_life: float) -> dict[Key, float]:
    """Usage of every leaf team and pool at ``now``, from the checkpoints and the attempts since."""
    usage: dict[Key, float] = {}
    since: dict[Key, datetime] = {}
    for team, pool, hours, as_of in TeamUsage.objects.values_list("team_id", "pool_id", "gpu_hours", "as_of"):
        usage[team, pool] = hours * 0.5 ** ((now - as_of).total_seconds() / half_life)
        since[team, pool] = as_of
    oldest = min(since.values(), default=EPOCH)
    fresh = Attempt.objects.filter(Q(ended_at__isnull=True) | Q(ended_at__gt=oldest)).values_list(
        "team_id", "pool_id", "gpus", "started_at", "ended_at"
    )
    _add(usage, since, fresh.iterator(chunk_size=10_000), now, half_life)
    return usage


def rebuild_usage(now: datetime, half_life: float) -> dict[Key, float]:
    """The same from the ledger alone; what is older than forty half-lives is less than a rounding error."""
    usage: dict[Key, float] = {}
    begin = datetime.fromtimestamp(max(0.0, now.timestamp() - 40 * half_life), UTC)
    rows = Attempt.objects.filter(Q(ended_at__isnull=True) | Q(ended_at__gt=begin)).values_list(
        "team_id", "pool_id", "gpus", "started_at", "ended_at"
    )
    _add(usage, {}, rows.iterator(chunk_size=10_000), now, half_life)
    store_usage(usage, now)
    return usage


def _add(
    usage: dict[Key, float],
    since: dict[Key, datetime],
    rows: Iterable[tuple[int, int, object, datetime, datetime | None]],
    now: datetime,
    half_life: float,
) -> None:
    at = now.timestamp()
    for team, pool, gpus, started, ended in rows:
        begins = max(started, since.get((team, pool), EPOCH))
        until = now if ended is None else min(ended, now)
        more = part(float(gpus), begins.timestamp(), until.timestamp(), at, half_life)  # type: ignore[arg-type]
        if more:
            usage[team, pool] = usage.get((team, pool), 0.0) + more


def store_usage(usage: dict[Key, float], now: datetime) -> None:
    """New checkpoints, so that the next cycle looks at recent attempts only."""
    TeamUsage.objects.bulk_create(
        [TeamUsage(team_id=team, pool_id=pool, gpu_hours=hours, as_of=now) for (team, pool), hours in usage.items()],
        update_conflicts=True,
        unique_fields=["team", "pool"],
        update_fields=["gpu_hours", "as_of"],
        batch_size=1000,
    )
