"""Quotas: checked over the tree, with history and planned changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.apps import apps
from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.db.models import QuerySet
from django.utils import timezone

from teams.actors import Actor
from teams.models import Quota, Team
from teams.permissions import Permission, require
from teams.services import audit
from teams.services.errors import Invalid

#: Serialises changes of quotas: the sums are over many rows.
LOCK = 0x71756F74


@dataclass(frozen=True, slots=True)
class QuotaSpec:
    """What a team shall have in a pool."""

    guaranteed: Decimal
    limit: Decimal | None = None
    weight: Decimal = Decimal(1)


def quotas_at(at: datetime) -> QuerySet[Quota]:
    return Quota.objects.filter(during__contains=at)


@transaction.atomic
def set_quota(
    *, actor: Actor, team: Team, pool_id: int, spec: QuotaSpec, from_at: datetime | None = None, reason: str = ""
) -> Quota:
    """In force from ``from_at`` (default: now) until the next planned change. Raises ``Invalid`` with both numbers
    when guarantees would add up to more than there is."""
    require(actor, Permission.MANAGE_QUOTAS)
    now = timezone.now()
    begins = from_at or now
    _check_numbers(spec)
    if begins < now and from_at is not None and (now - begins).total_seconds() > 60:
        raise Invalid({"from_at": [f"{begins.isoformat()} is in the past; the history is not changed."]})
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
    _check_sums(team, pool_id, spec, begins)
    before = quotas_at(begins).filter(team=team, pool_id=pool_id).first()
    later = Quota.objects.filter(team=team, pool_id=pool_id, during__startswith__gt=begins).order_by("during").first()
    ends = later.during.lower if later else None
    was = None
    if before is not None:
        was = _numbers(QuotaSpec(before.guaranteed, before.limit, before.weight))
        if before.during.lower >= begins:
            before.delete()
        else:
            before.during = DateTimeTZRange(before.during.lower, begins, "[)")
            before.save(update_fields=["during"])
    row = Quota.objects.create(
        team=team,
        pool_id=pool_id,
        guaranteed=spec.guaranteed,
        limit=spec.limit,
        weight=spec.weight,
        during=DateTimeTZRange(begins, ends, "[)"),
        reason=reason[:300],
        created_by=actor.user,
    )
    after = {**_numbers(spec), "from": begins.isoformat(), "pool": pool_id}
    audit.record(actor, "quota.set", row, before=was, after=after, reason=reason, team=team)
    return row


def _numbers(spec: QuotaSpec) -> dict[str, str | None]:
    return {
        "guaranteed": str(spec.guaranteed),
        "limit": None if spec.limit is None else str(spec.limit),
        "weight": str(spec.weight),
    }


def _check_numbers(spec: QuotaSpec) -> None:
    errors: dict[str, list[str]] = {}
    for name in ("guaranteed", "limit", "weight"):
        value = getattr(spec, name)
        if value is not None and (not value.is_finite() or value < 0 or value > 10_000_000):
            errors[name] = [f"{value} is not a number from 0 to 10,000,000."]
    if not errors and spec.limit is not None and spec.limit < spec.guaranteed:
        errors["limit"] = [f"The limit {spec.limit:f} is below the guaranteed {spec.guaranteed:f}."]
    if errors:
        raise Invalid(errors)


def _check_sums(team: Team, pool_id: int, spec: QuotaSpec, at: datetime) -> None:
    """At ``at`` and at every later planned change: siblings within the parent, children within this team."""
    instants = {at, *_later_changes(pool_id, at)}
    for instant in sorted(instants):
        held = {row.team_id: row.guaranteed for row in quotas_at(instant).filter(pool_id=pool_id).exclude(team=team)}
        held[team.pk] = spec.guaranteed
        siblings = Team.objects.filter(parent=team.parent, archived_at=None).values_list("pk", flat=True)
        total = sum((held.get(pk, Decimal(0)) for pk in siblings), Decimal(0))
        if team.parent is not None:
            bound, owner = held.get(team.parent.pk, Decimal(0)), f"the guarantee of {team.parent.name}"
        else:
            bound, owner = capacity(pool_id, instant), "the capacity of the pool"
        if total > bound:
            raise Invalid(
                {"guaranteed": [f"The guarantees add up to {total:f} GPUs, more than {owner}, {bound:f} GPUs."]}
            )
        children = Team.objects.filter(parent=team, archived_at=None).values_list("pk", flat=True)
        below = sum((held.get(pk, Decimal(0)) for pk in children), Decimal(0))
        if below > spec.guaranteed:
            raise Invalid(
                {
                    "guaranteed": [
                        f"The teams below {team.name} are guaranteed {below:f} GPUs, more than {spec.guaranteed:f}."
                    ]
                }
            )


def _later_changes(pool_id: int, at: datetime) -> list[datetime]:
    rows = Quota.objects.filter(pool_id=pool_id, during__startswith__gt=at)
    return [row.during.lower for row in rows]


def capacity(pool_id: int, at: datetime) -> Decimal:
    """Devices that the pool has at ``at``."""
    gpus = apps.get_model("scheduling", "GPU").objects
    return Decimal(gpus.filter(pool_id=pool_id, exists__contains=max(at, timezone.now())).count())
