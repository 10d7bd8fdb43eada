"""Notifications by mail: what came for a person within a minute is one mail, in plain text and simple HTML."""

from __future__ import annotations

from datetime import datetime, timedelta
from smtplib import SMTPException

import structlog
from django.conf import settings
from django.core.mail import EmailMultiAlternatives
from django.db import transaction
from django.template.loader import render_to_string
from django.urls import reverse

from scheduling.models import Notification
from teams.models import User

log = structlog.get_logger(__name__)

#: Lines of one mail; the rest is counted and found in the inbox.
MOST_LINES = 50
#: After a failure it is tried again so much later, and not for longer than a day.
AGAIN, GIVE_UP = timedelta(minutes=5), timedelta(days=1)
MOST_PEOPLE = 500


def why_no_mail(user: User) -> str:
    """Why the portal cannot send mail to a person; empty = it can."""
    if settings.EMAIL_BACKEND.endswith("dummy.EmailBackend"):
        return "This portal sends no e-mail; an administrator sets EMAIL_HOST first."
    if not user.email:
        return "Your account has no e-mail address; an administrator or your sign-in provider adds it."
    return ""


def can_mail(user: User) -> bool:
    return not why_no_mail(user)


def send_mails(now: datetime) -> int:
    """Send each person whose time has come one mail; returns how many were sent. A crash between sending and noting
    it sends a mail twice rather than never."""
    due = Notification.objects.filter(mail_due_at__lte=now).values_list("user_id", flat=True)
    return sum(_send_to(user, now) for user in sorted(set(due.distinct()[:MOST_PEOPLE])))


@transaction.atomic
def _send_to(user_id: int, now: datetime) -> int:
    """Its rows stay locked meanwhile, so that two workers send nothing twice."""
    rows = list(
        Notification.objects.select_for_update(skip_locked=True)
        .filter(user_id=user_id, mail_due_at__isnull=False)
        .order_by("id")[:1000]
    )
    user = User.objects.get(pk=user_id)
    kept = Notification.objects.filter(pk__in=[row.pk for row in rows])
    if not rows or not user.is_active or not can_mail(user):
        kept.update(mail_due_at=None)
        return 0
    try:
        mail_of(user, rows).send()
    except (OSError, SMTPException) as error:
        log.warning("mail.failed", user=user.username, error=str(error)[:300])
        kept.filter(at__lt=now - GIVE_UP).update(mail_due_at=None)
        kept.filter(mail_due_at__isnull=False).update(mail_due_at=now + AGAIN)
        return 0
    kept.update(mail_due_at=None, mailed_at=now)
    return 1


def mail_of(user: User, rows: list[Notification]) -> EmailMultiAlternatives:
    """One mail about some lines of a person's inbox, with a way out that works without signing in."""
    from scheduling.services.preferences import unsubscribe_token

    base = settings.GPUPORTAL_PUBLIC_URL
    leave = base + reverse("unsubscribe", args=[unsubscribe_token(user)])
    context = {
        "user": user,
        "rows": rows[:MOST_LINES],
        "more": max(0, len(rows) - MOST_LINES),
        "base": base,
        "inbox": base + reverse("inbox"),
        "preferences": base + reverse("preferences"),
        "leave": leave,
    }
    count = sum(row.count for row in rows)
    subject = rows[0].title if len(rows) == 1 else f"{count} notifications: {rows[0].title} …"
    return EmailMultiAlternatives(
        f"GPU Portal: {subject}"[:200],
        render_to_string("mail/notifications.txt", context),
        to=[user.email],
        alternatives=[(render_to_string("mail/notifications.html", context), "text/html")],
        headers={
            "List-Unsubscribe": f"<{leave}>",
            "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
            "Auto-Submitted": "auto-generated",
        },
    )
