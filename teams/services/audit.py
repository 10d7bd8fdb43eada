"""The audit log: one function that everything which changes something calls."""

from __future__ import annotations

from typing import Any

from django.db import models

from teams.actors import Actor
from teams.models import AuditEvent, Team


def record(
    actor: Actor,
    action: str,
    target: models.Model,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str = "",
    team: Team | None = None,
) -> AuditEvent:
    """Who did what to which object, before and after. Call it inside the transaction of the change."""
    return AuditEvent.objects.create(
        actor=actor.user,
        actor_label=actor.label[:200],
        action=action,
        object_type=target._meta.label_lower,
        object_id=str(target.pk),
        object_label=str(target)[:200],
        team=team,
        before=before,
        after=after,
        reason=reason[:1000],
        via=actor.via,
        address=actor.address,
        request_id=actor.request_id[:64],
    )
