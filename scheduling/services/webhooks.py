"""Webhooks as people manage them: made, changed, tried, deleted, and their messages sent again.

A team's webhooks are its leads', those of the whole organisation are the administrators'. Sending is
``services/delivery.py``.
"""

from __future__ import annotations

import base64
import json
import secrets as random_secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from scheduling.models import Delivery, Event, Webhook
from scheduling.services import clock
from scheduling.services.errors import Conflict, InvalidRequest
from scheduling.services.happenings import forget_listeners
from scheduling.services.outbound import url_problems
from scheduling.services.secrets import opened, seal
from scheduling.services.wakeup import wake_deliver
from teams.actors import Actor
from teams.models import Team
from teams.permissions import Permission, allowed, require, visible_team_ids
from teams.services import audit

#: What can be chosen; a webhook that is switched off cannot hear of it itself.
EVENTS = tuple(event.value for event in Event if event is not Event.WEBHOOK_DISABLED)
#: Name of the message of the test button.
TEST = "webhook.test"
SECRET_PREFIX = "whsec_"
MOST_PER_TEAM = 20


def managed_webhooks(actor: Actor) -> QuerySet[Webhook]:
    """Webhooks that the actor may see and change: the scope of every list and fetch."""
    rows = Webhook.objects.select_related("team", "created_by")
    if allowed(actor, Permission.MANAGE_ALL_WEBHOOKS):
        return rows
    return rows.filter(team_id__in=visible_team_ids(actor, Permission.MANAGE_WEBHOOKS) or set())


def managed_teams(actor: Actor) -> QuerySet[Team]:
    """Teams for which the actor may make webhooks."""
    ids = visible_team_ids(actor, Permission.MANAGE_WEBHOOKS)
    rows = Team.objects.filter(archived_at=None).order_by("name")
    return rows if ids is None else rows.filter(pk__in=ids)


def may_manage_any(actor: Actor) -> bool:
    ids = visible_team_ids(actor, Permission.MANAGE_WEBHOOKS)
    return ids is None or bool(ids)


@transaction.atomic
def create_webhook(
    *, actor: Actor, team: Team | None, name: str, url: str, events: Iterable[str]
) -> tuple[Webhook, str]:
    """A webhook and its secret, which is never shown again. Raises ``InvalidRequest`` and ``PermissionDenied``."""
    _require(actor, team)
    events = list(dict.fromkeys(events))
    _check(name=name, url=url, events=events)
    if Webhook.objects.filter(team=team).count() >= MOST_PER_TEAM:
        raise InvalidRequest({"team": [f"There are {MOST_PER_TEAM} webhooks already; delete one first."]})
    key = random_secrets.token_bytes(32)
    hook = Webhook(team=team, name=name.strip(), url=url, events=sorted(events), created_by=actor.user)
    hook.secret = seal({"key": base64.b64encode(key).decode()}) or b""
    _save(hook)
    audit.record(actor, "webhook.create", hook, after=_shown(hook), team=team)
    forget_listeners()
    return hook, SECRET_PREFIX + base64.b64encode(key).decode()


@transaction.atomic
def change_webhook(*, actor: Actor, webhook_id: int, version: int | None = None, **changes: Any) -> Webhook:
    """Change ``name``, ``url``, ``events``, ``enabled``. Switching it on forgets past failures.

    Raises ``Webhook.DoesNotExist``, ``InvalidRequest``, ``PermissionDenied``, and ``Conflict`` when ``version`` is old.
    """
    hook = _locked(actor, webhook_id)
    if version is not None and version != hook.version:
        raise Conflict(f"Webhook {webhook_id} was changed meanwhile: it has version {hook.version}, not {version}.")
    before = _shown(hook)
    _check(**{field: changes[field] for field in ("name", "url", "events") if field in changes})
    for field, value in changes.items():
        setattr(hook, field, sorted(set(value)) if field == "events" else value)
    if changes.get("enabled"):
        hook.disabled_reason, hook.failures, hook.failing_since = "", 0, None
    hook.version += 1
    _save(hook)
    audit.record(actor, "webhook.change", hook, before=before, after=_shown(hook), team=hook.team)
    forget_listeners()
    if hook.enabled:
        wake_deliver()
    return hook


@transaction.atomic
def delete_webhook(*, actor: Actor, webhook_id: int) -> None:
    """It goes with its deliveries; the audit log keeps that it was there."""
    hook = _locked(actor, webhook_id)
    audit.record(actor, "webhook.delete", hook, before=_shown(hook), team=hook.team)
    hook.delete()
    forget_listeners()


