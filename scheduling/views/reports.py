"""Report pages: parse and authorise the question, ask ``scheduling.reports``, show or export the answer."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.text import slugify
from django.views.decorators.http import require_GET, require_POST

from scheduling.models import FrozenReport, WorkloadClass
from scheduling.reports import exports
from scheduling.reports.figures import plotly
from scheduling.reports.page import Page, Report
from scheduling.reports.pages import FOUR, REPORTS
from scheduling.reports.query import RANGES, Query, QueryError, choices, parse
from scheduling.reports.svg import svg
from scheduling.services import clock, frozen, report_mails
from teams.actors import Actor
from teams.permissions import Permission, allowed, visible_team_ids


def _query(request: HttpRequest, *, default: str = "28d") -> Query:
    """The question in the address, narrowed to what the viewer may see. Raises ``QueryError``."""
    visible = visible_team_ids(Actor.of(request), Permission.VIEW_REPORTS)
    if visible is not None and not visible:
        raise PermissionDenied("Reports are for members of a team.")
    zone = timezone.get_current_timezone()
    return parse(request.GET, now=clock.now(), zone=zone, visible=visible, default=default)


def _report(slug: str, query: Query) -> Report:
    """404 for unknown names, and for what is about all teams when the viewer does not see them all."""
    report = REPORTS.get(slug)
    if report is None or (report.whole_only and not query.scope.whole):
        raise Http404(f"There is no report {slug}.")
    return report


@login_required
@require_GET
def index(request: HttpRequest) -> HttpResponse:
    """The four questions with their numbers."""
    try:
        query = _query(request)
    except QueryError as error:
        return render(request, "reports/wrong.html", {"error": error}, status=400)
    answers = []
    for slug in FOUR:
        page = REPORTS[slug].make(query.scope)
        answers.append({"report": REPORTS[slug], "page": page, "figure": _drawn(page)[:1], "url": _url(slug, query)})
    others = [
        {"report": report, "url": _url(slug, query)}
        for slug, report in REPORTS.items()
        if slug not in FOUR and (query.scope.whole or not report.whole_only)
    ]
    context = {"answers": answers, "others": others, "query": query, **_pickers(query, reverse("reports:index"))}
    context["lab"] = allowed(Actor.of(request), Permission.USE_LAB)
    return render(request, "reports/index.html", context)


@login_required
@require_GET
def show(request: HttpRequest, slug: str) -> HttpResponseBase:
    try:
        query = _query(request)
    except QueryError as error:
        return render(request, "reports/wrong.html", {"error": error}, status=400)
    report = _report(slug, query)
    page = report.make(query.scope)
    as_file = request.GET.get("format", "")
    if as_file:
        return _file(as_file, report, page, query)
    before = report.make(query.scope.before()) if query.compare else None
    context = {
        "report": report,
        "page": page,
        "query": query,
        "figures": _drawn(page),
        "about": exports.about(page),
        "before": before,
        "change": _change(page, before, report) if before else None,
        "permalink": request.build_absolute_uri(_url(slug, query, fixed=True)),
        "files": [(name, label, _url(slug, query, fixed=True) + f"&format={name}") for name, label in FORMATS.items()],
        "here": _url(slug, query),
        **_pickers(query, reverse("reports:show", args=[slug])),
    }
    return render(request, "reports/report.html", context)


FORMATS = {"csv": "CSV", "xlsx": "Excel", "pdf": "PDF"}


def _file(kind: str, report: Report, page: Page, query: Query) -> HttpResponseBase:
    name = slugify(f"{report.slug} {query.period}")
    if kind == "csv":
        answer: HttpResponseBase = StreamingHttpResponse(exports.csv_rows(page), content_type="text/csv; charset=utf-8")
    elif kind == "xlsx":
        answer = HttpResponse(
            exports.excel(page), content_type="application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
        )
    elif kind == "pdf":
        answer = HttpResponse(exports.pdf(page, report.title, query.period), content_type="application/pdf")
    else:
        raise Http404(f"format {kind}: allowed are {', '.join(FORMATS)}")
    answer["Content-Disposition"] = f'attachment; filename="{name}.{kind}"'
    return answer


def _drawn(page: Page) -> list[dict[str, Any]]:
    """Charts with an id of their own, for Plotly and without script."""
    return [
        {"id": f"figure-{uuid.uuid4().hex[:8]}", "figure": f, "plotly": plotly(f), "svg": svg(f)} for f in page.figures
    ]


def _url(slug: str, query: Query, *, fixed: bool = False) -> str:
    return f"{reverse('reports:show', args=[slug])}?{urlencode(query.parameters(fixed=fixed), doseq=True)}"


def _pickers(query: Query, action: str) -> dict[str, Any]:
    ranges = [*RANGES.items(), ("month", "This month"), ("last-month", "Last month")]
    return {
        "pickers": choices(query),
        "classes": WorkloadClass.choices,
        "action": action,
        "ranges": ranges,
        "query_string": urlencode(query.parameters(fixed=True)),
    }


def _change(page: Page, before: Page, report: Report) -> dict[str, Any] | None:
    if page.value is None or before.value is None:
        return None
    difference = page.value - before.value
    if report.unit == "share":
        text = f"{difference * 100:+.1f} percentage points"
    elif before.value:
        text = f"{difference / abs(before.value) * 100:+.1f} %"
    else:
        return None
    good = (difference > 0) == report.more_is_better
    return {"text": text, "answer": before.answer, "kind": "info" if not difference else "good" if good else "warn"}


@login_required
@require_GET
def invoice(request: HttpRequest) -> HttpResponseBase:
    """One line a team, pool: for the accounting system."""
    try:
        query = _query(request)
    except QueryError as error:
        return render(request, "reports/wrong.html", {"error": error}, status=400)
    answer = StreamingHttpResponse(frozen.invoice_lines(query.scope), content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = f'attachment; filename="{slugify(f"invoice {query.period}")}.csv"'
    return answer


@login_required
@require_POST
def freeze(request: HttpRequest, slug: str) -> HttpResponse:
    try:
        query = _query(request)
    except QueryError as error:
        return render(request, "reports/wrong.html", {"error": error}, status=400)
    kept = frozen.freeze(
        actor=Actor.of(request), report=_report(slug, query), query=query, name=request.POST.get("name", "")
    )
    return redirect("reports:frozen", pk=kept.pk)


@login_required
@require_GET
def show_frozen(request: HttpRequest, pk: int) -> HttpResponse:
    actor = Actor.of(request)
    kept = get_object_or_404(frozen.visible(actor), pk=pk)
    if not frozen.readable(kept, visible_team_ids(actor, Permission.VIEW_REPORTS)):
        raise Http404("This report is about teams that you do not see any more.")
    context = {"kept": kept, "result": kept.result, "intact": frozen.intact(kept)}
    if request.GET.get("again"):
        context["differences"] = frozen.differences(kept)
        context["again"] = True
    return render(request, "reports/frozen.html", context)


@login_required
@require_GET
def frozen_list(request: HttpRequest) -> HttpResponse:
    rows: list[FrozenReport] = list(frozen.visible(Actor.of(request))[:200])
    return render(request, "reports/frozen_list.html", {"rows": rows})


@login_required
@require_POST
def mail(request: HttpRequest, slug: str) -> HttpResponse:
    """Send this report to the person who asks, every day, week or month."""
    try:
        query = _query(request)
        report = _report(slug, query)
        row = report_mails.schedule(
            user=request.user, report=report, query=query, period=request.POST.get("period", ""), now=clock.now()
        )
    except QueryError as error:
        return render(request, "reports/wrong.html", {"error": error}, status=400)
    messages.success(request, f"“{report.title}” will be sent to you {row.get_period_display().lower()}.")
    return redirect(_url(slug, query))
