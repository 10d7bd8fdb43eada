"""Jobs and their attempts."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.core.exceptions import PermissionDenied
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, extend_schema
from rest_framework import exceptions
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response

from gpuportal.api import not_found, problem
from scheduling.api import schema
from scheduling.api.base import ApiView, number, once, page, wanted_version
from scheduling.api.filters import filtered_jobs
from scheduling.backends.base import BackendError, NotFound
from scheduling.models import Attempt, Job, JobState, Pool, Priority
from scheduling.selectors.jobs import get_job, latest_attempt, visible_jobs
from scheduling.services import jobs as services
from scheduling.services.errors import InvalidRequest
from scheduling.services.reasons import queue_order
from scheduling.services.registry import backend_for
from scheduling.services.submit import JobSpec, submit_jobs
from teams.permissions import Permission, visible_team_ids

_DURATIONS = ("walltime", "checkpoint_every", "grace")
EXAMPLE = OpenApiExample(
    "A gang of two workers",
    value={"name": "resnet", "team": "vision", "command": "python train.py", "workers": 2, "gpus": 4, "walltime": 7200},
    request_only=True,
)


def spec_of(data: dict[str, Any]) -> JobSpec:
    """The service's shape of a checked body."""
    values = dict(data)
    for name in _DURATIONS:
        if values.get(name) is not None:
            values[name] = timedelta(seconds=values[name])
    if values.get("share") is not None or values.get("share_memory_bytes") is not None:
        values.setdefault("gpus", 0)
    if "simulation" in values:
        values["simulation"] = dict(values["simulation"])
    return JobSpec(**values)


def show(rows: Iterable[Job]) -> list[dict[str, Any]]:
    """Jobs with the names of their pools: one query however many."""
    names = dict(Pool.objects.values_list("pk", "name"))
    return [_row(job, names) for job in rows]


def _seconds(value: timedelta | None) -> float | None:
    return None if value is None else value.total_seconds()


def _row(job: Job, names: dict[int, str]) -> dict[str, Any]:
    group = job.reason_group if job.state == JobState.WAITING else None
    plain = (
        "id", "name", "state", "workload_class", "gpus", "share_memory_bytes", "workers", "min_workers",
        "interruptible", "topology_level", "topology_required", "retries", "not_before", "command", "image",
        "environment", "working_directory", "held", "array_id", "submitted_at", "first_started_at", "first_result_at",
        "finished_at", "version",
    )  # fmt: skip
    return {
        **{name: getattr(job, name) for name in plain},
        "team": job.team.name,
        "owner": job.owner.username,
        "reason": group.code if group else "",
        "priority": Priority(job.priority).name.lower(),
        "share": None if job.share is None else str(job.share),
        "pools": [names.get(pool, f"pool {pool}") for pool in job.pools],
        "walltime": _seconds(job.walltime),
        "checkpoint_every": _seconds(job.checkpoint_every),
        "grace": _seconds(job.grace),
    }


def answer(job_id: int, actor: Any, code: int = 200) -> Response:
    job = get_job(actor, job_id)
    response = Response(show([job])[0], status=code)
    response["ETag"] = f'"{job.version}"'
    return response


class Jobs(ApiView):
    @extend_schema(
        operation_id="jobs_list", tags=["jobs"], parameters=[*schema.CURSOR, *filtered_jobs.parameters],
        responses=schema.answers(schema.paged(schema.JobOut), 400),
    )  # fmt: skip
    def get(self, request: Request) -> Response:
        """Jobs of your teams, newest first."""
        rows = visible_jobs(self.actor).select_related("reason_group")
        return page(request, filtered_jobs(request, rows), show)

    @extend_schema(
        operation_id="jobs_submit", tags=["jobs"], parameters=[schema.KEY], request=schema.JobIn, examples=[EXAMPLE],
        responses=schema.answers(schema.Submitted, 400, 409, 422, ok=201),
    )  # fmt: skip
    def post(self, request: Request) -> Response:
        """Submit a job, or an array of ``count`` jobs: all or none."""
        spec = spec_of(self.body(schema.JobIn))
        actor = self.actor
        return once(request, actor, lambda: (201, {"jobs": show(submit_jobs(actor=actor, spec=spec))}))


class OneJob(ApiView):
    @extend_schema(operation_id="jobs_get", tags=["jobs"], responses=schema.answers(schema.JobOut, 404))
    def get(self, request: Request, pk: int) -> Response:
        """One job; its ETag is for ``If-Match``."""
        return answer(pk, self.actor)

    @extend_schema(
        operation_id="jobs_change", tags=["jobs"], parameters=[schema.MATCH], request=schema.PriorityIn,
        responses=schema.answers(schema.JobOut, 400, 404, 409, 422, 428),
    )  # fmt: skip
    def patch(self, request: Request, pk: int) -> Response:
        """Change the priority inside the team; ``urgent`` is for leads."""
        get_job(self.actor, pk)
        data = self.body(schema.PriorityIn)
        version = wanted_version(request, required=True)
        services.set_priority(actor=self.actor, job_id=pk, priority=data["priority"], version=version)
        return answer(pk, self.actor)


