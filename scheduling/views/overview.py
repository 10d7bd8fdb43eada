"""The first page, the queue, clusters and the viewer's own page."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe

from scheduling.engine.decisions import Code
from scheduling.forms import MeForm
from scheduling.selectors.jobs import queue_page
from scheduling.selectors.overview import job_counts, own_jobs, pool_numbers, team_numbers
from scheduling.selectors.reasons import Names, reasons_of
from scheduling.services.jobs import cancel_job, hold_job, in_bulk, release_job, set_priority
from teams.actors import Actor
from teams.models import Team

BULK_MOST = 500


@login_required
@require_safe
def overview(request: HttpRequest) -> HttpResponse:
    actor = Actor.of(request)
    names = Names()
    jobs = own_jobs(actor.user) if actor.user else []
    teams = list(actor.user.memberships.values_list("team_id", flat=True)) if actor.user else []
    context = {
        "pools": pool_numbers(),
        "counts": job_counts(),
        "jobs": [(job, reasons_of(job, names)) for job in jobs],
        "teams": team_numbers(teams, timezone.now()),
    }
    template = "scheduling/_overview.html" if request.htmx else "scheduling/overview.html"  # type: ignore[attr-defined]
    return render(request, template, context)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def queue(request: HttpRequest) -> HttpResponse:
    actor = Actor.of(request)
    if request.method == "POST":
        return _bulk(request, actor)
    filters = {
        key: request.GET.get(key, "").strip()[:200] for key in ("state", "team", "pool", "owner", "reason", "name")
    }
    number = request.GET.get("page", "1")
    page = queue_page(actor, filters, int(number) if number.isdecimal() and len(number) < 9 else 1)
    names = Names()
    query = request.GET.copy()
    query.pop("page", None)
    context = {
        "page": page,
        "rows": [(row, reasons_of(row.job, names)) for row in page.rows],
        "filters": filters,
        "teams": Team.objects.filter(archived_at=None, children=None).order_by("name")[:1000],
        "pools": names.pools.values(),
        "codes": [code.value for code in Code],
        "query": query.urlencode(),
        "state": filters["state"] or "waiting",
    }
    template = "scheduling/_queue.html" if request.htmx else "scheduling/queue.html"  # type: ignore[attr-defined]
    return render(request, template, context)


def _bulk(request: HttpRequest, actor: Actor) -> HttpResponse:
    """Cancel, hold, release or priority on the ticked jobs, with a result per job."""
    ids = [int(number) for number in request.POST.getlist("job") if number.isdecimal() and len(number) < 19][:BULK_MOST]
    action = request.POST.get("action", "")
    actions = {
        "cancel": lambda number: cancel_job(actor=actor, job_id=number),
        "hold": lambda number: hold_job(actor=actor, job_id=number),
        "release": lambda number: release_job(actor=actor, job_id=number),
    }
    for priority in ("low", "normal", "high", "urgent"):
        actions[f"priority-{priority}"] = lambda number, p=priority: set_priority(
            actor=actor, job_id=number, priority=p
        )
    if action not in actions or not ids:
        messages.warning(request, "Tick some jobs and choose what to do with them.")
        return redirect(request.get_full_path())
    if action == "cancel" and request.POST.get("sure") != "yes":
        context = {"ids": ids, "action": action, "back": request.get_full_path()}
        return render(request, "scheduling/confirm_bulk.html", context)
    results = in_bulk(ids, actions[action])
    return render(request, "scheduling/bulk_results.html", {"results": results, "back": request.get_full_path()})


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def me(request: HttpRequest) -> HttpResponse:
    user = Actor.of(request).user
    assert user is not None
    form = MeForm(request.POST or None, initial={"time_zone": user.time_zone, "color_scheme": user.color_scheme})
    if request.method == "POST" and form.is_valid():
        user.time_zone, user.color_scheme = form.cleaned_data["time_zone"], form.cleaned_data["color_scheme"]
        user.save(update_fields=["time_zone", "color_scheme"])
        messages.success(request, "Saved.")
        return redirect("me")
    memberships = user.memberships.select_related("team").order_by("team__name")
    return render(request, "scheduling/me.html", {"form": form, "memberships": memberships, "jobs": own_jobs(user, 20)})
