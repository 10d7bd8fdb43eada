"""Jobs: what was asked for, where it stands, and every change of state."""

from __future__ import annotations

from datetime import timedelta

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.db.models import F, Q

from teams.models.people import Team, User


class JobState(models.TextChoices):
    """``running`` from the decision to start on; ``waiting`` again after an eviction or before a retry."""

    WAITING = "waiting", "Waiting"
    RUNNING = "running", "Running"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    TIMED_OUT = "timed_out", "Timed out"
    CANCELLED = "cancelled", "Cancelled"


OPEN_STATES = (JobState.WAITING, JobState.RUNNING)


class WorkloadClass(models.TextChoices):
    TRAINING = "training", "Training"
    BATCH = "batch", "Batch"
    INTERACTIVE = "interactive", "Interactive"
    INFERENCE = "inference", "Inference"


class Priority(models.IntegerChoices):
    LOW = 0, "Low"
    NORMAL = 1, "Normal"
    HIGH = 2, "High"
    URGENT = 3, "Urgent"


class Job(models.Model):
    """A request for GPUs by a leaf team. Written only by ``scheduling.services``."""

    name = models.CharField(max_length=200)
    team = models.ForeignKey(Team, models.PROTECT, related_name="jobs")
    owner = models.ForeignKey(User, models.PROTECT, related_name="jobs")
    state = models.CharField(max_length=10, choices=JobState, default=JobState.WAITING)
    workload_class = models.CharField(max_length=12, choices=WorkloadClass, default=WorkloadClass.TRAINING)
    priority = models.PositiveSmallIntegerField(choices=Priority, default=Priority.NORMAL)

    # what is asked for
    workers = models.PositiveIntegerField(default=1)
    min_workers = models.PositiveIntegerField(default=1)
    #: Whole devices per worker; 0 with a share.
    gpus = models.PositiveSmallIntegerField(default=1)
    share = models.DecimalField(max_digits=7, decimal_places=6, null=True, blank=True)
    share_memory_bytes = models.BigIntegerField(null=True, blank=True)
    #: Acceptable pools, best first.
    pools = ArrayField(models.BigIntegerField())
    topology_level = models.CharField(max_length=64, blank=True)
    topology_required = models.BooleanField(default=False)
    walltime = models.DurationField(null=True, blank=True)
    interruptible = models.BooleanField(default=False)
    checkpoint_every = models.DurationField(null=True, blank=True)
    grace = models.DurationField(default=timedelta(0))
    retries = models.PositiveSmallIntegerField(default=0)
    not_before = models.DateTimeField(null=True, blank=True)
    command = models.TextField(blank=True)
    image = models.CharField(max_length=300, blank=True)
    environment = models.JSONField(default=dict, blank=True)
    working_directory = models.CharField(max_length=500, blank=True)
    #: For the simulated back end: {"runs": seconds, "fails": [...]}; ignored by real ones.
    simulation = models.JSONField(null=True, blank=True)

    # where it stands
    held = models.BooleanField(default=False)
    submitted_at = models.DateTimeField()
    #: Since when it could have started: submit, requeue, not-before or the last dependency met.
    eligible_at = models.DateTimeField()
    backoff_until = models.DateTimeField(null=True, blank=True)
    unmet_dependencies = models.PositiveIntegerField(default=0)
    user_failures = models.PositiveSmallIntegerField(default=0)
    infrastructure_failures = models.PositiveSmallIntegerField(default=0)
    #: Nodes that failed the last attempt: tried last (4.4).
    avoid_nodes = ArrayField(models.BigIntegerField(), default=list, blank=True)
    unsatisfiable = models.CharField(max_length=300, blank=True)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    #: ``eligible_at`` of the wait that was last announced as long.
    long_wait_told_for = models.DateTimeField(null=True, blank=True, editable=False)
    first_started_at = models.DateTimeField(null=True, blank=True)
    first_result_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    #: Why it waits now: shared by all jobs of its team with the same request.
    reason_group = models.ForeignKey("scheduling.ReasonGroup", models.SET_NULL, null=True, blank=True, related_name="+")
    cloned_from = models.ForeignKey("self", models.SET_NULL, null=True, blank=True, related_name="+")
    #: Array or sweep the job belongs to; empty = none.
    array_id = models.CharField(max_length=64, blank=True)
    array_index = models.PositiveIntegerField(null=True, blank=True)
    #: Rises with every change: the ETag.
    version = models.PositiveIntegerField(default=1)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["priority", "submitted_at"], name="job_waiting", condition=Q(state="waiting")),
            models.Index(fields=["id"], name="job_running", condition=Q(state="running")),
            models.Index(fields=["team", "state", "-id"], name="job_team_state"),
            models.Index(fields=["owner", "state", "-id"], name="job_owner_state"),
            models.Index(fields=["owner", "-id"], name="job_owner"),
            models.Index(fields=["state", "-id"], name="job_state"),
            models.Index(fields=["-submitted_at"], name="job_submitted"),
            models.Index(fields=["-finished_at"], name="job_finished"),
            models.Index(fields=["array_id"], name="job_array", condition=~Q(array_id="")),
            GinIndex(fields=["pools"], name="job_pools"),
        ]
        constraints = [
            models.CheckConstraint(
                # A comparison with NULL is neither true nor false, and a check refuses only what is false.
                condition=Q(gpus__gt=0, share__isnull=True, share_memory_bytes__isnull=True)
                | Q(gpus=0, workers=1, share__isnull=False, share__gt=0, share__lte=1, share_memory_bytes__isnull=True)
                | Q(gpus=0, workers=1, share__isnull=True, share_memory_bytes__isnull=False, share_memory_bytes__gt=0),
                name="job_asks_for_gpus_or_one_share",
            ),
            models.CheckConstraint(
                condition=Q(workers__gte=1, min_workers__gte=1, min_workers__lte=F("workers")),
                name="job_workers_in_order",
            ),
            models.CheckConstraint(condition=Q(state__in=JobState.values), name="job_state_known"),
            models.CheckConstraint(
                condition=Q(state__in=["waiting", "running"], finished_at__isnull=True)
                | Q(state__in=["succeeded", "failed", "timed_out", "cancelled"], finished_at__isnull=False),
                name="job_finished_exactly_when_final",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.pk})"


class JobDependency(models.Model):
    """``job`` starts only when ``on`` has succeeded."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="dependencies")
    on = models.ForeignKey(Job, models.CASCADE, related_name="dependents")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "on"], name="one_dependency_per_pair"),
            models.CheckConstraint(condition=~Q(job=F("on")), name="job_not_after_itself"),
        ]


class JobEvent(models.Model):
    """One line of a job's history: every change of state of it and its attempts, with actor and reason."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="events")
    attempt = models.ForeignKey("scheduling.Attempt", models.CASCADE, null=True, blank=True, related_name="events")
    at = models.DateTimeField()
    #: submitted, state, attempt, checkpoint, evicted, held, released, changed, drift …
    kind = models.CharField(max_length=24)
    from_state = models.CharField(max_length=12, blank=True)
    to_state = models.CharField(max_length=12, blank=True)
    actor = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    #: "scheduler", "cluster NAME", or the person's or token's name.
    actor_label = models.CharField(max_length=200)
    reason = models.CharField(max_length=1000, blank=True)
    data = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["job", "id"]), models.Index(fields=["at"])]
