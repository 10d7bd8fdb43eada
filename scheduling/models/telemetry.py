"""What the devices measured. A missing sample is unknown, never zero."""

from __future__ import annotations

from django.db import models

from scheduling.models.hardware import GPU
from scheduling.models.ledger import Attempt


class GPUSample(models.Model):
    """Average of one device over ``seconds`` ending at ``at``."""

    gpu = models.ForeignKey(GPU, models.CASCADE, related_name="samples")
    attempt = models.ForeignKey(Attempt, models.CASCADE, null=True, blank=True, related_name="samples")
    at = models.DateTimeField()
    seconds = models.PositiveIntegerField(default=60)
    #: Ratio 0 to 1; null = not measured.
    activity = models.FloatField(null=True)
    #: Which counter ``activity`` is: sm_active, gr_engine_active, gpu_util.
    metric = models.CharField(max_length=20, blank=True)
    power_watts = models.FloatField(null=True)
    energy_joules = models.FloatField(null=True)
    memory_used_bytes = models.BigIntegerField(null=True)

    class Meta:
        indexes = [models.Index(fields=["attempt", "at"])]
        constraints = [models.UniqueConstraint(fields=["gpu", "at"], name="one_sample_per_gpu_and_instant")]


class GPUEvent(models.Model):
    """A device error (XID) or a fault told by the cluster."""

    gpu = models.ForeignKey(GPU, models.CASCADE, related_name="events")
    attempt = models.ForeignKey(Attempt, models.CASCADE, null=True, blank=True, related_name="gpu_events")
    at = models.DateTimeField()
    kind = models.CharField(max_length=20)
    code = models.IntegerField(null=True)
    detail = models.CharField(max_length=300, blank=True)

    class Meta:
        indexes = [models.Index(fields=["gpu", "-at"]), models.Index(fields=["-at"])]
