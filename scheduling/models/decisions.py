"""What the scheduling loop decided, and what is on its way to the clusters."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from scheduling.models.hardware import Cluster, Pool
from scheduling.models.jobs import Job
from scheduling.models.ledger import Attempt
from teams.models.people import Team, User


class PolicyVersion(models.Model):
    """The policy of section 4 as set by administrators; the newest row is in force."""

    #: Field names of ``engine.snapshot.Policy``; missing ones have the defaults. Durations in seconds.
    settings = models.JSONField(default=dict)
    reason = models.CharField(max_length=300, blank=True)
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]


class Cycle(models.Model):
    """One pass of the loop. Kept with what it read, so that it can be replayed."""

    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    load_ms = models.FloatField(default=0)
    plan_ms = models.FloatField(default=0)
    commit_ms = models.FloatField(default=0)
    waiting = models.PositiveIntegerField(default=0)
    running = models.PositiveIntegerField(default=0)
    starts = models.PositiveIntegerField(default=0)
    evictions = models.PositiveIntegerField(default=0)
    #: Compressed snapshot (services/replay.py); removed after the retention time, the decisions stay.
    snapshot = models.BinaryField(null=True, blank=True, editable=False)
    #: Hash of the plan's canonical form, to compare a replay with.
    plan_hash = models.CharField(max_length=64, blank=True)
    error = models.TextField(blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["-started_at"])]


class Decision(models.Model):
    """One decision of a cycle, with the numbers it was made with."""

    class Kind(models.TextChoices):
        START = "start", "Start"
        EVICT = "evict", "Evict"
        HOLD = "hold", "Hold for"
        RELEASE = "release", "Release hold"
        RESERVE = "reserve", "Reserve"

    cycle = models.ForeignKey(Cycle, models.CASCADE, related_name="decisions")
    kind = models.CharField(max_length=8, choices=Kind)
    job = models.ForeignKey(Job, models.CASCADE, related_name="decisions")
    attempt = models.ForeignKey(Attempt, models.CASCADE, null=True, blank=True, related_name="decisions")
    at = models.DateTimeField()
    because = models.CharField(max_length=1000, blank=True)
    data = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["job", "-id"]), models.Index(fields=["kind", "-at"])]


class Command(models.Model):
    """Outbox: what a back end is to be told. Written with the decision, sent at least once, idempotent by UUID."""

    class Kind(models.TextChoices):
        START = "start", "Start"
        STOP = "stop", "Stop"

    class State(models.TextChoices):
        PENDING = "pending", "Pending"
        DONE = "done", "Done"
        FAILED = "failed", "Failed"

    cluster = models.ForeignKey(Cluster, models.PROTECT, related_name="commands")
    attempt = models.ForeignKey(Attempt, models.PROTECT, related_name="commands")
    kind = models.CharField(max_length=5, choices=Kind)
    state = models.CharField(max_length=8, choices=State, default=State.PENDING)
    payload = models.JSONField(default=dict)
    created_at = models.DateTimeField()
    #: Not sent before (back-off after an error).
    due_at = models.DateTimeField()
    tries = models.PositiveIntegerField(default=0)
    done_at = models.DateTimeField(null=True, blank=True)
    last_error = models.CharField(max_length=1000, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["cluster", "due_at", "id"], name="command_pending", condition=Q(state="pending")),
        ]
        constraints = [
            models.UniqueConstraint(fields=["attempt", "kind"], name="one_command_per_attempt_and_kind"),
        ]


class Hold(models.Model):
    """Capacity that an eviction plan frees, kept for the job it was made for (4.8)."""

    job = models.OneToOneField(Job, models.CASCADE, related_name="hold")
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="+")
    placement = models.JSONField()
    workers = models.PositiveIntegerField(default=1)
    victims = ArrayField(models.BigIntegerField(), default=list)
    made_at = models.DateTimeField()
    expires_at = models.DateTimeField()


class Reservation(models.Model):
    """GPUs promised to a blocked job from a future instant (4.5), as of the latest cycle."""

    job = models.OneToOneField(Job, models.CASCADE, related_name="reservation")
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="+")
    placement = models.JSONField()
    starts_at = models.DateTimeField()
    cycle = models.ForeignKey(Cycle, models.CASCADE, related_name="+")


class ReasonGroup(models.Model):
    """Blockers shared by waiting jobs: one row per team and set of reasons, its numbers brought up to date by
    each cycle, so that 100,000 waiting jobs do not mean 100,000 writes."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="+")
    #: Hash of what the jobs of the group have in common (services/reasons.py).
    key = models.CharField(max_length=64)
    #: First code: what lists and charts show.
    code = models.CharField(max_length=20)
    #: [{code, pool, team, limit, in_use, asked, free, largest, level, job, until, detail, remedy}, …]
    blockers = models.JSONField()
    worked_out_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "key"], name="one_reason_group_per_team_and_key")]


class QueueOrder(models.Model):
    """The order of 4.2 over all waiting jobs as of the latest cycle that changed it: one row, compressed ids."""

    cycle = models.OneToOneField(Cycle, models.CASCADE, related_name="+")
    worked_out_at = models.DateTimeField()
    count = models.PositiveIntegerField()
    #: zlib of little-endian int64 job ids, first in line first.
    job_ids = models.BinaryField()
    #: Fair shares of that cycle: [[team, pool, share, allocated, want], …], amounts in millionths of a GPU.
    shares = models.JSONField(default=list, blank=True)


class TeamUsage(models.Model):
    """Decayed GPU-hours of a leaf team in a pool as of an instant (4.1); later use is added from the ledger."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="+")
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="+")
    gpu_hours = models.FloatField(default=0)
    as_of = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "pool"], name="one_usage_per_team_and_pool")]


class Estimate(models.Model):
    """A start estimate as it was given, scored when the job starts (4.13)."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="estimates")
    made_at = models.DateTimeField()
    p50_at = models.DateTimeField(null=True)
    p90_at = models.DateTimeField(null=True)
    basis = models.CharField(max_length=300, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["job", "-made_at"]), models.Index(fields=["started_at"])]


class Drift(models.Model):
    """A difference between ledger and cluster, and what was done about it."""

    cluster = models.ForeignKey(Cluster, models.CASCADE, related_name="drifts")
    at = models.DateTimeField()
    #: missing, unknown-job, state, devices, node-state, requeued …
    kind = models.CharField(max_length=24)
    attempt = models.ForeignKey(Attempt, models.CASCADE, null=True, blank=True, related_name="drifts")
    subject = models.CharField(max_length=200)
    ledger_said = models.CharField(max_length=300, blank=True)
    cluster_said = models.CharField(max_length=300, blank=True)
    action = models.CharField(max_length=300)
    resolved_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["cluster", "-at"]), models.Index(fields=["resolved_at", "-at"])]
