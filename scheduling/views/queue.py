"""The queue: filters kept in the address, views saved by each person, and actions on many jobs at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from scheduling.engine.decisions import Code
from scheduling.models import Job, Priority
from scheduling.selectors.queue import FILTERS, current_order, queue_page, queue_version, scope
from scheduling.selectors.reasons import Names, reasons_of
from scheduling.selectors.shares import Shares
from scheduling.services import saved_views
from scheduling.services.errors import InvalidRequest
from scheduling.services.jobs import cancel_job, hold_job, in_bulk, release_job, set_priority
from scheduling.views.live import alike, poll
from teams.actors import Actor
from teams.models import Role
from teams.permissions import Permission, allowed, roles_of

BULK_MOST = 500
_PRIORITIES = tuple(priority.name.lower() for priority in Priority)
#: What can be done to many jobs, and how it is called.
ACTIONS = {
    "cancel": "Cancel",
    "hold": "Hold",
    "release": "Release",
    **{f"priority-{name}": f"Priority {name}" for name in _PRIORITIES},
}


def filters_of(query: Mapping[str, str]) -> dict[str, str]:
    """The filters that an address names, cut to what can match anything."""
    return {key: query.get(key, "").strip()[:200] for key in FILTERS}


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def queue(request: HttpRequest) -> HttpResponseBase:
    actor = Actor.of(request)
    if request.method == "POST":
        return _bulk(request, actor)
    filters = filters_of(request.GET)
    teams = scope(actor)
    if request.htmx:  # type: ignore[attr-defined]
        version = queue_version(filters, teams)
        return poll(request, version, lambda: render(request, "scheduling/_queue.html", _rows(request, filters, teams)))
    names = Names()
    context = _rows(request, filters, teams, names)
    roles = roles_of(actor)
    context |= {
        "filters": filters,
        "teams": names.leaf_teams,
        "pools": names.pools.values(),
        "codes": [code.value for code in Code],
        "views": saved_views.of(actor),
        "actions": {
            name: label
            for name, label in ACTIONS.items()
            if name != "priority-urgent" or Role.LEAD in roles.values() or allowed(actor, Permission.MANAGE_CLUSTERS)
        },
        "shares": context["team_shares"].rows_of(roles),
    }
    return alike(render(request, "scheduling/queue.html", context))


def _rows(
    request: HttpRequest, filters: dict[str, str], teams: set[int] | None, names: Names | None = None
) -> dict[str, Any]:
    """What the table itself shows."""
    number = request.GET.get("page", "1")
    order = current_order()
    page = queue_page(order, filters, int(number) if number.isdecimal() and len(number) < 9 else 1, teams)
    names = names or Names()
    shares = Shares(order, names)
    query = urlencode([(key, value) for key, value in filters.items() if value])
    return {
        "page": page,
        "rows": [(row, reasons_of(row.job, names), shares.of_job(row.job)) for row in page.rows],
        "state": filters["state"] or "waiting",
        "query": query,
        "team_shares": shares,
    }


def _bulk(request: HttpRequest, actor: Actor) -> HttpResponse:
    """Cancel, hold, release or priority on the ticked jobs, with a result per job."""
    ids = [int(number) for number in request.POST.getlist("job") if number.isdecimal() and len(number) < 19]
    action = request.POST.get("action", "")
    if action not in ACTIONS or not ids:
        messages.warning(request, "Tick some jobs and choose what to do with them.")
        return redirect(request.get_full_path())
    if len(ids) > BULK_MOST:
        messages.error(request, f"{len(ids)} jobs are too many at once; at most {BULK_MOST} are allowed.")
        return redirect(request.get_full_path())
    context: dict[str, Any] = {"ids": ids, "action": action, "back": request.get_full_path()}
    if action == "cancel" and request.POST.get("sure") != "yes":
        return render(request, "scheduling/confirm_bulk.html", context)
    results = in_bulk(ids, _action(actor, action))
    context |= {
        "results": results,
        "label": ACTIONS[action],
        "done": sum(row.done for row in results),
        "refused": sum(not row.done for row in results),
    }
    return render(request, "scheduling/bulk_results.html", context)


def _action(actor: Actor, action: str) -> Callable[[int], Job]:
    if action.startswith("priority-"):
        priority = action.removeprefix("priority-")
        return lambda number: set_priority(actor=actor, job_id=number, priority=priority)
    service = {"cancel": cancel_job, "hold": hold_job, "release": release_job}[action]
    return lambda number: service(actor=actor, job_id=number)


@login_required
@require_POST
def save_view(request: HttpRequest) -> HttpResponse:
    """Keep the filters of the page it was sent from under a name."""
    query = urlencode(
        [(key, value) for key, value in filters_of(dict(parse_qsl(request.POST.get("query", "")))).items() if value]
    )
    try:
        row = saved_views.save(actor=Actor.of(request), name=request.POST.get("name", ""), query=query)
    except InvalidRequest as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"The view “{row.name}” is saved.")
    return redirect(f"{reverse('queue')}?{query}")


@login_required
@require_POST
def delete_view(request: HttpRequest, number: int) -> HttpResponse:
    saved_views.delete(actor=Actor.of(request), number=number)
    return redirect("queue")
