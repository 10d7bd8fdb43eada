"""What a team is entitled to: quotas with history and planned changes, budgets, requests for more."""

from __future__ import annotations

from decimal import Decimal

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.db import models
from django.db.models import F, Q

from teams.models.people import Team, User
from teams.models.ranges import same

#: GPU amounts are exact: millionths of one device.
GPU_DIGITS = {"max_digits": 14, "decimal_places": 6}


class Quota(models.Model):
    """A team's claim on one pool, for a stretch of time.

    The row whose ``during`` holds the present is in force; a later one is a planned change; earlier ones are
    the history. Changes go through ``teams.services.quotas``, which checks the sums over the tree.
    """

    team = models.ForeignKey(Team, models.CASCADE, related_name="quotas")
    pool = models.ForeignKey("scheduling.Pool", models.CASCADE, related_name="quotas")
    guaranteed = models.DecimalField(**GPU_DIGITS, default=Decimal(0))
    #: Hard maximum; empty = none.
    limit = models.DecimalField(**GPU_DIGITS, null=True, blank=True)
    weight = models.DecimalField(max_digits=10, decimal_places=4, default=Decimal(1))
    during = DateTimeRangeField()
    reason = models.CharField(max_length=300, blank=True)
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="one_quota_per_team_and_pool_at_a_time",
                expressions=[
                    same("team"),
                    same("pool"),
                    ("during", RangeOperators.OVERLAPS),
                ],
            ),
            models.CheckConstraint(condition=Q(guaranteed__gte=0), name="quota_guaranteed_not_negative"),
            models.CheckConstraint(condition=Q(limit__isnull=True) | Q(limit__gte=0), name="quota_limit_not_negative"),
            models.CheckConstraint(
                condition=Q(limit__isnull=True) | Q(limit__gte=F("guaranteed")), name="quota_limit_at_least_guaranteed"
            ),
            models.CheckConstraint(condition=Q(weight__gte=0), name="quota_weight_not_negative"),
        ]


class BudgetUnit(models.TextChoices):
    GPU_HOURS = "gpu-hours", "GPU-hours"
    MONEY = "money", "Money"


class BudgetPeriod(models.TextChoices):
    MONTH = "month", "Month"
    QUARTER = "quarter", "Quarter"
    YEAR = "year", "Year"


class Budget(models.Model):
    """What a team may spend in each period; at 100 % it blocks new starts or only warns."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="budgets")
    unit = models.CharField(max_length=12, choices=BudgetUnit)
    amount = models.DecimalField(max_digits=16, decimal_places=2)
    period = models.CharField(max_length=8, choices=BudgetPeriod, default=BudgetPeriod.MONTH)
    time_zone = models.CharField(max_length=64, default="UTC")
    warn_at = models.DecimalField(max_digits=4, decimal_places=3, default=Decimal("0.8"))
    blocks = models.BooleanField(default=False, help_text="At 100 %, no new job of this team starts")
    starts_on = models.DateField()
    ends_on = models.DateField(null=True, blank=True)
    #: Start of the period for which the warning (exhaustion) was last announced.
    warned_for = models.DateField(null=True, blank=True)
    exhausted_for = models.DateField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(amount__gt=0), name="budget_amount_positive"),
            models.CheckConstraint(condition=Q(warn_at__gt=0, warn_at__lte=1), name="budget_warn_at_is_a_share"),
        ]


class AllocationRequest(models.Model):
    """A lead asks for a larger quota; a manager approves, changes or declines it, with a reason."""

    class State(models.TextChoices):
        PENDING = "pending", "Pending"
        APPROVED = "approved", "Approved"
        DECLINED = "declined", "Declined"
        WITHDRAWN = "withdrawn", "Withdrawn"
        EXPIRED = "expired", "Expired"

    team = models.ForeignKey(Team, models.CASCADE, related_name="allocation_requests")
    pool = models.ForeignKey("scheduling.Pool", models.CASCADE, related_name="+")
    asked_guaranteed = models.DecimalField(**GPU_DIGITS)
    asked_limit = models.DecimalField(**GPU_DIGITS, null=True, blank=True)
    justification = models.TextField(max_length=4000)
    begins_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    state = models.CharField(max_length=10, choices=State, default=State.PENDING)
    requested_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    requested_at = models.DateTimeField(auto_now_add=True)
    decided_by = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    decided_at = models.DateTimeField(null=True, blank=True)
    granted_guaranteed = models.DecimalField(**GPU_DIGITS, null=True, blank=True)
    granted_limit = models.DecimalField(**GPU_DIGITS, null=True, blank=True)
    reason = models.CharField(max_length=1000, blank=True)
    renewal_of = models.ForeignKey("self", models.SET_NULL, null=True, blank=True, related_name="renewals")

    class Meta:
        ordering = ["-requested_at"]
        indexes = [models.Index(fields=["state", "-requested_at"]), models.Index(fields=["team", "-requested_at"])]
        constraints = [
            models.CheckConstraint(condition=Q(expires_at__gt=F("begins_at")), name="request_expires_after_it_begins"),
            models.CheckConstraint(condition=Q(asked_guaranteed__gte=0), name="request_guaranteed_not_negative"),
        ]
