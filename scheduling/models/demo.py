"""Where the demonstration's feed stands."""

from __future__ import annotations

from django.db import models


class DemoFeed(models.Model):
    """One row while a demonstration is loaded: the trace goes on from ``position`` at ``speed``."""

    #: Seconds since the beginning of the shipped slice.
    position = models.FloatField()
    #: Trace seconds per real second.
    speed = models.FloatField()
    #: One of so many of the trace's jobs is fed.
    thin = models.PositiveIntegerField(default=1)
    as_of = models.DateTimeField()
    running = models.BooleanField(default=True)