def _act(view: ApiView, request: Request, pk: int, action: Any) -> Response:
    get_job(view.actor, pk)
    data = view.body(schema.Reason)
    action(actor=view.actor, job_id=pk, reason=data.get("reason", ""), version=wanted_version(request))
    return answer(pk, view.actor)


_ACTION = {"tags": ["jobs"], "parameters": [schema.MATCH], "request": schema.Reason}
_DONE = schema.answers(schema.JobOut, 400, 404, 409)


class Cancel(ApiView):
    @extend_schema(operation_id="jobs_cancel", responses=_DONE, **_ACTION)
    def post(self, request: Request, pk: int) -> Response:
        """Waiting: at once. Running: stopped with its grace."""
        return _act(self, request, pk, services.cancel_job)


class HoldJob(ApiView):
    @extend_schema(operation_id="jobs_hold", responses=_DONE, **_ACTION)
    def post(self, request: Request, pk: int) -> Response:
        """Keep a waiting job from starting."""
        return _act(self, request, pk, services.hold_job)


class ReleaseJob(ApiView):
    @extend_schema(operation_id="jobs_release", responses=_DONE, **_ACTION)
    def post(self, request: Request, pk: int) -> Response:
        """Let a held job start."""
        return _act(self, request, pk, services.release_job)


class Clone(ApiView):
    @extend_schema(
        operation_id="jobs_clone", tags=["jobs"], parameters=[schema.KEY], request=schema.CloneIn,
        responses=schema.answers(schema.Submitted, 400, 404, 422, ok=201),
    )  # fmt: skip
    def post(self, request: Request, pk: int) -> Response:
        """Submit the same request again."""
        actor = self.actor
        spec = services.clone_spec(get_job(actor, pk))
        spec.name = self.body(schema.CloneIn).get("name", spec.name)
        return once(request, actor, lambda: (201, {"jobs": show(submit_jobs(actor=actor, spec=spec))}))


class Bulk(ApiView):
    @extend_schema(
        operation_id="jobs_bulk",
        tags=["jobs"],
        request=schema.BulkIn,
        responses=schema.answers(schema.BulkOut, 400, 422),
    )
    def post(self, request: Request) -> Response:
        """One action on up to 500 jobs, with a result for each."""
        data, actor = self.body(schema.BulkIn), self.actor
        action, reason = data["action"], data.get("reason", "")
        if action == "priority" and "priority" not in data:
            raise InvalidRequest({"priority": [f"Missing; give one of {', '.join(schema.PRIORITIES)}."]})
        plain = {"cancel": services.cancel_job, "hold": services.hold_job, "release": services.release_job}

        def one(job_id: int) -> Job:
            if action == "priority":
                return services.set_priority(actor=actor, job_id=job_id, priority=data["priority"])
            return plain[action](actor=actor, job_id=job_id, reason=reason)

        results = services.in_bulk(dict.fromkeys(data["jobs"]), one)
        return Response({"results": [{"job_id": r.job_id, "done": r.done, "message": r.message} for r in results]})


class Log(ApiView):
    @extend_schema(
        operation_id="jobs_log", tags=["jobs"], responses=schema.answers(schema.LogOut, 400, 404, 503),
        parameters=[
            OpenApiParameter("attempt", {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}),
            OpenApiParameter("offset", {"type": "integer", "minimum": 0, "maximum": 1 << 50}),
        ],
    )  # fmt: skip
    def get(self, request: Request, pk: int) -> Response:
        """Up to 256 KiB of an attempt's log from ``offset`` on; without ``attempt`` of the latest one."""
        job = get_job(self.actor, pk)
        wanted = number(request, "attempt", 0, 1, 2**31 - 1)
        offset = number(request, "offset", 0, 0, 1 << 50)
        rows = job.attempts.select_related("pool__cluster")
        attempt = rows.filter(number=wanted).first() if wanted else latest_attempt(job)
        if attempt is None:
            raise exceptions.NotFound(f"Job {pk} has no such attempt.")
        try:
            backend = backend_for(attempt.pool.cluster)
            chunk = backend.logs(attempt.uuid, offset=offset, limit=256 << 10, backend_id=attempt.backend_id)
        except NotFound:
            raise exceptions.NotFound("The cluster has no log of this attempt.") from None
        except BackendError as error:
            return problem(503, "Cluster unavailable", str(error))
        text = chunk.data.decode(errors="replace")
        return Response({"attempt": attempt.number, "text": text, "end": chunk.end, "finished": chunk.finished})


