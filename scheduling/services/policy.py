"""The policy of section 4 as it is in force."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from django.db import transaction

from scheduling.engine.snapshot import Policy
from scheduling.models import PolicyVersion
from scheduling.services.errors import InvalidRequest
from teams.actors import Actor
from teams.permissions import Permission, require
from teams.services import audit

#: Largest sensible value by field; all are at least 0.
BOUNDS: dict[str, tuple[float, float]] = {
    "half_life": (3600, 365 * 86400),
    "history_weight": (0, 100),
    "min_runtime": (0, 7 * 86400),
    "reservation_depth": (0, 1000),
    "default_walltime": (60, 365 * 86400),
    "fragile_borrowing": (0, 30 * 86400),
    "plan_timeout": (10, 86400),
    "consolidation_budget": (0, 100),
    "backoff": (0, 3600),
    "backoff_max": (1, 86400),
    "infrastructure_retries": (0, 100),
    "grow_after": (0, 7 * 86400),
    "restart_cost": (0, 86400),
}


def current_policy() -> Policy:
    """The newest version; the defaults where there is none."""
    settings = PolicyVersion.objects.order_by("-id").values_list("settings", flat=True).first() or {}
    known = {field.name for field in fields(Policy)}
    return Policy(**{key: value for key, value in settings.items() if key in known and key in BOUNDS})


@transaction.atomic
def set_policy(*, actor: Actor, changes: dict[str, Any], reason: str) -> PolicyVersion:
    """A new version with ``changes`` on top of what is in force. Raises ``InvalidRequest``."""
    require(actor, Permission.MANAGE_POLICY)
    before = {key: value for key, value in asdict(current_policy()).items() if key in BOUNDS}
    errors: dict[str, list[str]] = {}
    after = dict(before)
    for key, value in changes.items():
        if key not in BOUNDS:
            errors[key] = [f"Unknown setting; allowed are {', '.join(BOUNDS)}."]
            continue
        low, high = BOUNDS[key]
        if value is None and key == "fragile_borrowing":
            after[key] = None
        elif isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            errors[key] = [f"{value!r} is not a number from {low:g} to {high:g}."]
        elif key in ("reservation_depth", "infrastructure_retries"):
            after[key] = int(value)
        else:
            after[key] = float(value)
    if errors:
        raise InvalidRequest(errors)
    version = PolicyVersion.objects.create(settings=after, reason=reason, created_by=actor.user)
    changed = {key: after[key] for key in after if after[key] != before[key]}
    audit.record(actor, "policy.change", version, before={k: before[k] for k in changed}, after=changed, reason=reason)
    return version
