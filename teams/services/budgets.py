"""Budgets: what a team may spend in each month, quarter or year."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.db import transaction

from teams.actors import Actor
from teams.models import Budget, BudgetPeriod, BudgetUnit, Team
from teams.permissions import Permission, require
from teams.services import audit
from teams.services.errors import Invalid


@transaction.atomic
def create_budget(
    *,
    actor: Actor,
    team: Team,
    unit: str,
    amount: Decimal,
    period: str,
    starts_on: date,
    ends_on: date | None = None,
    time_zone: str = "UTC",
    warn_at: Decimal = Decimal("0.8"),
    blocks: bool = False,
    reason: str = "",
) -> Budget:
    """Raises ``Invalid`` and ``PermissionDenied``."""
    require(actor, Permission.MANAGE_BUDGETS)
    errors: dict[str, list[str]] = {}
    if unit not in BudgetUnit.values:
        errors["unit"] = [f"{unit!r} is not one of {', '.join(BudgetUnit.values)}."]
    if period not in BudgetPeriod.values:
        errors["period"] = [f"{period!r} is not one of {', '.join(BudgetPeriod.values)}."]
    if not amount.is_finite() or not 0 < amount < Decimal(10) ** 13:
        errors["amount"] = [f"{amount} is not a number above 0 and below 10,000,000,000,000."]
    if not warn_at.is_finite() or not 0 < warn_at <= 1:
        errors["warn_at"] = [f"{warn_at} is not a share above 0 and up to 1."]
    if ends_on is not None and ends_on < starts_on:
        errors["ends_on"] = [f"{ends_on} is before {starts_on}."]
    try:
        ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        errors["time_zone"] = [f"{time_zone!r} is not a time zone such as Europe/Berlin."]
    if errors:
        raise Invalid(errors)
    budget = Budget.objects.create(
        team=team, unit=unit, amount=amount, period=period, time_zone=time_zone,
        warn_at=warn_at, blocks=blocks, starts_on=starts_on, ends_on=ends_on,
    )  # fmt: skip
    after = {"amount": str(amount), "unit": unit, "period": period, "blocks": blocks}
    audit.record(actor, "budget.create", budget, after=after, reason=reason, team=team)
    return budget


@transaction.atomic
def delete_budget(*, actor: Actor, budget: Budget, reason: str = "") -> None:
    require(actor, Permission.MANAGE_BUDGETS)
    before = {"amount": str(budget.amount), "unit": budget.unit, "period": budget.period, "blocks": budget.blocks}
    audit.record(actor, "budget.delete", budget, before=before, reason=reason, team=budget.team)
    budget.delete()
