"""Reading jobs: who may see which, and one job with everything about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db.models import QuerySet
from django.http import Http404

from scheduling.models import Allocation, Attempt, GPUSample, Job, JobState
from teams.actors import Actor
from teams.permissions import Permission, allowed, visible_team_ids


def visible_jobs(actor: Actor) -> QuerySet[Job]:
    """Jobs whose every detail the actor may see: the scope of lists, fetches, logs and exports."""
    teams = visible_team_ids(actor, Permission.VIEW_JOBS)
    jobs = Job.objects.select_related("team", "owner")
    return jobs if teams is None else jobs.filter(team_id__in=teams)


def get_job(actor: Actor, number: int) -> Job:
    """Another team's job is not found."""
    job = (
        Job.objects.select_related("team__parent__parent", "owner", "reason_group", "cloned_from")
        .filter(pk=number)
        .first()
    )
    if job is None or not allowed(actor, Permission.VIEW_JOBS, job.team):
        raise Http404(f"There is no job {number}.")
    return job


@dataclass(slots=True)
class AttemptRow:
    """An attempt with where it ran and what it cost."""

    attempt: Attempt
    nodes: str
    gpu_hours: Decimal
    cost: Decimal


def attempts_of(job: Job, now: datetime, names: Mapping[int, str], limit: int = 100) -> list[AttemptRow]:
    """Newest first."""
    rows = job.attempts.select_related("pool__gpu_model", "evicted_for").order_by("-number")[:limit]
    return [_attempt_row(row, now, names) for row in rows]


def _attempt_row(row: Attempt, now: datetime, names: Mapping[int, str]) -> AttemptRow:
    seconds = Decimal(str(((row.ended_at or now) - row.started_at).total_seconds()))
    hours = max(Decimal(0), row.gpus * seconds / 3600)
    nodes = ", ".join(sorted({names.get(slot[0], f"node {slot[0]}") for slot in row.placement}))
    return AttemptRow(row, nodes, hours, hours * row.pool.price)


def node_names(job: Job) -> dict[int, str]:
    """Names of the nodes that the job's attempts were placed on."""
    rows = Allocation.objects.filter(attempt__job=job).values_list("gpu__node_id", "gpu__node__name").distinct()
    return dict(rows[:1000])


def activity_of(attempt: Attempt, points: int = 600) -> list[tuple[datetime, float | None, float | None]]:
    """(instant, mean activity 0 to 1, watts of all devices) of an attempt, oldest first."""
    from django.db.models import Avg, Sum

    rows = (
        GPUSample.objects.filter(attempt=attempt)
        .values("at")
        .annotate(busy=Avg("activity"), watts=Sum("power_watts"))
        .order_by("-at")[:points]
    )
    return [(row["at"], row["busy"], row["watts"]) for row in reversed(rows)]


def latest_attempt(job: Job) -> Attempt | None:
    return job.attempts.select_related("pool__cluster").order_by("-number").first()


FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED})

JSON = dict[str, Any]