@transaction.atomic
def send_test(*, actor: Actor, webhook_id: int) -> Delivery:
    """A message without matter, sent the way of all others. Raises ``Conflict`` when it is switched off."""
    hook = _locked(actor, webhook_id)
    if not hook.enabled:
        raise Conflict(f"Webhook {hook.name} is switched off; switch it on first.")
    now = clock.now()
    body = message(TEST, now, {"text": f"A test by {actor.label}.", "webhook": hook.name})
    made = Delivery.objects.create(webhook=hook, event=TEST, body=body, due_at=now, created_at=now)
    wake_deliver()
    return made


@transaction.atomic
def replay(*, actor: Actor, delivery_id: int) -> Delivery:
    """Send a message again, whatever came of it, under the same id: who took it already can tell.

    Raises ``Delivery.DoesNotExist``, and ``Conflict`` when it is still on its way or its webhook is switched off.
    """
    found = Delivery.objects.filter(pk=delivery_id).values_list("webhook_id", flat=True).first()
    if found is None:
        raise Delivery.DoesNotExist(f"There is no delivery {delivery_id}.")
    try:
        hook = _locked(actor, found)
    except Webhook.DoesNotExist:
        raise Delivery.DoesNotExist(f"There is no delivery {delivery_id}.") from None
    row = Delivery.objects.select_for_update().get(pk=delivery_id)
    if row.state == Delivery.State.PENDING:
        raise Conflict(f"Delivery {delivery_id} is still being tried.")
    if not hook.enabled:
        raise Conflict(f"Webhook {hook.name} is switched off; switch it on first.")
    row.state, row.finished_at, row.due_at, row.tries = Delivery.State.PENDING, None, clock.now(), 0
    row.save(update_fields=["state", "finished_at", "due_at", "tries"])
    audit.record(actor, "webhook.replay", row, after={"webhook": hook.name, "event": row.event}, team=hook.team)
    wake_deliver()
    return row


def message(event: str, at: datetime, data: dict[str, Any], *, number: str = "") -> str:
    """The body of a delivery; the same bytes are signed and sent."""
    body = {"type": event, "timestamp": at.isoformat(), **({"id": number} if number else {}), "data": data}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def key_of(hook: Webhook) -> bytes:
    """Raises ``SecretUnreadable``."""
    kept = opened(hook.secret, f"webhook {hook.name}", "delete the webhook and make it again")
    return base64.b64decode(kept["key"])


# -- checks ----------------------------------------------------------------------------------------------------


def _require(actor: Actor, team: Team | None) -> None:
    if team is None:
        require(actor, Permission.MANAGE_ALL_WEBHOOKS)
    else:
        require(actor, Permission.MANAGE_WEBHOOKS, team)


def _locked(actor: Actor, webhook_id: int) -> Webhook:
    """What the actor may not manage does not exist for it."""
    hook = Webhook.objects.select_for_update(of=("self",)).select_related("team__parent__parent").filter(pk=webhook_id).first()  # fmt: skip
    wanted = Permission.MANAGE_ALL_WEBHOOKS if hook is not None and hook.team is None else Permission.MANAGE_WEBHOOKS
    if hook is None or not allowed(actor, wanted, hook.team):
        raise Webhook.DoesNotExist(f"There is no webhook {webhook_id}.")
    return hook


def _check(*, name: str | None = None, url: str | None = None, events: list[str] | None = None) -> None:
    errors: dict[str, list[str]] = {}
    if name is not None and (not name.strip() or len(name) > 100 or not name.isprintable()):
        errors["name"] = [f"{name[:120]!r}: a name of 1 to 100 visible characters is needed."]
    if url is not None and (problems := url_problems(url, private=settings.GPUPORTAL_WEBHOOK_PRIVATE)):
        errors["url"] = problems
    if events is not None:
        unknown = sorted(set(events) - set(EVENTS))
        if unknown or not events:
            errors["events"] = [f"{', '.join(unknown) or 'none'}: choose from {', '.join(EVENTS)}."]
    if errors:
        raise InvalidRequest(errors)


def _save(hook: Webhook) -> None:
    try:
        with transaction.atomic():
            hook.save()
    except IntegrityError as error:
        if "webhook_names_unique" not in str(error):
            raise
        raise InvalidRequest({"name": [f"There is a webhook {hook.name!r} already; choose another name."]}) from None


def _shown(hook: Webhook) -> dict[str, Any]:
    """What the audit log says of it; never the secret."""
    return {"name": hook.name, "url": hook.url, "events": hook.events, "enabled": hook.enabled}
