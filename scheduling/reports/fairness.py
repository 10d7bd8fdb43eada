"""Is it fair? Delivered against entitled, borrowed and lent, Jain's index over the ratios."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from scheduling.reports.estimators import jain
from scheduling.reports.hours import read
from scheduling.reports.intervals import Bucket, microseconds
from scheduling.reports.scope import Scope
from teams.models import Quota


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
    """Leaf and inner teams that have a quota or were given anything; inner teams' guarantees are their children's, so
    only teams that hold allocations or have no children below them are compared."""
    table = read(scope, Bucket.HOUR, by=("pool", "team"))
    claims = _claims(scope)
    delivered: dict[tuple[int, int], dict[int, Decimal]] = {}
    for (position, pool, team), use in table.by("bucket", "pool", "team").items():
        if team is not None:
            delivered.setdefault((team, pool), {})[position] = use.allocated  # type: ignore[index,arg-type]
    sums: dict[int, list[Decimal]] = {}
    for key in {*delivered, *claims}:
        given = delivered.get(key, {})
        parts = sums.setdefault(key[0], [Decimal(0)] * 4)
        for position, bucket in enumerate(table.buckets):
            held = given.get(position, Decimal(0))
            owed = _owed(claims.get(key, []), bucket.start, bucket.end)
            for place, part in enumerate((held, owed, max(held - owed, Decimal(0)), max(owed - held, Decimal(0)))):
                parts[place] += part
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


def _owed(claims: list[Claim], start: datetime, end: datetime) -> Decimal:
    owed = Decimal(0)
    for begins, ends, guaranteed in claims:
        first, last = max(begins, start), min(ends, end)
        if first < last:
            owed += microseconds(last - first) * guaranteed
    return owed
