"""The one place where the state of a job or an attempt changes.

Every change is checked against a table of legal moves and recorded with time, actor and reason. Callers hold the row
(``select_for_update`` or a fresh insert) and are inside a transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from scheduling.models import Attempt, AttemptState, Job, JobEvent, JobState, Outcome
from scheduling.services.happenings import note
from teams.models import User

JOB_MOVES: Mapping[str, frozenset[str]] = {
    JobState.WAITING: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.FAILED}),
    JobState.RUNNING: frozenset(
        {JobState.WAITING, JobState.SUCCEEDED, JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED}
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.TIMED_OUT: frozenset(),
    JobState.CANCELLED: frozenset(),
}

ATTEMPT_MOVES: Mapping[str, frozenset[str]] = {
    AttemptState.STARTING: frozenset({AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.ENDED}),
    AttemptState.RUNNING: frozenset({AttemptState.STOPPING, AttemptState.ENDED}),
    AttemptState.STOPPING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}

FINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED})

SCHEDULER = "scheduler"


class IllegalMove(ValueError):
    """A change of state that the table does not know."""

    def __init__(self, what: str, before: str, after: str) -> None:
        self.before, self.after = before, after
        super().__init__(f"{what} cannot go from {before} to {after}")


def check_move(moves: Mapping[str, frozenset[str]], what: str, before: str, after: str) -> None:
    if after not in moves[before]:
        raise IllegalMove(what, before, after)


def move_job(
    job: Job,
    to: str,
    *,
    at: datetime,
    actor_label: str = SCHEDULER,
    actor: User | None = None,
    reason: str = "",
    save: bool = True,
    **data: Any,
) -> JobEvent:
    """Change a job's state. With ``save=False`` the caller saves row and event in bulk. Raises ``IllegalMove``."""
    check_move(JOB_MOVES, f"job {job.pk}", job.state, to)
    event = JobEvent(
        job=job,
        at=at,
        kind="state",
        from_state=job.state,
        to_state=to,
        actor=actor,
        actor_label=actor_label,
        reason=reason[:1000],
        data=data,
    )
    job.state = to
    job.version += 1
    if to in FINAL_JOB_STATES:
        job.finished_at = at
        job.reason_group = None
    elif to == JobState.RUNNING and job.first_started_at is None:
        job.first_started_at = at
    if save:
        job.save()
        event.save()
        note([event])
    return event


def move_attempt(
    attempt: Attempt,
    to: str,
    *,
    at: datetime,
    actor_label: str = SCHEDULER,
    actor: User | None = None,
    reason: str = "",
    outcome: str = "",
    save: bool = True,
    **data: Any,
) -> JobEvent:
    """Change an attempt's state; ``ended`` needs an ``outcome``. Raises ``IllegalMove``."""
    check_move(ATTEMPT_MOVES, f"attempt {attempt.pk}", attempt.state, to)
    if (to == AttemptState.ENDED) != bool(outcome):
        raise ValueError("an outcome goes with the end of an attempt, and only with it")
    event = JobEvent(
        job_id=attempt.job_id,
        attempt=attempt,
        at=at,
        kind="attempt",
        from_state=attempt.state,
        to_state=to,
        actor=actor,
        actor_label=actor_label,
        reason=reason[:1000],
        data={**data, "number": attempt.number, **({"outcome": outcome} if outcome else {})},
    )
    attempt.state = to
    if to == AttemptState.ENDED:
        attempt.outcome = Outcome(outcome)
        attempt.ended_at = max(at, attempt.started_at)
    elif to == AttemptState.RUNNING and attempt.running_at is None:
        attempt.running_at = at
    if save:
        attempt.save()
        event.save()
        note([event])
    return event


def record(
    job: Job,
    kind: str,
    *,
    at: datetime,
    actor_label: str = SCHEDULER,
    actor: User | None = None,
    reason: str = "",
    attempt: Attempt | None = None,
    **data: Any,
) -> JobEvent:
    """An event without a change of state: held, released, checkpoint, changed …"""
    return JobEvent.objects.create(
        job=job,
        attempt=attempt,
        at=at,
        kind=kind,
        actor=actor,
        actor_label=actor_label,
        reason=reason[:1000],
        data=data,
    )


def save_all(rows: Iterable[JobEvent]) -> None:
    note(JobEvent.objects.bulk_create(list(rows), batch_size=1000))
