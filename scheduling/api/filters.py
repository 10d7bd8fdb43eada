"""Filters of lists: each checks its value and says what is allowed."""

from __future__ import annotations

from typing import Any

import django_filters
from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter
from rest_framework import exceptions
from rest_framework.request import Request

from scheduling.models import Job, JobState, Pool, WorkloadClass


class JobFilter(django_filters.FilterSet):
    """Every filter is backed by an index, or narrows what an indexed one found."""

    state = django_filters.MultipleChoiceFilter(choices=JobState.choices)
    team = django_filters.CharFilter("team__name", max_length=64)
    owner = django_filters.CharFilter("owner__username", max_length=150)
    pool = django_filters.CharFilter(method="in_pool", max_length=64)
    workload_class = django_filters.ChoiceFilter(choices=WorkloadClass.choices)
    reason = django_filters.CharFilter("reason_group__code", max_length=20)
    array_id = django_filters.CharFilter(max_length=64)
    submitted_after = django_filters.IsoDateTimeFilter("submitted_at", "gte")
    submitted_before = django_filters.IsoDateTimeFilter("submitted_at", "lt")

    class Meta:
        model = Job
        fields: list[str] = []

    def in_pool(self, rows: QuerySet[Job], name: str, value: str) -> QuerySet[Job]:
        number = Pool.objects.filter(name=value).values_list("pk", flat=True).first()
        return rows.filter(pools__contains=[number or -1])


class _FilteredJobs:
    parameters = [
        OpenApiParameter("state", {"type": "string", "enum": JobState.values}, many=False),
        OpenApiParameter("workload_class", {"type": "string", "enum": WorkloadClass.values}),
        *(OpenApiParameter(name, str) for name in ("team", "owner", "pool", "reason", "array_id")),
        *(
            OpenApiParameter(name, {"type": "string", "format": "date-time"})
            for name in ("submitted_after", "submitted_before")
        ),
    ]

    def __call__(self, request: Request, rows: QuerySet[Job]) -> QuerySet[Job]:
        made: Any = JobFilter(request.query_params, rows)
        if not made.is_valid():
            raise exceptions.ValidationError({name: list(texts) for name, texts in made.errors.items()})
        return made.qs  # type: ignore[no-any-return]


filtered_jobs = _FilteredJobs()
