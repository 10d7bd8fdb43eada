"""Budgets against the ledger: what a team has spent in the period that runs now."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

from django.db import connection

from teams.models import Budget, BudgetPeriod, BudgetUnit
from teams.permissions import below

_SPENT = """
SELECT coalesce(sum(
    a.gpus * extract(epoch FROM least(coalesce(a.ended_at, %(now)s), %(now)s) - greatest(a.started_at, %(since)s))
    / 3600 * CASE WHEN %(money)s THEN coalesce(p.price_per_hour, m.price_per_hour) ELSE 1 END
), 0)
FROM scheduling_attempt a
JOIN scheduling_pool p ON p.id = a.pool_id
JOIN scheduling_gpumodel m ON m.id = p.gpu_model_id
WHERE a.team_id = ANY(%(teams)s) AND a.started_at < %(now)s AND (a.ended_at IS NULL OR a.ended_at > %(since)s)
"""


@dataclass(frozen=True, slots=True)
class BudgetState:
    """Spent so far in the running period, in the budget's unit."""

    budget: Budget
    begins: datetime
    ends: datetime
    spent: Decimal

    @property
    def used(self) -> Decimal:
        return self.spent / self.budget.amount

    @property
    def warned(self) -> bool:
        return self.used >= self.budget.warn_at

    @property
    def exhausted(self) -> bool:
        return self.spent >= self.budget.amount


def period_of(budget: Budget, now: datetime) -> tuple[datetime, datetime]:
    """Begin and end (UTC) of the month, quarter or year that runs now in the budget's time zone."""
    zone = ZoneInfo(budget.time_zone)
    local = now.astimezone(zone)
    months = {BudgetPeriod.MONTH: 1, BudgetPeriod.QUARTER: 3, BudgetPeriod.YEAR: 12}[BudgetPeriod(budget.period)]
    first = (local.month - 1) // months * months + 1
    begins = datetime(local.year, first, 1, tzinfo=zone)
    year, month = (local.year, first + months) if first + months <= 12 else (local.year + 1, 1)
    return begins.astimezone(UTC), datetime(year, month, 1, tzinfo=zone).astimezone(UTC)


def spent(team_ids: set[int], since: datetime, now: datetime, *, money: bool) -> Decimal:
    """GPU-hours, or their price, of some teams from ``since`` to ``now``."""
    with connection.cursor() as cursor:
        cursor.execute(_SPENT, {"teams": list(team_ids), "since": since, "now": now, "money": money})
        return Decimal(cursor.fetchone()[0]).quantize(Decimal("0.000001"))


def budget_states(now: datetime, budgets: list[Budget] | None = None) -> list[BudgetState]:
    """Every budget that is in force."""
    today = (now + timedelta(hours=14)).date()
    rows = budgets if budgets is not None else list(Budget.objects.filter(starts_on__lte=today).select_related("team"))
    found = []
    for budget in rows:
        local = now.astimezone(ZoneInfo(budget.time_zone)).date()
        if budget.starts_on > local or (budget.ends_on is not None and budget.ends_on < local):
            continue
        begins, ends = period_of(budget, now)
        begins = max(begins, _midnight(budget.starts_on, budget.time_zone))
        money = budget.unit == BudgetUnit.MONEY
        amount = spent(below([budget.team_id]), begins, now, money=money)
        found.append(BudgetState(budget, begins, ends, amount))
    return found


def _midnight(day: date, zone: str) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(zone)).astimezone(UTC)


def exhausted_teams(now: datetime) -> dict[int, str]:
    """Teams for which a blocking budget is used up: team id -> name of the team that has the budget."""
    blocking = list(Budget.objects.filter(blocks=True).select_related("team"))
    found: dict[int, str] = {}
    for state in budget_states(now, blocking) if blocking else ():
        if state.exhausted:
            for team in below([state.budget.team_id]):
                found.setdefault(team, state.budget.team.name)
    return found
