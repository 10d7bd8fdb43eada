"""The first page and the viewer's own page."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe

from scheduling.forms import MeForm
from scheduling.glossary import TERMS
from scheduling.selectors.overview import job_counts, own_jobs, pool_numbers, team_numbers
from scheduling.selectors.reasons import Names, reasons_of
from teams.actors import Actor


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


@login_required
@require_safe
def glossary(request: HttpRequest) -> HttpResponse:
    """The words of the portal; help texts link to them."""
    return render(request, "scheduling/glossary.html", {"terms": TERMS})