class Events(ApiView):
    @extend_schema(
        operation_id="jobs_events", tags=["jobs"], parameters=schema.CURSOR,
        responses=schema.answers(schema.paged(schema.EventOut), 400, 404),
    )  # fmt: skip
    def get(self, request: Request, pk: int) -> Response:
        """Every change of state of the job and its attempts, newest first."""
        rows = get_job(self.actor, pk).events.select_related("attempt")
        names = ("id", "at", "kind", "from_state", "to_state", "actor_label", "reason", "data")
        return page(
            request, rows,
            lambda found: [
                {**{n: getattr(e, n) for n in names}, "attempt": e.attempt.number if e.attempt else None} for e in found
            ],
        )  # fmt: skip


class Blockers(ApiView):
    @extend_schema(operation_id="jobs_blockers", tags=["jobs"], responses=schema.answers(schema.BlockersOut, 404))
    def get(self, request: Request, pk: int) -> Response:
        """All reasons why it waits, with numbers and the smallest change that would help."""
        job = get_job(self.actor, pk)
        group = job.reason_group if job.state == JobState.WAITING else None
        order = queue_order() if job.state == JobState.WAITING else []
        return Response(
            {
                "job": pk,
                "position": order.index(pk) + 1 if pk in order else None,
                "worked_out_at": group.worked_out_at if group else None,
                "blockers": group.blockers if group else [],
            }
        )


class EstimateOfJob(ApiView):
    @extend_schema(operation_id="jobs_estimate", tags=["jobs"], responses=schema.answers(schema.EstimateOut, 404))
    def get(self, request: Request, pk: int) -> Response:
        """The latest start estimate; null where none was made."""
        row = get_job(self.actor, pk).estimates.order_by("-made_at").first()
        names = ("made_at", "p50_at", "p90_at")
        return Response(
            {"job": pk, **{name: getattr(row, name, None) for name in names}, "basis": row.basis if row else ""}
        )


def show_attempts(rows: Iterable[Attempt]) -> list[dict[str, Any]]:
    plain = (
        "id", "uuid", "number", "state", "outcome", "cause", "detail", "exit_code", "workers", "started_at",
        "running_at", "ended_at", "last_checkpoint_at",
    )  # fmt: skip
    return [
        {
            **{name: getattr(row, name) for name in plain},
            "job": row.job_id, "pool": row.pool.name, "gpus": str(row.gpus),
            "lost_gpu_seconds": str(row.lost_gpu_seconds),
        }
        for row in rows
    ]  # fmt: skip


class Attempts(ApiView):
    @extend_schema(
        operation_id="attempts_list", tags=["attempts"], responses=schema.answers(schema.paged(schema.AttemptOut), 400),
        parameters=[*schema.CURSOR, OpenApiParameter("job", {"type": "integer", "minimum": 1, "maximum": 10**18 - 1})],
    )  # fmt: skip
    def get(self, request: Request) -> Response:
        """Attempts of your teams' jobs, newest first."""
        rows = Attempt.objects.select_related("pool")
        teams = visible_team_ids(self.actor, Permission.VIEW_JOBS)
        if teams is not None:
            rows = rows.filter(team_id__in=teams)
        job = number(request, "job", 0, 1, 10**18 - 1)
        return page(request, rows.filter(job_id=job) if job else rows, show_attempts)


class OneAttempt(ApiView):
    @extend_schema(operation_id="attempts_get", tags=["attempts"], responses=schema.answers(schema.AttemptOut, 404))
    def get(self, request: Request, pk: int) -> Response:
        """One attempt."""
        row = Attempt.objects.select_related("pool").filter(pk=pk).first()
        if row is None:
            raise not_found("attempt", pk)
        get_job(self.actor, row.job_id)
        return Response(show_attempts([row])[0])


class Marks(ApiView):
    authentication_classes = []
    permission_classes = [AllowAny]

    @extend_schema(
        operation_id="attempts_mark", tags=["attempts"], auth=[], request=schema.MarkIn,
        responses=schema.answers(schema.MarkOut, 400, 404, 409, ok=201),
    )  # fmt: skip
    def post(self, request: Request, attempt: uuid.UUID) -> Response:
        """A running job tells of a checkpoint or its first result, with the secret from its environment."""
        data = self.body(schema.MarkIn)
        try:
            made = services.mark(attempt_uuid=str(attempt), **data)
        except (Attempt.DoesNotExist, PermissionDenied):
            # The same answer for both: nobody learns which attempts exist.
            raise exceptions.NotFound("There is no such attempt with this token.") from None
        return Response({"kind": made.kind, "at": made.at}, status=201)
