"""From a Slurm job to a run report."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from scheduling.backends.base import Cause, RunReport, RunState
from scheduling.backends.slurm.records import SlurmJob
from scheduling.backends.slurm.script import CANNOT_RECORD, STARTED_TWICE, WRONG_ACCOUNT
from scheduling.backends.slurm.states import job_state

#: slurmstepd ends a batch script with this signal number when it cannot open the output file.
_NO_OUTPUT_SIGNAL = 53


def run_report(attempt: UUID, job: SlurmJob) -> RunReport:
    """Raises ``UnknownState`` for a state of a Slurm newer than this."""
    state, cause = job_state(job.states, restarts=job.restarts)
    detail = job.reason
    tag = job.tag
    if tag is not None and tag.lost:
        return _never_launched(attempt, job, state)
    stopped = tag is not None and tag.stop_by is not None
    if stopped and state is RunState.RUNNING:
        state = RunState.STOPPING
    elif stopped and state in (RunState.FAILED, RunState.TIMED_OUT) and cause in (Cause.USER, Cause.WALLTIME):
        # It ended in its grace period, or Slurm ended it then by the lowered time limit: by our stop.
        state, cause = RunState.CANCELLED, Cause.NONE
    if state is RunState.FAILED:
        state, cause, detail = _failure(job, cause, detail)
    ran = job.started is not None
    return RunReport(
        attempt=attempt,
        state=state,
        backend_id=str(job.id),
        started_at=job.started if ran else None,
        ended_at=job.ended if state.final else None,
        exit_code=exit_code(job) if state.final and ran else None,
        cause=cause,
        detail=detail,
        devices=job.devices,
    )


def _never_launched(attempt: UUID, job: SlurmJob, state: RunState) -> RunReport:
    detail = f"Slurm had it as running on {job.nodes or 'its nodes'}, but never launched it there"
    if not state.final:
        return RunReport(attempt, RunState.STOPPING, str(job.id), job.started, detail=detail)
    return RunReport(
        attempt,
        RunState.NODE_FAILED,
        str(job.id),
        job.started,
        job.ended,
        cause=Cause.NODE,
        detail=detail,
    )


def exit_code(job: SlurmJob) -> int:
    """As a shell has it: 128 + number for an end by a signal."""
    return 128 + job.exit_signal if job.exit_signal else job.exit_status


def forgotten_report(attempt: UUID, record: tuple[int, datetime, str]) -> RunReport:
    """For a job that Slurm has forgotten, from what its batch script left behind."""
    code, ended, job = record
    state, cause = (RunState.FAILED, Cause.USER) if code else (RunState.SUCCEEDED, Cause.NONE)
    return RunReport(
        attempt, state, backend_id=job, ended_at=ended, exit_code=code, cause=cause,
        detail="Slurm has forgotten the job; told from the record in the output folder",
    )  # fmt: skip


def _failure(job: SlurmJob, cause: Cause, detail: str) -> tuple[RunState, Cause, str]:
    if job.exit_status == STARTED_TWICE:
        return RunState.NODE_FAILED, Cause.NODE, "an earlier run of it was lost by Slurm; it was not started again"
    if job.exit_status == WRONG_ACCOUNT:
        return RunState.FAILED, Cause.REJECTED, f"Slurm ran it as {job.user or 'another account'}; it did nothing"
    if job.exit_status == CANNOT_RECORD or job.exit_signal == _NO_OUTPUT_SIGNAL:
        return RunState.NODE_FAILED, Cause.NODE, f"the output folder could not be written on {job.nodes}"
    return RunState.FAILED, cause, detail
