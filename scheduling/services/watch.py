"""What nobody does and yet happens: a job has waited for long, a budget runs out. Looked for every minute."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import transaction
from django.db.models import F

from scheduling.models import Event, Job, JobEvent, JobState
from scheduling.services import states
from scheduling.services.budgets import BudgetState, budget_states
from scheduling.services.happenings import LONG_WAIT, announce
from scheduling.services.words import duration
from teams.models import Budget

BATCH = 1000


def watch_waits(now: datetime) -> int:
    """Note each wait of at least ``GPUPORTAL_LONG_WAIT`` seconds once, in the job's history; returns how many.

    Held jobs and those that wait for others are left out: they wait as they were asked to.
    """
    found = 0
    while True:
        count = _waits(now, timedelta(seconds=settings.GPUPORTAL_LONG_WAIT))
        found += count
        if count < BATCH:
            return found


@transaction.atomic
def _waits(now: datetime, threshold: timedelta) -> int:
    rows = list(
        Job.objects.select_for_update(of=("self",), skip_locked=True)
        .filter(state=JobState.WAITING, held=False, unmet_dependencies=0, eligible_at__lte=now - threshold)
        .exclude(long_wait_told_for=F("eligible_at"))
        .select_related("reason_group")
        .order_by("pk")[:BATCH]
    )
    if rows:
        Job.objects.filter(pk__in=[job.pk for job in rows]).update(long_wait_told_for=F("eligible_at"))
        states.save_all(_long_wait(job, now) for job in rows)
    return len(rows)


def _long_wait(job: Job, now: datetime) -> JobEvent:
    waited = now - job.eligible_at
    blocker = job.reason_group.code.replace("-", " ") if job.reason_group is not None else ""
    return JobEvent(
        job=job,
        at=now,
        kind=LONG_WAIT,
        actor_label=states.SCHEDULER,
        reason=f"First reason: {blocker}." if blocker else "",
        data={"waited": duration(waited), "waited_seconds": int(waited.total_seconds())},
    )


def watch_budgets(now: datetime) -> int:
    """Announce warnings and exhaustion, each once in a budget's period; returns how many."""
    return sum(_announce(state, now) for state in budget_states(now))


@transaction.atomic
def _announce(state: BudgetState, now: datetime) -> int:
    budget = state.budget
    period = state.begins.astimezone(ZoneInfo(budget.time_zone)).date()
    if state.exhausted:
        if _first(budget, period, "exhausted_for"):
            # Who hears that it is used up needs no warning any more.
            Budget.objects.filter(pk=budget.pk).update(warned_for=period)
            announce(Event.BUDGET_EXHAUSTED, team=budget.team, at=now, **_numbers(state))
            return 1
    elif state.warned and _first(budget, period, "warned_for"):
        announce(Event.BUDGET_WARNING, team=budget.team, at=now, **_numbers(state))
        return 1
    return 0


def _first(budget: Budget, period: date, column: str) -> bool:
    """Whether nobody else has announced it for this period."""
    return bool(Budget.objects.filter(pk=budget.pk).exclude(**{column: period}).update(**{column: period}))


def _numbers(state: BudgetState) -> dict[str, object]:
    budget = state.budget
    unit = settings.GPUPORTAL_CURRENCY if budget.unit == "money" else "GPU-hours"
    return {
        "budget": budget.pk,
        "spent": str(state.spent.quantize(Decimal("0.01"))),
        "amount": str(budget.amount),
        "unit": unit,
        "percent": int(state.used * 100),
        "blocks": budget.blocks,
        "begins": state.begins.isoformat(),
        "ends": state.ends.isoformat(),
    }
