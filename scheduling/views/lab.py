"""The policy lab's pages."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from scheduling.models import LabRun, Pool
from scheduling.services import clock, lab
from scheduling.services.errors import InvalidRequest
from scheduling.services.policy import BOUNDS
from teams.actors import Actor
from teams.models import Team
from teams.permissions import Permission, require


@login_required
@require_http_methods(["GET", "POST"])
def index(request: HttpRequest) -> HttpResponse:
    actor = Actor.of(request)
    require(actor, Permission.USE_LAB)
    errors: dict[str, list[str]] = {}
    if request.method == "POST":
        try:
            since, until = _period(request.POST.get("since", ""), request.POST.get("until", ""))
            row = lab.ask(
                actor=actor, name=request.POST.get("name", ""), since=since, until=until, changes=_changes(request.POST)
            )
            return redirect("reports:lab-run", pk=row.pk)
        except InvalidRequest as error:
            errors = error.errors
    today = clock.now().date()
    context = {
        "runs": LabRun.objects.select_related("created_by")[:50],
        "errors": errors,
        "given": request.POST,
        "teams": Team.objects.filter(archived_at=None).values_list("name", flat=True)[:2000],
        "pools": Pool.objects.values_list("name", flat=True)[:500],
        "settings": BOUNDS,
        "since": f"{today - timedelta(days=8)}",
        "until": f"{today - timedelta(days=1)}",
    }
    return render(request, "reports/lab.html", context, status=400 if errors else 200)


def _period(since: str, until: str) -> tuple[datetime, datetime]:
    zone = timezone.get_current_timezone()
    own = zone if isinstance(zone, ZoneInfo) else ZoneInfo("UTC")
    days = []
    for field, text in (("since", since), ("until", until)):
        try:
            days.append(date.fromisoformat(text))
        except ValueError:
            raise InvalidRequest({field: [f"“{text}” is not a day; give YYYY-MM-DD."]}) from None
    first, last = (datetime.combine(day, time(0), tzinfo=own).astimezone(UTC) for day in days)
    return first, last


def _changes(given: Any) -> list[dict[str, Any]]:
    """The filled parts of the form; numbers as numbers, anything else stays text and is refused by the service."""
    changes: list[dict[str, Any]] = []
    if given.get("quota_team"):
        changes.append(
            {
                "kind": "quota",
                "team": given["quota_team"],
                "pool": given.get("quota_pool", ""),
                **{name: _number(given[name]) for name in ("guaranteed", "limit", "weight") if given.get(name)},
            }
        )
    if given.get("nodes"):
        changes.append({"kind": "hardware", "pool": given.get("nodes_pool", ""), "nodes": _number(given["nodes"])})
    if given.get("setting"):
        changes.append({"kind": "policy", "name": given["setting"], "value": _number(given.get("value", ""))})
    if given.get("interruptible"):
        changes.append({"kind": "interruptible", "checkpoint_every": _number(given.get("checkpoint_every") or "1800")})
    return changes


def _number(text: str) -> float | int | str:
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value


@login_required
def show(request: HttpRequest, pk: int) -> HttpResponse:
    require(Actor.of(request), Permission.USE_LAB)
    row = get_object_or_404(LabRun.objects.select_related("created_by"), pk=pk)
    context: dict[str, Any] = {"run": row, "changes": [describe(change) for change in row.changes]}
    if row.state == LabRun.State.DONE and row.adopted_at is not None:
        context["reality"] = lab.happened(row.adopted_at, clock.now())
    template = "reports/_lab_run.html" if getattr(request, "htmx", False) else "reports/lab_run.html"
    return render(request, template, context)


@login_required
@require_POST
def adopt(request: HttpRequest, pk: int) -> HttpResponse:
    """From now on forecast and reality are compared; the change itself is made where such changes are made."""
    require(Actor.of(request), Permission.USE_LAB)
    LabRun.objects.filter(pk=pk, state=LabRun.State.DONE, adopted_at=None).update(adopted_at=clock.now())
    return redirect("reports:lab-run", pk=pk)


def describe(change: dict[str, Any]) -> str:
    kind = change["kind"]
    if kind == "quota":
        parts = ", ".join(f"{name} {change[name]:g}" for name in ("guaranteed", "limit", "weight") if name in change)
        return f"{change['team']} in {change['pool']}: {parts}"
    if kind == "hardware":
        return f"{change['nodes']:+d} nodes in {change['pool']}"
    if kind == "policy":
        return f"{change['name']} = {change['value']:g}"
    return f"all jobs interruptible, a checkpoint every {change['checkpoint_every']:g} s"
