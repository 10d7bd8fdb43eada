"""Reading jobs: who may see which, filters, pages, and one job with everything about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.http import Http404

from scheduling.models import Allocation, Attempt, GPUSample, Job, JobState, Pool
from scheduling.services.reasons import queue_order
from teams.actors import Actor
from teams.permissions import Permission, allowed, visible_team_ids

PAGE = 50


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


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A job in the queue; ``open`` = the viewer may see all of it."""

    job: Job
    position: int | None
    open: bool
    gpus: Decimal


@dataclass(slots=True)
class QueuePage:
    rows: list[QueueRow]
    total: int
    page: int
    pages: int
    worked_out_at: datetime | None = None


def amount(job: Job) -> Decimal:
    """GPUs that a job asks for."""
    if job.gpus:
        return Decimal(job.workers * job.gpus)
    return job.share if job.share is not None else Decimal("1")


def queue_page(actor: Actor, filters: Mapping[str, str], page: int) -> QueuePage:
    """One page of waiting or running jobs, in the order of the queue."""
    teams = visible_team_ids(actor, Permission.VIEW_JOBS)
    rows = Job.objects.select_related("team", "owner", "reason_group")
    state = filters.get("state") if filters.get("state") in ("waiting", "running") else "waiting"
    rows = rows.filter(state=state)
    if teams is not None and settings.GPUPORTAL_QUEUE == "private":
        rows = rows.filter(team_id__in=teams)
    rows = _filtered(rows, filters, teams)
    if state == "waiting":
        return _waiting_page(rows, teams, page)
    total = rows.count()
    pages = max(1, -(-total // PAGE))
    page = min(max(1, page), pages)
    found = rows.order_by("-id")[(page - 1) * PAGE : page * PAGE]
    return QueuePage([_row(job, None, teams) for job in found], total, page, pages)


def _waiting_page(rows: QuerySet[Job], teams: set[int] | None, page: int) -> QueuePage:
    place = {number: at for at, number in enumerate(queue_order(), start=1)}
    ids = list(rows.values_list("pk", flat=True))
    ids.sort(key=lambda number: (place.get(number, 1 << 60), number))
    pages = max(1, -(-len(ids) // PAGE))
    page = min(max(1, page), pages)
    wanted = ids[(page - 1) * PAGE : page * PAGE]
    jobs = {job.pk: job for job in rows.filter(pk__in=wanted)}
    shown = [_row(jobs[number], place.get(number), teams) for number in wanted if number in jobs]
    return QueuePage(shown, len(ids), page, pages)


def _row(job: Job, position: int | None, teams: set[int] | None) -> QueueRow:
    return QueueRow(job, position, teams is None or job.team_id in teams, amount(job))


def _filtered(rows: QuerySet[Job], filters: Mapping[str, str], teams: set[int] | None) -> QuerySet[Job]:
    if filters.get("team"):
        rows = rows.filter(team__name=filters["team"])
    if filters.get("pool"):
        number = Pool.objects.filter(name=filters["pool"]).values_list("pk", flat=True).first()
        rows = rows.filter(pools__contains=[number or -1])
    if filters.get("owner"):
        rows = rows.filter(owner__username=filters["owner"])
        if teams is not None:
            rows = rows.filter(team_id__in=teams)
    if filters.get("reason"):
        rows = rows.filter(reason_group__code=filters["reason"])
    if filters.get("name"):
        rows = rows.filter(name__icontains=filters["name"].replace("\x00", ""))
        if teams is not None:
            rows = rows.filter(team_id__in=teams)
    return rows


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
