"""What reports read: hourly roll-ups of the ledger, and what they need beside it.

Every row of the roll-ups can be worked out again from the ledger (``services/rollup.py``) and then comes out the same.
Amounts are GPU-microseconds, exact: a share of a device has six decimals, an instant is a whole microsecond.
"""

from __future__ import annotations

from decimal import Decimal

from django.contrib.postgres.fields import DateTimeRangeField
from django.db import models
from django.db.models import Q

from scheduling.models.hardware import Cluster, Pool
from scheduling.models.ledger import Allocation, Attempt
from teams.models.people import Team, User


def _amount() -> models.DecimalField:
    """GPU-microseconds; six decimals as an allocation's share."""
    return models.DecimalField(max_digits=28, decimal_places=6, default=Decimal(0))


class PoolState(models.Model):
    """What a pool looked like after a cycle, valid until the next row: splits the idle time (design.md 7.1)."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="states")
    at = models.DateTimeField()
    #: GPUs nobody holds on nodes that are up.
    free = models.DecimalField(max_digits=14, decimal_places=6)
    #: Of those, kept for a hold, a reservation or an advance reservation.
    reserved = models.DecimalField(max_digits=14, decimal_places=6)
    #: Of the rest, as many as jobs that wait now would take if they fitted.
    stranded = models.DecimalField(max_digits=14, decimal_places=6)
    #: GPUs asked for by jobs that could start now (not held, no dependency, not-before or back-off).
    demand = models.DecimalField(max_digits=16, decimal_places=6)
    #: {"1": nodes with exactly one whole GPU free, "2": …}
    pieces = models.JSONField(default=dict)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["pool", "at"], name="one_pool_state_per_instant")]


class HourlyUse(models.Model):
    """GPU-microseconds of one UTC hour by state.

    The row without team holds what belongs to nobody: capacity, down, maintenance, free, stranded, reserved (and
    unknown: nobody's GPUs on nodes of unknown state). Rows of a team hold what its jobs were given.
    """

    hour = models.DateTimeField()
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="+")
    team = models.ForeignKey(Team, models.CASCADE, null=True, related_name="+")
    workload_class = models.CharField(max_length=12, blank=True)
    capacity = _amount()
    down = _amount()
    maintenance = _amount()
    free = _amount()
    stranded = _amount()
    reserved = _amount()
    startup = _amount()
    no_activity = _amount()
    lost_failed = _amount()
    lost_preempted = _amount()
    productive = _amount()
    unknown = _amount()
    #: Measured: activity times allocated time, and the allocated time it was measured over.
    busy = _amount()
    measured = _amount()
    #: Held by an attempt while the node was down: counted as down, told apart.
    overlap = _amount()
    #: Recorded as reserved or stranded, yet more than was idle: told apart, not counted.
    excess = _amount()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["hour", "pool", "team", "workload_class"],
                name="one_use_per_hour_pool_team_and_class",
                nulls_distinct=False,
            )
        ]


class HourlyEnergy(models.Model):
    """Energy measured in one UTC hour, and the device time that was measured; the rest follows the model (7.2)."""

    hour = models.DateTimeField()
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="+")
    #: Null: devices nobody held.
    team = models.ForeignKey(Team, models.CASCADE, null=True, related_name="+")
    #: counter (total energy) or power (integral of power).
    source = models.CharField(max_length=8)
    joules = models.FloatField()
    measured = _amount()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["hour", "pool", "team", "source"],
                name="one_energy_per_hour_pool_team_and_source",
                nulls_distinct=False,
            )
        ]


class ActivitySpan(models.Model):
    """A stretch of one allocation in which the device was measured, with or without activity by the idle rule.

    Samples are thrown away after their retention time; spans stay. Cut at UTC midnight.
    """

    allocation = models.ForeignKey(Allocation, models.CASCADE, related_name="spans")
    during = DateTimeRangeField()
    active = models.BooleanField()
    #: Mean of the measured ratio over the span, six decimals.
    activity = models.DecimalField(max_digits=7, decimal_places=6)
    #: Which counter it was: sm_active, gr_engine_active, gpu_util; several are named with a plus sign.
    metric = models.CharField(max_length=48)

    class Meta:
        indexes = [models.Index(fields=["allocation"], name="span_allocation")]


class DirtyRange(models.Model):
    """Time whose roll-up is out of date because the ledger was changed; written by triggers."""

    since = models.DateTimeField()
    until = models.DateTimeField()


class RollupState(models.Model):
    """One row: up to when the roll-up goes."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    rolled_until = models.DateTimeField(null=True)
    #: Samples are turned into spans up to here.
    spans_until = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    seconds = models.FloatField(default=0)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(id=1), name="rollup_state_is_one_row")]


