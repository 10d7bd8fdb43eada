"""Is it fair? Delivered against entitled, borrowed and lent, Jain's index over the ratios."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np

from scheduling.reports.estimators import jain
from scheduling.reports.hours import hourly_allocated
from scheduling.reports.intervals import Bucket, buckets, epoch_us
from scheduling.reports.scope import Scope
from teams.models import Quota

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class TeamFairness:
    """GPU-microseconds. ``entitled`` is the guarantee over time; ``borrowed`` and ``lent`` are what was above and
    below it, hour by hour (an hour above does not pay for an hour below)."""

    team: int
    delivered: Decimal
    entitled: Decimal
    borrowed: Decimal
    lent: Decimal

    @property
    def ratio(self) -> float | None:
        return float(self.delivered / self.entitled) if self.entitled else None


@dataclass(frozen=True, slots=True)
class Fairness:
    teams: list[TeamFairness]

    @property
    def index(self) -> float | None:
        """Jain's index over delivered / entitled of the teams that are entitled to anything."""
        return jain([row.ratio for row in self.teams if row.ratio is not None])


def fairness(scope: Scope) -> Fairness:
    """Leaf teams that have a guarantee, and every team that was given anything: inner teams' guarantees are their
    children's."""
    delivered = hourly_allocated(scope)
    claims = _claims(scope)
    hours = buckets(scope.since, scope.end, Bucket.HOUR, ZoneInfo("UTC"))
    edges = [*(epoch_us(hour.start) for hour in hours), epoch_us(scope.end)]
    starts, ends = np.array(edges[:-1], dtype=object), np.array(edges[1:], dtype=object)
    sums: dict[int, list[Decimal]] = {}
    for key in {*delivered, *claims}:
        # Whole millionths of GPU-microseconds, as Python integers: exact however large.
        held = np.zeros(len(hours), dtype=object)
        for start, amount in delivered.get(key, {}).items():
            held[bisect_right(edges, start) - 1] += int(amount * MILLION)
        owed = np.zeros(len(hours), dtype=object)
        for begins, until, guaranteed in claims.get(key, []):
            first, last = np.maximum(starts, epoch_us(begins)), np.minimum(ends, epoch_us(until))
            owed += np.maximum(last - first, 0) * int(guaranteed * MILLION)
        parts = sums.setdefault(key[0], [Decimal(0)] * 4)
        for place, part in enumerate((held, owed, np.maximum(held - owed, 0), np.maximum(owed - held, 0))):
            parts[place] += Decimal(int(part.sum())) / MILLION
    return Fairness([TeamFairness(team, *parts) for team, parts in sorted(sums.items()) if any(parts)])


Claim = tuple[datetime, datetime, Decimal]


def _claims(scope: Scope) -> dict[tuple[int, int], list[Claim]]:
    rows = Quota.objects.filter(during__overlap=(scope.since, scope.end), guaranteed__gt=0, team__children=None)
    if scope.teams is not None:
        rows = rows.filter(team_id__in=scope.teams)
    if scope.pools is not None:
        rows = rows.filter(pool_id__in=scope.pools)
    claims: dict[tuple[int, int], list[Claim]] = {}
    for team, pool, guaranteed, during in rows.values_list("team_id", "pool_id", "guaranteed", "during"):
        begins, ends = max(during.lower or scope.since, scope.since), min(during.upper or scope.end, scope.end)
        claims.setdefault((team, pool), []).append((begins, ends, guaranteed))
    return claims
