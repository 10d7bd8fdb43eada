"""Allocation requests: a lead asks, a manager decides; what was granted ends when the request expires."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal

from django.db import transaction
from django.utils import timezone

from teams.actors import Actor
from teams.models import AllocationRequest, Team
from teams.permissions import Permission, require
from teams.services import audit
from teams.services.errors import Invalid
from teams.services.quotas import QuotaSpec, quotas_at, set_quota

State = AllocationRequest.State
LONGEST = timedelta(days=3 * 366)


@transaction.atomic
def ask(
    *,
    actor: Actor,
    team: Team,
    pool_id: int,
    guaranteed: Decimal,
    limit: Decimal | None,
    justification: str,
    begins_at: datetime,
    expires_at: datetime,
    renewal_of: AllocationRequest | None = None,
) -> AllocationRequest:
    """A pending request. Raises ``Invalid`` and ``PermissionDenied``."""
    require(actor, Permission.REQUEST_ALLOCATION, team)
    errors = _amounts("asked_guaranteed", "asked_limit", guaranteed, limit)
    now = timezone.now()
    if not justification.strip() or len(justification) > 4000:
        errors["justification"] = ["Say in 1 to 4,000 characters what it is for."]
    if expires_at <= now or expires_at <= begins_at or expires_at - begins_at > LONGEST:
        errors["expires_at"] = [
            f"{expires_at.isoformat()} must lie in the future, after {begins_at.isoformat()}, by at most three years."
        ]
    if renewal_of is not None and (renewal_of.team_id, renewal_of.pool_id) != (team.pk, pool_id):
        errors["renewal_of"] = [f"Request {renewal_of.pk} is about another team or pool."]
    if errors:
        raise Invalid(errors)
    row = AllocationRequest.objects.create(
        team=team, pool_id=pool_id, asked_guaranteed=guaranteed, asked_limit=limit, justification=justification,
        begins_at=begins_at, expires_at=expires_at, requested_by=actor.user, renewal_of=renewal_of,
    )  # fmt: skip
    audit.record(actor, "request.ask", row, after={"guaranteed": str(guaranteed)}, reason=justification, team=team)
    return row


def _amounts(first: str, second: str, guaranteed: Decimal, limit: Decimal | None) -> dict[str, list[str]]:
    errors: dict[str, list[str]] = {}
    for name, value in ((first, guaranteed), (second, limit)):
        if value is not None and (not value.is_finite() or not 0 <= value <= 10_000_000):
            errors[name] = [f"{value} is not a number from 0 to 10,000,000."]
    if not errors and limit is not None and limit < guaranteed:
        errors[second] = [f"The limit {limit:f} is below the guaranteed {guaranteed:f}."]
    return errors


def _pending(request_id: int) -> AllocationRequest:
    row = AllocationRequest.objects.select_for_update(of=("self",)).select_related("team").get(pk=request_id)
    if row.state != State.PENDING:
        raise Invalid({"state": [f"Request {row.pk} is {row.state} already; only pending ones can be decided."]})
    return row


@transaction.atomic
def approve(
    *,
    actor: Actor,
    request_id: int,
    reason: str,
    guaranteed: Decimal | None = None,
    limit: Decimal | None = None,
) -> AllocationRequest:
    """As asked, or with other numbers. The quota changes at the begin and goes back at the expiry."""
    require(actor, Permission.DECIDE_ALLOCATION)
    row = _pending(request_id)
    granted = row.asked_guaranteed if guaranteed is None else guaranteed
    bound = row.asked_limit if guaranteed is None and limit is None else limit
    errors = _amounts("guaranteed", "limit", granted, bound)
    now = timezone.now()
    if row.expires_at <= now:
        errors["expires_at"] = [f"The request expired {row.expires_at.isoformat()}."]
    if not reason.strip():
        errors["reason"] = ["A reason is needed."]
    if errors:
        raise Invalid(errors)
    begins = row.begins_at if row.begins_at > now else None
    at = begins or now
    was = quotas_at(at).filter(team=row.team, pool_id=row.pool_id).first()
    weight = was.weight if was else Decimal(1)
    before = QuotaSpec(was.guaranteed, was.limit, was.weight) if was else QuotaSpec(Decimal(0))
    spec = QuotaSpec(granted, bound, weight)
    text = f"request {row.pk}: {reason}"
    # Back first: the later change then bounds the earlier one.
    set_quota(
        actor=actor,
        team=row.team,
        pool_id=row.pool_id,
        spec=before,
        from_at=row.expires_at,
        reason=f"request {row.pk} ends",
    )
    set_quota(actor=actor, team=row.team, pool_id=row.pool_id, spec=spec, from_at=begins, reason=text)
    row.granted_guaranteed, row.granted_limit = granted, bound
    return _decide(actor, row, State.APPROVED, reason, now)


@transaction.atomic
def decline(*, actor: Actor, request_id: int, reason: str) -> AllocationRequest:
    require(actor, Permission.DECIDE_ALLOCATION)
    row = _pending(request_id)
    if not reason.strip():
        raise Invalid({"reason": ["A reason is needed."]})
    return _decide(actor, row, State.DECLINED, reason, timezone.now())


@transaction.atomic
def withdraw(*, actor: Actor, request_id: int) -> AllocationRequest:
    row = _pending(request_id)
    require(actor, Permission.REQUEST_ALLOCATION, row.team)
    return _decide(actor, row, State.WITHDRAWN, "", timezone.now())


def _decide(actor: Actor, row: AllocationRequest, state: str, reason: str, at: datetime) -> AllocationRequest:
    row.state, row.reason, row.decided_by, row.decided_at = state, reason[:1000], actor.user, at
    row.save()
    audit.record(
        actor, f"request.{state}", row, before={"state": "pending"},
        after={"state": state, "guaranteed": str(row.granted_guaranteed) if row.granted_guaranteed is not None else None},
        reason=reason, team=row.team,
    )  # fmt: skip
    return row


@transaction.atomic
def expire_requests() -> int:
    """Pending and approved requests whose time is over; called by housekeeping."""
    now = timezone.now()
    rows = AllocationRequest.objects.select_for_update(skip_locked=True).filter(
        state__in=[State.PENDING, State.APPROVED], expires_at__lte=now
    )[:500]
    for row in rows:
        before, row.state = row.state, State.EXPIRED
        row.save(update_fields=["state"])
        audit.record(
            Actor.system("housekeeping"), "request.expired", row, before={"state": before}, after={"state": row.state},
            team=row.team,
        )  # fmt: skip
    return len(rows)
