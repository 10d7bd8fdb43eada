"""Tokens, the audit log, and the memory of idempotent requests."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from teams.models.people import Team, User


class ApiToken(models.Model):
    """A secret for the API, of a person or of a team's robot. Only its hash is stored; it is shown once."""

    user = models.ForeignKey(User, models.CASCADE, null=True, blank=True, related_name="api_tokens")
    team = models.ForeignKey(Team, models.CASCADE, null=True, blank=True, related_name="robot_tokens")
    name = models.CharField(max_length=100)
    #: First characters of the secret, to recognise it in lists and to find its row.
    prefix = models.CharField(max_length=12, unique=True)
    secret_hash = models.CharField(max_length=64)
    scopes = ArrayField(models.CharField(max_length=32), default=list)
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    last_used_from = models.GenericIPAddressField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.CheckConstraint(
                condition=Q(user__isnull=False, team__isnull=True) | Q(user__isnull=True, team__isnull=False),
                name="token_of_a_person_or_of_a_team",
            ),
        ]


class AuditEvent(models.Model):
    """Who did what to which object, before and after, from where. Append-only (a trigger holds it)."""

    at = models.DateTimeField(auto_now_add=True)
    actor = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+", db_constraint=False)
    #: Name of the person, robot token or system part, kept when the account is deleted.
    actor_label = models.CharField(max_length=200)
    action = models.CharField(max_length=64)
    object_type = models.CharField(max_length=64)
    object_id = models.CharField(max_length=64)
    object_label = models.CharField(max_length=200, blank=True)
    team = models.ForeignKey(Team, models.DO_NOTHING, null=True, blank=True, related_name="+", db_constraint=False)
    before = models.JSONField(null=True, blank=True)
    after = models.JSONField(null=True, blank=True)
    reason = models.CharField(max_length=1000, blank=True)
    via = models.CharField(max_length=16, default="system")  # page, api, cli, system
    address = models.GenericIPAddressField(null=True, blank=True)
    request_id = models.CharField(max_length=64, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["-at"]),
            models.Index(fields=["object_type", "object_id", "-id"]),
            models.Index(fields=["actor", "-id"]),
            models.Index(fields=["team", "-id"]),
            models.Index(fields=["action", "-id"]),
        ]


class IdempotencyKey(models.Model):
    """Answer of a submit that carried ``Idempotency-Key``, given again when the same request comes again."""

    #: "user:ID" or "token:ID".
    owner = models.CharField(max_length=64)
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(max_length=64)
    #: 0 while the first request is still at work.
    status = models.PositiveSmallIntegerField(default=0)
    body = models.JSONField(null=True)
    object_id = models.BigIntegerField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [models.Index(fields=["created_at"])]
        constraints = [models.UniqueConstraint(fields=["owner", "key"], name="one_answer_per_idempotency_key")]
