"""The end of an attempt: the ledger is closed, lost work counted, and the job is final or waits again (4.10)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal

from django.db import connection
from django.db.models import F

from scheduling.engine.retry import Outcome, after_attempt
from scheduling.engine.snapshot import Policy
from scheduling.models import Attempt, AttemptState, Job, JobDependency, JobState
from scheduling.services import states
from scheduling.services.policy import current_policy

#: Outcomes that throw away work since the last checkpoint; a success keeps all, a cancelled job's owner gave it up.
LOSING = frozenset({Outcome.FAILED, Outcome.TIMED_OUT, Outcome.PREEMPTED, Outcome.NODE_FAILED, Outcome.LOST})


def end_attempt(
    attempt: Attempt,
    *,
    outcome: Outcome,
    at: datetime,
    actor_label: str,
    exit_code: int | None = None,
    cause: str = "",
    detail: str = "",
    failed_nodes: Iterable[int] = (),
    policy: Policy | None = None,
) -> None:
    """Close ``attempt`` and decide about its job. The caller holds the attempt's row and is in a transaction.

    ``at`` is clipped to the attempt's start, so that the ledger stays legal whatever a cluster's clock says.
    """
    at = max(at, attempt.started_at)
    close_allocations(attempt, at)
    attempt.exit_code, attempt.cause, attempt.detail = exit_code, cause, detail[:1000]
    attempt.growable_since = None
    if outcome in LOSING:
        attempt.lost_gpu_seconds = lost_work(attempt, at)
    states.move_attempt(
        attempt,
        AttemptState.ENDED,
        at=at,
        outcome=outcome.value,
        actor_label=actor_label,
        reason=detail,
        cause=cause,
        exit_code=exit_code,
        lost_gpu_seconds=float(attempt.lost_gpu_seconds),
    )
    job = Job.objects.select_for_update().get(pk=attempt.job_id)
    _decide(job, attempt, outcome, at, actor_label, tuple(failed_nodes), policy or current_policy())


def lost_work(attempt: Attempt, at: datetime) -> Decimal:
    """GPU-seconds since the last checkpoint, or since the start."""
    since = attempt.last_checkpoint_at or attempt.started_at
    seconds = max(timedelta(0), at - since)
    return (attempt.gpus * Decimal(seconds / timedelta(microseconds=1)) / 1_000_000).quantize(Decimal("0.001"))


def close_allocations(attempt: Attempt, at: datetime) -> None:
    """End the open intervals of an attempt; one that ends as it begins becomes empty."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE scheduling_allocation
            SET during = tstzrange(lower(during), greatest(%s, lower(during)), '[)')
            WHERE attempt_id = %s AND upper_inf(during) AND NOT isempty(during)
            """,
            [at, attempt.pk],
        )


def _decide(
    job: Job,
    attempt: Attempt,
    outcome: Outcome,
    at: datetime,
    actor_label: str,
    failed_nodes: tuple[int, ...],
    policy: Policy,
) -> None:
    then = after_attempt(
        outcome,
        retries=job.retries,
        user_failures=job.user_failures,
        infrastructure_failures=job.infrastructure_failures,
        policy=policy,
    )
    job.user_failures, job.infrastructure_failures = then.user_failures, then.infrastructure_failures
    final = then.final
    if job.cancel_requested_at is not None and outcome is not Outcome.SUCCEEDED:
        final = Outcome.CANCELLED
    if final is not None:
        finish_job(job, final, at, actor_label=actor_label, reason=attempt.detail)
        return
    if outcome is not Outcome.PREEMPTED:
        job.backoff_until = at + timedelta(seconds=then.delay)
        job.avoid_nodes = sorted(failed_nodes) or sorted({row[0] for row in attempt.placement})
    job.eligible_at = max(at, job.backoff_until or at)
    states.move_job(
        job,
        JobState.WAITING,
        at=at,
        actor_label=actor_label,
        reason=f"attempt {attempt.number} {outcome.value.replace('_', ' ')}",
        attempt=attempt.number,
    )


def finish_job(job: Job, outcome: Outcome, at: datetime, *, actor_label: str, reason: str = "") -> None:
    """A job is final; what depends on it is released or cancelled."""
    states.move_job(job, JobState(outcome.value), at=at, actor_label=actor_label, reason=reason)
    dependents = Job.objects.filter(
        pk__in=JobDependency.objects.filter(on=job).values("job_id"), state=JobState.WAITING
    )
    if outcome is Outcome.SUCCEEDED:
        dependents.filter(unmet_dependencies=1).update(unmet_dependencies=0, eligible_at=at, version=F("version") + 1)
        dependents.filter(unmet_dependencies__gt=1).update(
            unmet_dependencies=F("unmet_dependencies") - 1, version=F("version") + 1
        )
        return
    for dependent in dependents.select_for_update().order_by("pk"):
        finish_job(
            dependent,
            Outcome.CANCELLED,
            at,
            actor_label=states.SCHEDULER,
            reason=f"job {job.pk} ({job.name}), on which it depends, ended as {outcome.value}",
        )
