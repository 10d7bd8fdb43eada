"""What is told to people and programs: the outbox of happenings, webhooks with their deliveries, the inbox."""

from __future__ import annotations

import uuid

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from scheduling.models.jobs import JobEvent
from teams.models.people import Team, User


class Event(models.TextChoices):
    """What can be heard of. The values are public: webhooks and preferences name them."""

    JOB_STARTED = "job.started", "A job started"
    JOB_ENDED = "job.ended", "A job succeeded or was cancelled"
    JOB_FAILED = "job.failed", "A job failed, ran out of walltime or was given up"
    JOB_EVICTED = "job.evicted", "A job was evicted and waits again"
    JOB_WAITING_LONG = "job.waiting-long", "A job has waited for long"
    BUDGET_WARNING = "budget.warning", "A budget is nearly used up"
    BUDGET_EXHAUSTED = "budget.exhausted", "A budget is used up"
    WEBHOOK_DISABLED = "webhook.disabled", "A webhook was switched off after failing for days"


class Happening(models.Model):
    """Outbox: something that happened and has not been told yet. Written in the transaction of the change itself,
    deleted in the one that makes deliveries and notifications of it."""

    #: The same in every delivery about it.
    uuid = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    event = models.CharField(max_length=20, choices=Event)
    at = models.DateTimeField()
    #: Whom it concerns; none = the whole organisation.
    team = models.ForeignKey(Team, models.CASCADE, null=True, blank=True, related_name="+")
    #: Change of a job or attempt that it is about; none for what is about no job.
    job_event = models.ForeignKey(JobEvent, models.CASCADE, null=True, blank=True, related_name="+")
    data = models.JSONField(default=dict, blank=True)


class Webhook(models.Model):
    """An address that hears of events, of a team with those below it, or of the whole organisation."""

    team = models.ForeignKey(Team, models.CASCADE, null=True, blank=True, related_name="webhooks")
    name = models.CharField(max_length=100)
    url = models.CharField(max_length=500)
    events = ArrayField(models.CharField(max_length=20))
    #: Encrypted (services/secrets.py); shown once.
    secret = models.BinaryField(editable=False)
    enabled = models.BooleanField(default=True)
    #: Why the portal switched it off; empty = a person did, or nobody.
    disabled_reason = models.CharField(max_length=300, blank=True)
    #: Failed tries since the last success.
    failures = models.PositiveIntegerField(default=0)
    failing_since = models.DateTimeField(null=True, blank=True)
    last_success_at = models.DateTimeField(null=True, blank=True)
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    #: Rises with every change by a person: the ETag.
    version = models.PositiveIntegerField(default=1)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["team", "name"], nulls_distinct=False, name="webhook_names_unique_within_a_team"
            ),
            models.CheckConstraint(condition=~Q(events=[]), name="webhook_hears_of_something"),
        ]

    def __str__(self) -> str:
        return self.name


class Delivery(models.Model):
    """One message to one webhook. Sent at least once; ``uuid`` goes with every try, so that it is taken once."""

    class State(models.TextChoices):
        PENDING = "pending", "Pending"
        DELIVERED = "delivered", "Delivered"
        FAILED = "failed", "Given up"

    uuid = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    webhook = models.ForeignKey(Webhook, models.CASCADE, related_name="deliveries")
    event = models.CharField(max_length=20)
    #: Exactly what is signed and sent.
    body = models.TextField()
    state = models.CharField(max_length=9, choices=State, default=State.PENDING)
    tries = models.PositiveIntegerField(default=0)
    #: Not sent before; while it is being sent, when another worker may take it over.
    due_at = models.DateTimeField()
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    #: Of the latest try; none = there was no answer.
    response_code = models.PositiveSmallIntegerField(null=True, blank=True)
    #: [{at, code, ms, error, excerpt}, …], the latest tries, oldest first.
    log = models.JSONField(default=list, blank=True)

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "deliveries"
        indexes = [
            models.Index(fields=["webhook", "due_at", "id"], name="delivery_pending", condition=Q(state="pending")),
            models.Index(fields=["webhook", "-id"], name="delivery_webhook"),
            models.Index(fields=["created_at"], name="delivery_created"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(state="pending", finished_at__isnull=True)
                | Q(state__in=["delivered", "failed"], finished_at__isnull=False),
                name="delivery_finished_exactly_when_final",
            ),
        ]


class Channel(models.TextChoices):
    """How a person hears of an event; e-mail includes the inbox."""

    OFF = "off", "Not at all"
    INBOX = "inbox", "Inbox"
    EMAIL = "email", "Inbox and e-mail"


class Preference(models.Model):
    """A person's choice for one event; without a row the default holds (services/preferences.py)."""

    user = models.ForeignKey(User, models.CASCADE, related_name="preferences")
    event = models.CharField(max_length=20, choices=Event)
    channel = models.CharField(max_length=5, choices=Channel)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "event"], name="one_preference_per_user_and_event"),
            models.CheckConstraint(condition=Q(channel__in=Channel.values), name="preference_channel_known"),
        ]


class Notification(models.Model):
    """A line in a person's inbox; many of one kind at once are one line."""

    user = models.ForeignKey(User, models.CASCADE, related_name="notifications")
    event = models.CharField(max_length=20, choices=Event)
    at = models.DateTimeField()
    title = models.CharField(max_length=300)
    text = models.TextField(blank=True)
    #: Path in the portal; empty = nowhere to go.
    path = models.CharField(max_length=200, blank=True)
    #: Happenings behind it.
    count = models.PositiveIntegerField(default=1)
    read_at = models.DateTimeField(null=True, blank=True)
    #: To be mailed with whatever else is there by then; none = not, or not any more.
    mail_due_at = models.DateTimeField(null=True, blank=True)
    mailed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["user", "-id"], name="notification_user"),
            models.Index(fields=["user"], name="notification_unread", condition=Q(read_at__isnull=True)),
            models.Index(fields=["mail_due_at"], name="notification_mail", condition=Q(mail_due_at__isnull=False)),
            models.Index(fields=["at"], name="notification_at"),
        ]
