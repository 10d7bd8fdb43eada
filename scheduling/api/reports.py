"""Reports as JSON and CSV, and what-if."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpResponseBase, StreamingHttpResponse
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import exceptions
from rest_framework import serializers as s
from rest_framework.request import Request
from rest_framework.response import Response

from gpuportal.api import not_found, problem
from scheduling.api import schema
from scheduling.api.base import ApiView
from scheduling.reports import exports
from scheduling.reports.page import payload
from scheduling.reports.pages import REPORTS
from scheduling.reports.query import QueryError, parse
from scheduling.services import clock
from scheduling.services.whatif import run_scenario
from teams.permissions import Permission, require, visible_team_ids


class ReportName(s.Serializer):
    slug = s.CharField()
    title = s.CharField()
    question = s.CharField()


class ReportNames(s.Serializer):
    results = ReportName(many=True)


class ReportOut(s.Serializer):
    question = s.CharField()
    answer = s.CharField()
    sentence = s.CharField()
    numbers = s.ListField(child=s.DictField())
    tables = s.ListField(child=s.DictField())
    warnings = s.ListField(child=s.CharField())
    definition = s.DictField()


class WhatIfOut(s.Serializer):
    result = s.DictField()


class Reports(ApiView):
    @extend_schema(operation_id="reports_list", tags=["reports"], responses=schema.answers(ReportNames))
    def get(self, request: Request) -> Response:
        """The names of all reports."""
        require(self.actor, Permission.VIEW_REPORTS)
        return Response(
            {"results": [{"slug": r.slug, "title": r.title, "question": r.question} for r in REPORTS.values()]}
        )


class OneReport(ApiView):
    @extend_schema(
        operation_id="reports_get", tags=["reports"], responses=schema.answers(ReportOut, 400, 404),
        parameters=[
            OpenApiParameter("range", str, description="`28d`, `month`, `last-month`; or give `since` and `until`."),
            OpenApiParameter("since", {"type": "string", "format": "date"}),
            OpenApiParameter("until", {"type": "string", "format": "date"}),
            *(OpenApiParameter(name, str) for name in ("team", "pool", "model", "class")),
            OpenApiParameter("export", {"type": "string", "enum": ["json", "csv"]}),
        ],
    )  # fmt: skip
    def get(self, request: Request, slug: str) -> HttpResponseBase:
        """All numbers of a report with their definition; `export=csv` streams a file for spreadsheets."""
        visible = visible_team_ids(self.actor, Permission.VIEW_REPORTS)
        if visible is not None and not visible:
            raise PermissionDenied("Reports are for members of a team.")
        zone = timezone.get_current_timezone()
        try:
            query = parse(request.query_params, now=clock.now(), zone=zone, visible=visible)
        except QueryError as error:
            row: dict[str, Any] = {
                "field": error.field,
                "value": error.value,
                "allowed": error.allowed,
                "message": str(error),
            }
            return problem(400, "Bad request", "A parameter is not valid.", [row])
        kind = request.query_params.get("export", "json")
        if kind not in ("json", "csv"):
            raise exceptions.ValidationError({"export": [f"{kind[:40]!r} is not one of json, csv."]})
        report = REPORTS.get(slug)
        if report is None or (report.whole_only and not query.scope.whole):
            raise not_found("report", slug)
        made = report.make(query.scope)
        if kind == "json":
            return Response(payload(made))
        answer = StreamingHttpResponse(exports.csv_rows(made), content_type="text/csv; charset=utf-8")
        answer["Content-Disposition"] = f'attachment; filename="{report.slug}.csv"'
        return answer


class WhatIf(ApiView):
    @extend_schema(
        operation_id="whatif_run",
        tags=["what-if"],
        request=schema.Scenario,
        responses=schema.answers(WhatIfOut, 400, 422),
    )
    def post(self, request: Request) -> Response:
        """A scenario in, its result out, by the engine that also decides here."""
        require(self.actor, Permission.USE_LAB)
        return Response({"result": run_scenario(self.body(schema.Scenario)["scenario"])})
