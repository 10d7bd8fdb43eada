"""What the pages keep for people: saved views, presets of the job form, and why jobs waited in the past."""

from __future__ import annotations

from django.db import models

from scheduling.models.jobs import Job
from teams.models.people import User


class SavedView(models.Model):
    """Filters of the queue under a name of its owner's."""

    user = models.ForeignKey(User, models.CASCADE, related_name="saved_views")
    name = models.CharField(max_length=60)
    #: As in the address: "state=waiting&team=vision".
    query = models.CharField(max_length=1000, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["user", "name"], name="one_saved_view_per_person_and_name")]


class Preset(models.Model):
    """A beginning of the job form that administrators keep: its values, and which fields matter with it."""

    slug = models.SlugField(max_length=40, unique=True)
    title = models.CharField(max_length=60)
    summary = models.CharField(max_length=200, blank=True)
    position = models.PositiveSmallIntegerField(default=100)
    #: Field names of the form -> texts as a person would type them.
    values = models.JSONField(default=dict, blank=True)
    #: Fields to show at once besides team, name and command; the others are folded.
    shown = models.JSONField(default=list, blank=True)
    enabled = models.BooleanField(default=True)
    changed_by = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["position", "title"]

    def __str__(self) -> str:
        return self.title


class WaitReason(models.Model):
    """From ``since`` on a waiting job was held up by ``code`` first, until its next row or its start.

    Noted once a minute (services/wait_history.py), and only when the code has changed.
    """

    job = models.ForeignKey(Job, models.CASCADE, related_name="wait_reasons")
    code = models.CharField(max_length=20)
    #: The blocker with its numbers as of then, as in ``ReasonGroup.blockers``.
    blocker = models.JSONField(default=dict)
    since = models.DateTimeField()

    class Meta:
        ordering = ["since"]
        indexes = [models.Index(fields=["job", "since"]), models.Index(fields=["since"])]
