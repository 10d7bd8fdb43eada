"""Clusters, pools, nodes and GPUs, with the history of when each existed and in which state it was."""

from __future__ import annotations

from decimal import Decimal

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.db import models
from django.db.models import F, Q

from teams.models.people import Team, User, slug_validator
from teams.models.ranges import same


class ClusterKind(models.TextChoices):
    SIMULATED = "simulated", "Simulated"
    SLURM = "slurm", "Slurm"
    KUBERNETES = "kubernetes", "Kubernetes"


class Cluster(models.Model):
    """One back end. ``config`` holds its settings in the clear, ``secret`` the encrypted ones."""

    name = models.CharField(max_length=64, unique=True, validators=[slug_validator])
    kind = models.CharField(max_length=12, choices=ClusterKind)
    config = models.JSONField(default=dict, blank=True)
    #: Encrypted JSON (services/secrets.py); never shown again once saved.
    secret = models.BinaryField(null=True, blank=True, editable=False)
    #: Names of the topology levels, widest first.
    levels = models.JSONField(default=list, blank=True)
    enabled = models.BooleanField(default=True)
    reachable = models.BooleanField(default=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    unreachable_since = models.DateTimeField(null=True, blank=True)
    last_error = models.CharField(max_length=500, blank=True)
    #: Position in the back end's stream of changes (resource version, last update time), for observe(since).
    observed_until = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class GPUModel(models.Model):
    """A kind of device. Prices are per GPU and hour, power in watts."""

    name = models.CharField(max_length=64, unique=True)
    memory_bytes = models.BigIntegerField()
    tdp_watts = models.PositiveIntegerField()
    idle_watts = models.PositiveIntegerField()
    price_per_hour = models.DecimalField(max_digits=10, decimal_places=4)
    #: For example ["1g.10gb", "2g.20gb"].
    mig_profiles = models.JSONField(default=list, blank=True)
    relative_speed = models.DecimalField(max_digits=6, decimal_places=3, default=Decimal(1))

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(condition=Q(memory_bytes__gte=0), name="gpumodel_memory_not_negative"),
            models.CheckConstraint(condition=Q(price_per_hour__gte=0), name="gpumodel_price_not_negative"),
            models.CheckConstraint(condition=Q(relative_speed__gt=0), name="gpumodel_speed_positive"),
            models.CheckConstraint(condition=Q(tdp_watts__gte=F("idle_watts")), name="gpumodel_tdp_at_least_idle"),
        ]

    def __str__(self) -> str:
        return self.name


class Pool(models.Model):
    """The nodes of one cluster that have the same GPU model. Quotas and prices are set per pool."""

    name = models.CharField(max_length=64, unique=True, validators=[slug_validator])
    cluster = models.ForeignKey(Cluster, models.PROTECT, related_name="pools")
    gpu_model = models.ForeignKey(GPUModel, models.PROTECT, related_name="pools")
    #: For planning around jobs that give none; empty = the policy's.
    default_walltime = models.DurationField(null=True, blank=True)
    #: Overrides the model's price.
    price_per_hour = models.DecimalField(max_digits=10, decimal_places=4, null=True, blank=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(fields=["cluster", "gpu_model"], name="one_pool_per_cluster_and_gpu_model"),
            models.CheckConstraint(
                condition=Q(price_per_hour__isnull=True) | Q(price_per_hour__gte=0), name="pool_price_not_negative"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def price(self) -> Decimal:
        """Per GPU and hour."""
        return self.price_per_hour if self.price_per_hour is not None else self.gpu_model.price_per_hour


class NodeState(models.TextChoices):
    UP = "up", "Up"
    DOWN = "down", "Down"
    DRAINED = "drained", "Drained"


class Node(models.Model):
    cluster = models.ForeignKey(Cluster, models.PROTECT, related_name="nodes")
    pool = models.ForeignKey(Pool, models.PROTECT, related_name="nodes")
    name = models.CharField(max_length=128)
    state = models.CharField(max_length=8, choices=NodeState, default=NodeState.UP)
    state_reason = models.CharField(max_length=300, blank=True)
    #: When the cluster last told us this state; older than the stale limit = unknown.
    state_seen_at = models.DateTimeField(null=True, blank=True)
    #: Drained here by an administrator (not by the cluster itself).
    drained_by_portal = models.BooleanField(default=False)
    #: Domain by level name: {"rack": "r1"}.
    domains = models.JSONField(default=dict, blank=True)
    shareable = models.BooleanField(default=False)
    retired_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["cluster", "name"]
        indexes = [models.Index(fields=["pool", "state"])]
        constraints = [
            models.UniqueConstraint(
                fields=["cluster", "name"], condition=Q(retired_at__isnull=True), name="one_living_node_per_name"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class GPU(models.Model):
    """One device. ``exists`` is its life in the inventory: the denominator of every utilisation."""

    node = models.ForeignKey(Node, models.PROTECT, related_name="gpus")
    #: Denormalised from the node: reports sum capacity per pool without a join.
    pool = models.ForeignKey(Pool, models.PROTECT, related_name="gpus")
    index = models.PositiveSmallIntegerField()
    uuid = models.CharField(max_length=64, blank=True)
    broken = models.BooleanField(default=False)
    exists = DateTimeRangeField()

    class Meta:
        ordering = ["node", "index"]
        constraints = [
            ExclusionConstraint(
                name="one_device_per_node_and_index_at_a_time",
                expressions=[
                    same("node"),
                    same("index"),
                    ("exists", RangeOperators.OVERLAPS),
                ],
            ),
            models.CheckConstraint(condition=Q(index__lt=63), name="gpu_index_below_63"),
        ]


class NodeInterval(models.Model):
    """A stretch of time in which a node was not simply up: ``down``, ``drained``, ``maintenance`` or ``unknown``."""

    node = models.ForeignKey(Node, models.CASCADE, related_name="intervals")
    state = models.CharField(
        max_length=12,
        choices=[("down", "Down"), ("drained", "Drained"), ("maintenance", "Maintenance"), ("unknown", "Unknown")],
    )
    during = DateTimeRangeField()
    reason = models.CharField(max_length=300, blank=True)
    actor_label = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="one_state_per_node_at_a_time",
                expressions=[same("node"), ("during", RangeOperators.OVERLAPS)],
            ),
        ]


class Window(models.Model):
    """Nodes taken out for a time: maintenance, or an advance reservation for one team.

    ``begins_at`` and ``ends_at`` are those of the first occurrence; with ``weekly`` it comes again at the same
    local time of ``time_zone`` every seven days until ``repeat_until``.
    """

    class Kind(models.TextChoices):
        MAINTENANCE = "maintenance", "Maintenance"
        RESERVATION = "reservation", "Advance reservation"

    name = models.CharField(max_length=100)
    kind = models.CharField(max_length=12, choices=Kind)
    nodes = models.ManyToManyField(Node, related_name="windows")
    team = models.ForeignKey(Team, models.CASCADE, null=True, blank=True, related_name="+")
    begins_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    time_zone = models.CharField(max_length=64, default="UTC")
    weekly = models.BooleanField(default=False)
    repeat_until = models.DateField(null=True, blank=True)
    reason = models.CharField(max_length=300, blank=True)
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["begins_at"]
        indexes = [models.Index(fields=["cancelled_at", "ends_at"])]
        constraints = [
            models.CheckConstraint(condition=Q(ends_at__gt=F("begins_at")), name="window_ends_after_it_begins"),
            models.CheckConstraint(
                condition=Q(kind="maintenance", team__isnull=True) | Q(kind="reservation", team__isnull=False),
                name="window_team_only_for_reservations",
            ),
        ]
