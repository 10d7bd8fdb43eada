"""Submitting a job and looking at one."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from scheduling.backends.base import BackendError, NotFound
from scheduling.forms import JobForm, initial_from, own_leaf_teams
from scheduling.models import Attempt, Pool, Priority
from scheduling.reports.job_figure import activity_figure
from scheduling.selectors import jobs as selectors
from scheduling.selectors.queue import amount, current_order
from scheduling.selectors.reasons import Names, reasons_of
from scheduling.services.errors import Conflict, InvalidRequest
from scheduling.services.jobs import (
    cancel_job,
    clone_spec,
    hold_job,
    may_manage,
    release_job,
    set_priority,
)
from scheduling.services.registry import backend_for
from scheduling.services.submit import submit_jobs
from scheduling.templatetags.portal import plain
from teams.actors import Actor

#: What a job's page shows of its log at first.
LOG_END = 64 << 10


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def submit(request: HttpRequest) -> HttpResponse:
    actor = Actor.of(request)
    initial: dict[str, Any] = {}
    clone = request.GET.get("clone", "")
    if clone.isdecimal() and len(clone) < 19:
        initial = initial_from(clone_spec(selectors.get_job(actor, int(clone))))
    form = JobForm(request.POST or None, initial=initial, actor=actor)
    if request.method == "POST" and form.is_valid():
        try:
            made = submit_jobs(actor=actor, spec=form.spec())
        except InvalidRequest as error:
            form.refuse(error.errors)
        else:
            if len(made) > 1:
                messages.success(request, f"{len(made)} jobs were submitted.")
                return redirect("queue")
            messages.success(request, f"Job {made[0].pk} was submitted.")
            return redirect("job", number=made[0].pk)
    prices = Pool.objects.select_related("gpu_model").order_by("name")
    context = {"form": form, "pools": prices, "teams": own_leaf_teams(actor)}
    return render(request, "scheduling/submit.html", context, status=422 if form.errors else 200)


@login_required
@require_safe
def job(request: HttpRequest, number: int) -> HttpResponse:
    actor = Actor.of(request)
    found = selectors.get_job(actor, number)
    now = timezone.now()
    names = Names()
    attempts = selectors.attempts_of(found, now, selectors.node_names(found))
    latest = attempts[0].attempt if attempts else None
    position = current_order().place(number) if found.state == "waiting" else None
    context: dict[str, Any] = {
        "job": found,
        "amount": amount(found),
        "pools": [names.pool(pool) for pool in found.pools],
        "reasons": reasons_of(found, names) if found.state == "waiting" else [],
        "position": position,
        "attempts": attempts,
        "hours": sum((row.gpu_hours for row in attempts), start=0),
        "cost": sum((row.cost for row in attempts), start=0),
        "events": found.events.select_related("attempt").order_by("-id")[:200],
        "decisions": found.decisions.order_by("-id")[:50],
        "may_manage": may_manage(actor, found),
        "priorities": [priority.name.lower() for priority in Priority],
        "final": found.state in selectors.FINAL,
    }
    if request.htmx:  # type: ignore[attr-defined]
        return render(request, "scheduling/_job_state.html", context)
    if latest is not None:
        context |= _log(latest)
        samples = selectors.activity_of(latest)
        context["figure"] = activity_figure(samples, timezone.get_current_timezone()) if samples else None
        context["samples"] = len(samples)
    return render(request, "scheduling/job.html", context)


def _log(attempt: Attempt) -> dict[str, Any]:
    """The end of the log; the rest is read on demand."""
    try:
        backend = backend_for(attempt.pool.cluster)
        probe = backend.logs(attempt.uuid, offset=1 << 60, limit=1, backend_id=attempt.backend_id)
        start = max(0, probe.end - LOG_END)
        chunk = backend.logs(attempt.uuid, offset=start, limit=LOG_END, backend_id=attempt.backend_id)
    except NotFound:
        return {"log": None, "log_note": "The cluster has no log of this attempt."}
    except BackendError as error:
        return {"log": None, "log_note": f"The log cannot be read now: {error}"}
    text = chunk.data.decode(errors="replace")
    return {"log": text, "log_end": chunk.end, "log_finished": chunk.finished, "log_start": start, "attempt": attempt}


def _whole_characters(data: bytes, end: int, *, final: bool) -> tuple[str, int]:
    """Text of a chunk; a character that is cut off at its end is left for the next one."""
    cut = 0
    while not final and cut < 3 and cut < len(data) and data[len(data) - 1 - cut] & 0xC0 == 0x80:
        cut += 1
    if not final and cut < len(data) and data[len(data) - 1 - cut] >= 0xC0:
        data, end = data[: len(data) - 1 - cut], end - 1 - cut
    return data.decode(errors="replace"), end


@login_required
@require_safe
def log(request: HttpRequest, number: int, attempt_number: int) -> HttpResponse:
    """A piece of an attempt's log from ``offset`` on, as JSON; ``?download=1`` gives the first 16 MiB as a file."""
    found = selectors.get_job(Actor.of(request), number)
    attempt = found.attempts.select_related("pool__cluster").filter(number=attempt_number).first()
    if attempt is None:
        raise Http404
    text = request.GET.get("offset", "0")
    offset = int(text) if text.isdecimal() and len(text) < 16 else 0
    try:
        backend = backend_for(attempt.pool.cluster)
        if request.GET.get("download"):
            whole = backend.logs(attempt.uuid, offset=0, limit=16 << 20, backend_id=attempt.backend_id)
            response = HttpResponse(whole.data, content_type="text/plain; charset=utf-8")
            response["Content-Disposition"] = f'attachment; filename="job-{number}-{attempt_number}.log"'
            return response
        chunk = backend.logs(attempt.uuid, offset=offset, limit=256 << 10, backend_id=attempt.backend_id)
    except NotFound:
        return JsonResponse({"text": "", "end": offset, "finished": True}, status=404)
    except BackendError as error:
        return JsonResponse({"detail": str(error)}, status=503)
    text, end = _whole_characters(chunk.data, chunk.end, final=chunk.finished)
    return JsonResponse({"text": plain(text), "end": end, "finished": chunk.finished})


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def cancel(request: HttpRequest, number: int) -> HttpResponse:
    """Asks first: a cancelled job does not come back."""
    actor = Actor.of(request)
    found = selectors.get_job(actor, number)
    if request.method != "POST":
        return render(request, "scheduling/confirm_cancel.html", {"job": found})
    return _act(
        request, number, lambda: cancel_job(actor=actor, job_id=number, reason=request.POST.get("reason", "")[:500])
    )


@login_required
@require_POST
def act(request: HttpRequest, number: int, action: str) -> HttpResponse:
    """Hold, release, priority."""
    actor = Actor.of(request)
    selectors.get_job(actor, number)
    actions = {
        "hold": lambda: hold_job(actor=actor, job_id=number),
        "release": lambda: release_job(actor=actor, job_id=number),
        "priority": lambda: set_priority(actor=actor, job_id=number, priority=request.POST.get("priority", "")),
    }
    if action not in actions:
        raise Http404
    return _act(request, number, actions[action])


def _act(request: HttpRequest, number: int, action: Any) -> HttpResponse:
    try:
        action()
    except (Conflict, InvalidRequest, PermissionDenied) as error:
        messages.error(request, str(error))
    else:
        messages.success(request, "Done.")
    return redirect("job", number=number)
