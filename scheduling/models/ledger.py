"""The ledger: attempts, and the append-only allocation intervals that all accounting derives from."""

from __future__ import annotations

import uuid
from decimal import Decimal

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.contrib.postgres.indexes import GistIndex
from django.db import models
from django.db.models import F, Q

from scheduling.models.hardware import GPU, Pool
from scheduling.models.jobs import Job
from teams.models.people import Team
from teams.models.ranges import same


class AttemptState(models.TextChoices):
    """``starting`` = decided, the cluster has not confirmed yet; ``stopping`` = told to end, in its grace."""

    STARTING = "starting", "Starting"
    RUNNING = "running", "Running"
    STOPPING = "stopping", "Stopping"
    ENDED = "ended", "Ended"


class Outcome(models.TextChoices):
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    TIMED_OUT = "timed_out", "Timed out"
    CANCELLED = "cancelled", "Cancelled"
    PREEMPTED = "preempted", "Preempted"
    NODE_FAILED = "node_failed", "Node failed"
    LOST = "lost", "Lost"


class Cause(models.TextChoices):
    """Why an attempt did not succeed (design.md 7, failure)."""

    NONE = "", "None"
    USER = "user", "User code"
    OUT_OF_MEMORY = "oom", "Out of memory"
    NODE = "node", "Node"
    XID = "xid", "GPU error (XID)"
    NETWORK = "network", "Network"
    PREEMPTION = "preemption", "Preemption"
    WALLTIME = "walltime", "Walltime"
    REJECTED = "rejected", "Rejected by the cluster"


class Attempt(models.Model):
    """One run of a job. ``uuid`` names it on the cluster and makes start and stop idempotent."""

    uuid = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    job = models.ForeignKey(Job, models.PROTECT, related_name="attempts")
    #: Denormalised from the job: reports sum per team without a join.
    team = models.ForeignKey(Team, models.PROTECT, related_name="+")
    pool = models.ForeignKey(Pool, models.PROTECT, related_name="attempts")
    number = models.PositiveIntegerField()
    state = models.CharField(max_length=8, choices=AttemptState, default=AttemptState.STARTING)
    outcome = models.CharField(max_length=12, choices=Outcome, blank=True)
    cause = models.CharField(max_length=12, choices=Cause, blank=True)
    detail = models.CharField(max_length=1000, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    workers = models.PositiveIntegerField()
    #: GPUs held in all.
    gpus = models.DecimalField(max_digits=14, decimal_places=6)
    #: [[node_id, device bit mask, share in millionths], …], one per worker.
    placement = models.JSONField()
    filler = models.BooleanField(default=False)
    filler_until = models.DateTimeField(null=True, blank=True)
    #: Decided and allocated.
    started_at = models.DateTimeField()
    #: Confirmed by the cluster.
    running_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    eligible_at = models.DateTimeField(
        help_text="Since when this attempt waited: requeue, not-before, dependencies met"
    )
    last_checkpoint_at = models.DateTimeField(null=True, blank=True)
    stop_requested_at = models.DateTimeField(null=True, blank=True)
    stop_by = models.DateTimeField(null=True, blank=True)
    #: reclaim, preemption, reservation, consolidation, shrink, grow, cancel, walltime, idle.
    stop_reason = models.CharField(max_length=16, blank=True)
    evicted_for = models.ForeignKey(Job, models.SET_NULL, null=True, blank=True, related_name="evicted")
    #: Shrink, grow, move: workers it goes on with in its next attempt.
    continue_workers = models.PositiveIntegerField(null=True, blank=True)
    #: Since when the workers it lacks would have found free GPUs (4.11).
    growable_since = models.DateTimeField(null=True, blank=True)
    #: Work thrown away at the end, GPU-seconds.
    lost_gpu_seconds = models.DecimalField(max_digits=16, decimal_places=3, default=Decimal(0))
    #: The cluster's own name of it (Slurm job id, Kubernetes UID).
    backend_id = models.CharField(max_length=100, blank=True)
    seen_at = models.DateTimeField(null=True, blank=True)
    #: Hash of the secret that lets the running job mark checkpoints and first results.
    token_hash = models.CharField(max_length=64, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["state"], name="attempt_open", condition=~Q(state="ended")),
            models.Index(fields=["job", "number"], name="attempt_job_number"),
            models.Index(fields=["started_at"], name="attempt_started"),
            models.Index(fields=["ended_at"], name="attempt_ended"),
            models.Index(fields=["team", "-started_at"], name="attempt_team_started"),
            models.Index(fields=["backend_id"], name="attempt_backend_id", condition=~Q(backend_id="")),
        ]
        constraints = [
            models.UniqueConstraint(fields=["job"], condition=~Q(state="ended"), name="one_open_attempt_per_job"),
            models.UniqueConstraint(fields=["job", "number"], name="attempt_numbers_unique"),
            models.CheckConstraint(
                condition=Q(state="ended", ended_at__isnull=False) & ~Q(outcome="")
                | ~Q(state="ended") & Q(ended_at__isnull=True, outcome=""),
                name="attempt_ended_exactly_with_outcome",
            ),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True) | Q(ended_at__gte=F("started_at")), name="attempt_ends_after_start"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.job_id}/{self.number}"


class Allocation(models.Model):
    """One GPU, or a share of it, held by one attempt for an interval. Rows are closed once, never deleted.

    Whole devices exclude one another by constraint; that shares on one device never exceed 1, and never meet a
    whole allocation, is held by a trigger (migration ``ledger_guards``).
    """

    attempt = models.ForeignKey(Attempt, models.PROTECT, related_name="allocations")
    gpu = models.ForeignKey(GPU, models.PROTECT, related_name="allocations")
    team = models.ForeignKey(Team, models.PROTECT, related_name="+")
    pool = models.ForeignKey(Pool, models.PROTECT, related_name="+")
    share = models.DecimalField(max_digits=7, decimal_places=6, default=Decimal(1))
    #: Open above while it is held.
    during = DateTimeRangeField()

    class Meta:
        indexes = [
            GistIndex(fields=["during"], name="allocation_during"),
            models.Index(fields=["attempt"], name="allocation_attempt"),
            models.Index(fields=["gpu"], name="allocation_open", condition=Q(during__endswith__isnull=True)),
        ]
        constraints = [
            ExclusionConstraint(
                name="whole_gpu_held_once",
                expressions=[same("gpu"), ("during", RangeOperators.OVERLAPS)],
                condition=Q(share=1),
            ),
            models.CheckConstraint(condition=Q(share__gt=0, share__lte=1), name="allocation_share_between_0_and_1"),
        ]


class Mark(models.Model):
    """Something a running attempt told: a checkpoint was written, a first result is there."""

    class Kind(models.TextChoices):
        CHECKPOINT = "checkpoint", "Checkpoint"
        FIRST_RESULT = "first-result", "First result"

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="marks")
    kind = models.CharField(max_length=12, choices=Kind)
    at = models.DateTimeField()
    detail = models.CharField(max_length=300, blank=True)

    class Meta:
        indexes = [models.Index(fields=["attempt", "at"])]
