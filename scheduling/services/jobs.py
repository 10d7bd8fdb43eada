"""What people do to jobs after submitting them. Each function checks who may, and writes one event."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from django.core.exceptions import PermissionDenied
from django.db import transaction

from scheduling.engine.retry import Outcome
from scheduling.models import Attempt, AttemptState, Job, JobState, Mark, Pool, Priority
from scheduling.services import clock, states
from scheduling.services.ending import finish_job
from scheduling.services.errors import Conflict, InvalidRequest
from scheduling.services.reconcile import request_stop
from scheduling.services.submit import JobSpec
from scheduling.services.wakeup import wake_cycle
from teams.actors import Actor
from teams.permissions import Permission, allowed

PRIORITIES = {priority.name.lower(): int(priority) for priority in Priority}


def may_manage(actor: Actor, job: Job) -> bool:
    """The owner while a member of the team, leads of the team, administrators."""
    if allowed(actor, Permission.MANAGE_TEAM_JOBS, job.team):
        return True
    mine = actor.user is not None and job.owner_id == actor.user.pk
    robot = actor.token is not None and actor.token.team_id == job.team_id
    return (mine or robot) and allowed(actor, Permission.MANAGE_OWN_JOBS, job.team)


def _locked(actor: Actor, job_id: int, version: int | None) -> Job:
    job = (
        Job.objects.select_for_update(of=("self",))
        .select_related("team__parent__parent", "owner")
        .filter(pk=job_id)
        .first()
    )
    if job is None or not allowed(actor, Permission.VIEW_JOBS, job.team):
        raise Job.DoesNotExist(f"There is no job {job_id}.")
    if not may_manage(actor, job):
        raise PermissionDenied(f"{actor.label} may not change job {job_id} of team {job.team.name}.")
    if version is not None and version != job.version:
        raise Conflict(f"Job {job_id} was changed meanwhile: it has version {job.version}, not {version}.")
    return job


@transaction.atomic
def cancel_job(*, actor: Actor, job_id: int, reason: str = "", version: int | None = None) -> Job:
    """Waiting: at once. Running: told to stop, with its grace. Raises ``Conflict`` when it has ended."""
    job = _locked(actor, job_id, version)
    if job.state in states.FINAL_JOB_STATES:
        raise Conflict(f"Job {job_id} has ended already, as {job.get_state_display().lower()}.")
    now = clock.now()
    job.cancel_requested_at = job.cancel_requested_at or now
    text = reason or f"cancelled by {actor.label}"
    if job.state == JobState.WAITING:
        finish_job(job, Outcome.CANCELLED, now, actor_label=actor.label, reason=text)
        wake_cycle()
        return job
    job.version += 1
    job.save(update_fields=["cancel_requested_at", "version"])
    states.record(job, "cancel", at=now, actor=actor.user, actor_label=actor.label, reason=text)
    attempt = Attempt.objects.filter(job=job).exclude(state=AttemptState.ENDED).first()
    if attempt is not None:
        request_stop(attempt.pk, reason="cancel", actor_label=actor.label, detail=text)
    return job


@transaction.atomic
def hold_job(*, actor: Actor, job_id: int, reason: str = "", version: int | None = None) -> Job:
    """Keep a waiting job from starting."""
    return _set_held(actor, job_id, version, held=True, reason=reason)


@transaction.atomic
def release_job(*, actor: Actor, job_id: int, reason: str = "", version: int | None = None) -> Job:
    return _set_held(actor, job_id, version, held=False, reason=reason)


def _set_held(actor: Actor, job_id: int, version: int | None, *, held: bool, reason: str) -> Job:
    job = _locked(actor, job_id, version)
    word = "held" if held else "released"
    if job.state != JobState.WAITING:
        raise Conflict(f"Job {job_id} is {job.get_state_display().lower()}; only waiting jobs can be {word}.")
    if job.held == held:
        raise Conflict(f"Job {job_id} is {'held already' if held else 'not held'}.")
    job.held = held
    job.version += 1
    job.save(update_fields=["held", "version"])
    states.record(job, word, at=clock.now(), actor=actor.user, actor_label=actor.label, reason=reason)
    wake_cycle()
    return job


@transaction.atomic
def set_priority(*, actor: Actor, job_id: int, priority: str, version: int | None = None) -> Job:
    """Inside the team only; ``urgent`` is for leads."""
    if priority not in PRIORITIES:
        raise InvalidRequest({"priority": [f"{priority!r} is not one of {', '.join(PRIORITIES)}."]})
    job = _locked(actor, job_id, version)
    if job.state in states.FINAL_JOB_STATES:
        raise Conflict(f"Job {job_id} has ended already.")
    if priority == "urgent" and not allowed(actor, Permission.SET_URGENT, job.team):
        raise PermissionDenied("Only leads of the team may make a job urgent.")
    before = Priority(job.priority).name.lower()
    job.priority = PRIORITIES[priority]
    job.version += 1
    job.save(update_fields=["priority", "version"])
    states.record(
        job, "changed", at=clock.now(), actor=actor.user, actor_label=actor.label, before=before, priority=priority
    )
    wake_cycle()
    return job


def clone_spec(job: Job) -> JobSpec:
    """A new request like an old one; pools that are gone are left out."""
    names = dict(Pool.objects.filter(pk__in=job.pools).values_list("pk", "name"))
    return JobSpec(
        name=job.name,
        team=job.team.name,
        command=job.command,
        pools=[names[number] for number in job.pools if number in names],
        gpus=job.gpus,
        share=job.share,
        share_memory_bytes=job.share_memory_bytes,
        workers=job.workers,
        min_workers=job.min_workers,
        walltime=job.walltime,
        workload_class=job.workload_class,
        priority=Priority(job.priority).name.lower(),
        interruptible=job.interruptible,
        checkpoint_every=job.checkpoint_every,
        grace=job.grace,
        topology_level=job.topology_level,
        topology_required=job.topology_required,
        retries=job.retries,
        image=job.image,
        environment=dict(job.environment),
        working_directory=job.working_directory,
        simulation=job.simulation,
    )


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What one action on one of many jobs came to."""

    job_id: int
    done: bool
    message: str


