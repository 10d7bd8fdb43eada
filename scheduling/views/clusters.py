"""The map of all GPUs, its table, and one node."""

from __future__ import annotations

from datetime import datetime

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from scheduling.models import Node, Window
from scheduling.selectors import hardware
from scheduling.selectors.overview import pool_numbers
from scheduling.services.errors import Conflict, InvalidRequest
from scheduling.services.nodes import cancel_window, drain_node, plan_maintenance, resume_node
from teams.actors import Actor
from teams.permissions import Permission, allowed

PAGE = 100


@login_required
@require_safe
def clusters(request: HttpRequest) -> HttpResponse:
    """The map; the table below it says the same in words."""
    nodes = Node.objects.filter(retired_at=None).select_related("cluster", "pool").order_by("cluster__name", "name")
    state = request.GET.get("state", "")
    if state in hardware.STATES:
        nodes = nodes.filter(state=state)
    number = request.GET.get("page", "1")
    total = nodes.count()
    pages = max(1, -(-total // PAGE))
    page = min(max(1, int(number) if number.isdecimal() and len(number) < 7 else 1), pages)
    context = {
        "nodes": nodes[(page - 1) * PAGE : page * PAGE],
        "pools": pool_numbers(),
        "page": page,
        "pages": pages,
        "total": total,
        "state": state,
        "states": hardware.STATES,
    }
    return render(request, "scheduling/clusters.html", context)


@login_required
@require_safe
def map_data(request: HttpRequest) -> JsonResponse:
    return JsonResponse(hardware.cluster_map(Actor.of(request)))


class MaintenanceForm(forms.Form):
    """Times are read in the viewer's zone."""

    name = forms.CharField(max_length=100)
    begins_at = forms.DateTimeField(
        label="Begins", widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M")
    )
    ends_at = forms.DateTimeField(
        label="Ends", widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M")
    )
    weekly = forms.BooleanField(required=False, label="Every week")

    def span(self) -> tuple[datetime, datetime]:
        return self.cleaned_data["begins_at"], self.cleaned_data["ends_at"]


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def node(request: HttpRequest, number: int) -> HttpResponse:
    """One node; an administrator also plans maintenance here."""
    actor = Actor.of(request)
    found = hardware.get_node(number)
    form = MaintenanceForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        begins_at, ends_at = form.span()
        try:
            plan_maintenance(
                actor=actor, nodes=[found], name=form.cleaned_data["name"], begins_at=begins_at, ends_at=ends_at,
                weekly=form.cleaned_data["weekly"], time_zone=timezone.get_current_timezone_name(),
            )  # fmt: skip
        except InvalidRequest as error:
            for field, texts in error.errors.items():
                form.add_error(field if field in form.fields else None, texts)
        else:
            messages.success(request, "The maintenance window is planned.")
            return redirect("node", number=number)
    context = {
        "node": found,
        "gpus": hardware.gpus_of(found, actor),
        "history": hardware.history_of(found),
        "windows": hardware.windows_of(found),
        "may_manage": allowed(actor, Permission.MANAGE_CLUSTERS),
        "form": form,
    }
    return render(request, "scheduling/node.html", context, status=422 if form.errors else 200)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def node_drain(request: HttpRequest, number: int) -> HttpResponse:
    """Asks for the reason first; without it nothing happens."""
    actor = Actor.of(request)
    if not allowed(actor, Permission.MANAGE_CLUSTERS):
        raise PermissionDenied("Draining a node needs an administrator.")
    found = hardware.get_node(number)
    errors: list[str] = []
    if request.method == "POST":
        try:
            drain_node(actor=actor, node_id=number, reason=request.POST.get("reason", ""))
            messages.success(request, f"Node {found.name} is drained: nothing new starts there.")
            return redirect("node", number=number)
        except InvalidRequest as error:
            errors = [text for texts in error.errors.values() for text in texts]
        except Conflict as error:
            errors = [str(error)]
    context = {"node": found, "errors": errors, "reason": request.POST.get("reason", "")}
    return render(request, "scheduling/confirm_drain.html", context, status=422 if errors else 200)


@login_required
@require_POST
def node_resume(request: HttpRequest, number: int) -> HttpResponse:
    found = hardware.get_node(number)
    try:
        resume_node(actor=Actor.of(request), node_id=number)
        messages.success(request, f"Node {found.name} takes jobs again.")
    except Conflict as error:
        messages.warning(request, str(error))
    return redirect("node", number=number)


@login_required
@require_POST
def window_cancel(request: HttpRequest, number: int, window: int) -> HttpResponse:
    if not Window.objects.filter(pk=window, nodes=number).exists():
        raise Http404(f"Node {number} has no window {window}.")
    try:
        cancel_window(actor=Actor.of(request), window_id=window)
        messages.success(request, "The maintenance window is cancelled.")
    except Conflict as error:
        messages.warning(request, str(error))
    return redirect("node", number=number)
