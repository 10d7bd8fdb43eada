"""Reports by mail: every day, week or month the period just past, with the rights its receiver has at that moment."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from django.conf import settings
from django.core.mail import EmailMessage
from django.db import transaction
from django.http import QueryDict

from scheduling.models import ReportMail
from scheduling.reports import exports
from scheduling.reports.page import Report
from scheduling.reports.pages import REPORTS
from scheduling.reports.query import Query, QueryError, parse
from teams.actors import Actor
from teams.models import User
from teams.permissions import Permission, visible_team_ids

PERIODS = {"day": "1d", "week": "7d", "month": "last-month"}
#: Local hour at which mails go out.
HOUR = 7


def schedule(*, user: User, report: Report, query: Query, period: str, now: datetime) -> ReportMail:
    """One mail a person and report; asking again changes it. Raises ``QueryError``."""
    if period not in PERIODS:
        raise QueryError("period", period, f"one of {', '.join(PERIODS)}")
    if not user.email:
        raise QueryError("email", "", "an account with an e-mail address")
    kept = {key: value for key, value in query.parameters().items() if key in ("team", "pool", "model", "class")}
    row, _ = ReportMail.objects.update_or_create(
        user=user,
        report=report.slug,
        defaults={"query": urlencode(kept), "period": period, "next_at": next_time(period, now, zone_of(user))},
    )
    return row


def zone_of(user: User) -> ZoneInfo:
    return ZoneInfo(user.time_zone or "UTC")


def next_time(period: str, now: datetime, zone: ZoneInfo) -> datetime:
    """The next 07:00 on the receiver's clock: tomorrow, on Monday, on the first."""
    local = now.astimezone(zone)
    day = local.date() + timedelta(days=1)
    if period == "week":
        day += timedelta(days=(7 - day.weekday()) % 7)
    elif period == "month":
        day = (local.date().replace(day=28) + timedelta(days=4)).replace(day=1)
    return datetime.combine(day, time(HOUR), tzinfo=zone).astimezone(UTC)


def send_due(now: datetime) -> int:
    """Send what is due; each row is locked while it is sent, so two workers send nothing twice. A mail that fails is
    tried again in an hour."""
    sent = 0
    for number in ReportMail.objects.filter(next_at__lte=now).values_list("id", flat=True)[:200]:
        with transaction.atomic():
            row = (
                ReportMail.objects.select_for_update(skip_locked=True)
                .select_related("user")
                .filter(pk=number, next_at__lte=now)
                .first()
            )
            if row is None:
                continue
            try:
                _send(row, now)
            except (OSError, QueryError) as error:
                row.last_error, row.next_at = str(error)[:300], now + timedelta(hours=1)
            else:
                row.last_error, row.last_sent_at = "", now
                row.next_at = next_time(row.period, now, zone_of(row.user))
                sent += 1
            row.save()
    return sent


def _send(row: ReportMail, now: datetime) -> None:
    visible = visible_team_ids(Actor.person(row.user), Permission.VIEW_REPORTS)
    if not row.user.is_active or (visible is not None and not visible):
        raise QueryError("user", row.user.get_username(), "an active member of a team")
    given: Any = QueryDict(f"{row.query}&range={PERIODS[row.period]}")
    query = parse(given, now=now, zone=zone_of(row.user), visible=visible)
    report = REPORTS[row.report]
    if report.whole_only and not query.scope.whole:
        raise QueryError("report", row.report, "a report that you may see")
    page = report.make(query.scope)
    lines = [page.question, f"{page.answer} {page.sentence}", "", *(f"{n.label}: {n.text}" for n in page.numbers), ""]
    lines += [f"{label}: {value}" for label, value in exports.about(page)]
    lines += ["", f"{settings.GPUPORTAL_PUBLIC_URL}/reports/{row.report}/?{urlencode(query.parameters(fixed=True))}"]
    mail = EmailMessage(f"{report.title}: {page.answer} ({query.period})", "\n".join(lines), to=[row.user.email])
    mail.attach(f"{row.report}.pdf", exports.pdf(page, report.title, query.period), "application/pdf")
    mail.send()