def in_bulk(job_ids: Iterable[int], action: Callable[[int], Job]) -> list[BulkResult]:
    """``action`` on each job, one transaction each; a failure is told and does not stop the rest."""
    results = []
    for number in job_ids:
        try:
            action(number)
            results.append(BulkResult(number, True, "done"))
        except (Conflict, InvalidRequest, PermissionDenied, Job.DoesNotExist) as error:
            results.append(BulkResult(number, False, str(error)))
    return results


@transaction.atomic
def mark(*, attempt_uuid: str, token: str, kind: str, detail: str = "") -> Mark:
    """A running attempt tells of a checkpoint or a first result, with its own secret.

    Raises ``Attempt.DoesNotExist``, ``PermissionDenied``, ``Conflict`` when it runs no longer.
    """
    if kind not in Mark.Kind.values:
        raise InvalidRequest({"kind": [f"{kind!r} is not one of {', '.join(Mark.Kind.values)}."]})
    attempt = Attempt.objects.select_for_update(of=("self",)).select_related("job").get(uuid=attempt_uuid)
    given = hashlib.sha256(token.encode()).hexdigest()
    if not attempt.token_hash or not hmac.compare_digest(given, attempt.token_hash):
        raise PermissionDenied("The token does not belong to this attempt.")
    if attempt.state == AttemptState.ENDED:
        raise Conflict("The attempt has ended.")
    at: datetime = clock.now()
    if kind == Mark.Kind.CHECKPOINT:
        attempt.last_checkpoint_at = at
        attempt.save(update_fields=["last_checkpoint_at"])
    Job.objects.filter(pk=attempt.job_id, first_result_at=None).update(first_result_at=at)
    states.record(attempt.job, kind, at=at, attempt=attempt, actor_label=f"attempt {attempt.number}", reason=detail)
    return Mark.objects.create(attempt=attempt, kind=kind, at=at, detail=detail[:300])