class CarbonIntensity(models.Model):
    """Grams of CO2 equivalent per kWh from ``since`` until the next row of the same cluster."""

    cluster = models.ForeignKey(Cluster, models.CASCADE, null=True, blank=True, related_name="carbon")
    since = models.DateTimeField()
    grams_per_kwh = models.DecimalField(max_digits=8, decimal_places=2)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["cluster", "since"], name="one_carbon_per_instant", nulls_distinct=False)
        ]


class ReportingRule(models.Model):
    """What counts as idle, how power becomes carbon, and what happens to idle jobs; the newest row is in force."""

    #: An allocated GPU is without activity when its ratio stays below the threshold for at least the window.
    idle_threshold = models.DecimalField(max_digits=5, decimal_places=4, default=Decimal("0.05"))
    idle_window_seconds = models.PositiveIntegerField(default=600)
    pue = models.DecimalField(max_digits=5, decimal_places=3, default=Decimal("1.3"))
    grams_per_kwh = models.DecimalField(max_digits=8, decimal_places=2, default=Decimal(350))
    currency = models.CharField(max_length=8, default="EUR")
    #: Idle jobs: warn the owner after so many seconds without activity; 0 = no such policy.
    idle_warn_after = models.PositiveIntegerField(default=0)
    #: Then, so many seconds after the warning: stop or only flag.
    idle_countdown = models.PositiveIntegerField(default=1800)
    idle_action = models.CharField(max_length=8, choices=[("flag", "Flag"), ("stop", "Stop")], default="flag")
    idle_dry_run = models.BooleanField(default=True)
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]


class IdleCase(models.Model):
    """One attempt that holds GPUs without using them: warned, counted down, stopped or flagged, and what it saved."""

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="idle_cases")
    idle_since = models.DateTimeField()
    warned_at = models.DateTimeField()
    due_at = models.DateTimeField()
    #: open, flagged, stopped, would-stop (dry run), recovered (it worked again), ended (by itself)
    state = models.CharField(max_length=12, default="open")
    closed_at = models.DateTimeField(null=True, blank=True)
    gpus = models.DecimalField(max_digits=14, decimal_places=6)
    #: GPU-hours until the walltime that the stop gave back (or would have given back).
    saved_gpu_hours = models.DecimalField(max_digits=14, decimal_places=3, default=Decimal(0))
    saved_money = models.DecimalField(max_digits=14, decimal_places=2, default=Decimal(0))

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["attempt"], condition=Q(state="open"), name="one_open_idle_case_per_attempt"
            )
        ]


class FrozenReport(models.Model):
    """A report as it was: parameters, result and the version of the definitions, so that it can be shown again."""

    name = models.CharField(max_length=200)
    report = models.CharField(max_length=32)
    parameters = models.JSONField()
    result = models.JSONField()
    definition_version = models.CharField(max_length=16)
    #: SHA-256 of the result's canonical JSON.
    digest = models.CharField(max_length=64)
    cut_off = models.DateTimeField()
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return self.name


class ReportMail(models.Model):
    """A report sent by mail every day, week or month, with the rights of the person it goes to."""

    report = models.CharField(max_length=32)
    #: Query string of the page, without dates: the range is the period just past.
    query = models.CharField(max_length=1000, blank=True)
    period = models.CharField(max_length=8, choices=[("day", "Daily"), ("week", "Weekly"), ("month", "Monthly")])
    user = models.ForeignKey(User, models.CASCADE, related_name="report_mails")
    next_at = models.DateTimeField()
    last_sent_at = models.DateTimeField(null=True, blank=True)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        indexes = [models.Index(fields=["next_at"])]


class LabRun(models.Model):
    """A question to the policy lab: a past period and a change, simulated beside what happened."""

    class State(models.TextChoices):
        QUEUED = "queued", "Queued"
        RUNNING = "running", "Running"
        DONE = "done", "Done"
        FAILED = "failed", "Failed"

    name = models.CharField(max_length=200)
    since = models.DateTimeField()
    until = models.DateTimeField()
    #: [{kind, …}, …]: services/lab.py
    changes = models.JSONField(default=list)
    state = models.CharField(max_length=8, choices=State, default=State.QUEUED)
    progress = models.FloatField(default=0)
    result = models.JSONField(null=True, blank=True)
    error = models.CharField(max_length=1000, blank=True)
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    #: When the change was put in force: from then on forecast and reality are compared.
    adopted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
