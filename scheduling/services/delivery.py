"""Sending the deliveries of webhooks: each at least once, signed, with retries that thin out.

Rows are claimed in a short transaction by moving their due time past a lease; they are sent without one, and what came
of it is written if nobody else has claimed them since. After a crash in between the lease runs out and they are sent
again, under the same id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import connection, transaction
from django.db.models import F

from gpuportal import __version__
from scheduling.models import Delivery, Event, Webhook
from scheduling.services import clock
from scheduling.services.happenings import announce, forget_listeners
from scheduling.services.outbound import Answer, post
from scheduling.services.secrets import SecretUnreadable
from scheduling.services.webhooks import key_of
from teams.actors import Actor
from teams.services import audit

log = structlog.get_logger(__name__)

#: Deliveries at once: in all, and to one webhook, so that a slow one does not hold up the others.
AT_ONCE, AT_ONCE_EACH = 32, 8
#: A claimed delivery is nobody else's for so long; more than a try can take.
LEASE = timedelta(seconds=120)
FIRST_PAUSE, MOST_PAUSE = 10.0, 3600.0
#: The last try comes about half a day after the first.
MOST_TRIES = 20
#: A webhook with failures only for so long, and at least so many, is switched off.
DISABLE_AFTER, DISABLE_FROM = timedelta(days=3), 10
#: Tries that a delivery's log keeps.
LOG_LENGTH = 20
#: Seconds after which a call of ``deliver`` ends; the next wake-up goes on.
LONGEST = 30.0

_CLAIM = """
UPDATE scheduling_delivery SET tries = tries + 1, due_at = %(lease)s
WHERE id IN (
    SELECT due.id FROM scheduling_webhook w CROSS JOIN LATERAL (
        SELECT d.id FROM scheduling_delivery d
        WHERE d.webhook_id = w.id AND d.state = 'pending' AND d.due_at <= %(now)s
        ORDER BY d.due_at, d.id LIMIT %(each)s FOR UPDATE SKIP LOCKED
    ) AS due
    WHERE w.enabled ORDER BY due.id LIMIT %(most)s
)
RETURNING id
"""


def deliver() -> int:
    """Send what is due until nothing is left, or for half a minute; returns the number of tries."""
    until = time.monotonic() + LONGEST
    tried = 0
    while time.monotonic() < until:
        now = clock.now()
        rows = _claim(now)
        if not rows:
            break
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook") as pool:
            answers = list(pool.map(_try, rows, [now] * len(rows)))
        for row, answer in zip(rows, answers, strict=True):
            _record(row, answer)
        tried += len(rows)
    return tried


def _claim(now: datetime) -> list[Delivery]:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_CLAIM, {"now": now, "lease": now + LEASE, "each": AT_ONCE_EACH, "most": AT_ONCE})
        ids = [row[0] for row in cursor.fetchall()]
    return list(Delivery.objects.filter(pk__in=ids).select_related("webhook").order_by("id")) if ids else []


def _try(row: Delivery, at: datetime) -> Answer:
    """One try, in a thread and without the database."""
    body, stamp, number = row.body.encode(), str(int(at.timestamp())), str(row.uuid)
    try:
        key = key_of(row.webhook)
    except SecretUnreadable as error:
        return Answer(None, "", str(error), 0.0)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"GPU-Portal/{__version__}",
        "webhook-id": number,
        "webhook-timestamp": stamp,
        "webhook-signature": signature(key, number, stamp, body),
    }
    return post(row.webhook.url, body, headers, private=settings.GPUPORTAL_WEBHOOK_PRIVATE)


def signature(key: bytes, number: str, stamp: str, body: bytes) -> str:
    """HMAC-SHA256 over id, POSIX seconds and body, as the Standard Webhooks specification has it."""
    digest = hmac.new(key, f"{number}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def pause_after(tries: int) -> timedelta:
    """10 s, 20 s, 40 s … up to an hour, each shortened by up to a half so that failures do not come in step."""
    longest = min(MOST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries - 1, 20))
    return timedelta(seconds=longest * random.uniform(0.5, 1))


@transaction.atomic
def _record(claimed: Delivery, answer: Answer) -> None:
    now = clock.now()
    row = Delivery.objects.select_for_update().filter(pk=claimed.pk).first()
    if row is None:
        return  # deleted with its webhook meanwhile
    line = {
        "at": now.isoformat(), "code": answer.code, "ms": round(answer.seconds * 1000), "error": answer.error,
        "excerpt": answer.excerpt,
    }  # fmt: skip
    row.log = [*row.log, line][-LOG_LENGTH:]
    row.response_code = answer.code
    pending = row.state == Delivery.State.PENDING
    mine = pending and row.tries == claimed.tries
    if pending and answer.good:
        row.state, row.finished_at = Delivery.State.DELIVERED, now
    elif mine and (row.tries >= MOST_TRIES or answer.code == 410):
        row.state, row.finished_at = Delivery.State.FAILED, now
    elif mine:
        row.due_at = now + pause_after(row.tries)
    row.save(update_fields=["log", "response_code", "state", "finished_at", "due_at"])
    _note_health(row.webhook_id, answer, now)
    if not answer.good:
        log.info("webhook.failed", webhook=row.webhook_id, delivery=str(row.uuid), tries=row.tries, error=answer.error)


def _note_health(webhook_id: int, answer: Answer, now: datetime) -> None:
    hooks = Webhook.objects.filter(pk=webhook_id)
    if answer.good:
        hooks.update(failures=0, failing_since=None, last_success_at=now)
        return
    hooks.update(failures=F("failures") + 1)
    hooks.filter(failing_since=None).update(failing_since=now)
    hook = hooks.select_related("team").get()
    assert hook.failing_since is not None
    if answer.code == 410:
        _disable(hook, now, "The receiver answered 410: it is gone.")
    elif hook.failures >= DISABLE_FROM and now - hook.failing_since >= DISABLE_AFTER:
        _disable(hook, now, f"Nothing was taken since {hook.failing_since:%Y-%m-%d %H:%M} UTC. Last: {answer.error}")


def _disable(hook: Webhook, now: datetime, reason: str) -> None:
    """What waits for it is kept for as long as deliveries are, and sent when it is switched on again."""
    if not Webhook.objects.filter(pk=hook.pk, enabled=True).update(
        enabled=False, disabled_reason=reason[:300], version=F("version") + 1
    ):
        return
    audit.record(Actor.system("webhooks"), "webhook.disable", hook, after={"enabled": False}, reason=reason, team=hook.team)  # fmt: skip
    announce(Event.WEBHOOK_DISABLED, team=hook.team, at=now, webhook=hook.pk, name=hook.name, reason=reason[:300])
    forget_listeners()
    log.warning("webhook.disabled", webhook=hook.pk, reason=reason)
