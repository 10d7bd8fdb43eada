"""Writing a simulated past down as history: jobs, attempts, allocations, events, node outages and samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.backends.simulated import chance
from scheduling.engine.retry import Outcome
from scheduling.engine.simulation import RanAttempt, Run, SimJob
from scheduling.models import (
    GPU,
    Allocation,
    Attempt,
    AttemptState,
    Command,
    GPUSample,
    Job,
    JobEvent,
    JobState,
    Mark,
    NodeInterval,
    Pool,
)
from scheduling.services.amounts import device_indices, gpus, placement_json
from scheduling.services.bulk import copy_in
from teams.models import User

#: History has one sample per device and hour; the live feed one per minute.
SAMPLE = 3600

_STATES = {"succeeded": JobState.SUCCEEDED, "failed": JobState.FAILED, "cancelled": JobState.CANCELLED}


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A job that the history leaves running or waiting: it is submitted again, with the work that is left."""

    team: str
    name: str
    gpus: int
    seconds: float


class _Writer:
    def __init__(
        self, run: Run, begins: datetime, now: datetime, pool: Pool, owners: dict[str, User], seed: int
    ) -> None:
        self.run, self.begins, self.now, self.pool, self.owners, self.seed = run, begins, now, pool, owners, seed
        self.teams = {team.id: team.name for team in run.scenario.teams}
        self.gpu_ids = {
            (node, index): number
            for node, index, number in GPU.objects.filter(pool=pool).values_list("node_id", "index", "id")
        }

    def at(self, seconds: float) -> datetime:
        return min(self.now, self.begins + timedelta(seconds=seconds))

    def fails(self, job: SimJob) -> bool:
        return job.state == "succeeded" and chance(self.seed, "failed", job.spec.id - 1) < 0.1

    def job(self, job: SimJob) -> Job:
        spec, request = job.spec, job.spec.request
        state = JobState.FAILED if self.fails(job) else _STATES[job.state]
        end = self.at(job.end or 0.0)
        first = self.at(job.attempts[0].start) if job.attempts else None
        result = None
        if job.attempts:
            ran = job.attempts[0]
            every = request.checkpoint_every
            if every and (ran.end or 0) - ran.start >= every:
                result = self.at(ran.start + every)
            elif state == JobState.SUCCEEDED:
                result = end
        return Job(
            name=spec.name,
            team_id=spec.team,
            owner=self.owners[self.teams[spec.team]],
            state=state,
            workers=request.workers,
            min_workers=request.min_workers,
            gpus=request.gpus,
            pools=list(request.pools),
            interruptible=request.interruptible,
            checkpoint_every=timedelta(seconds=request.checkpoint_every) if request.checkpoint_every else None,
            command=f"python train.py --trace-job {spec.id - 1}",
            submitted_at=self.at(spec.at),
            eligible_at=self.at(spec.at),
            first_started_at=first,
            first_result_at=result,
            finished_at=end,
            user_failures=int(state == JobState.FAILED),
        )

    def attempt(self, job: SimJob, row: Job, ran: RanAttempt, eligible: datetime) -> Attempt:
        last = ran is job.attempts[-1]
        outcome = ran.outcome or Outcome.SUCCEEDED
        cause = {Outcome.PREEMPTED: "preemption", Outcome.NODE_FAILED: "node"}.get(outcome, "")
        code: int | None = 0 if outcome is Outcome.SUCCEEDED else None
        lost = Decimal(str(round(ran.lost_gpu_seconds, 3)))
        if last and self.fails(job):
            oom = chance(self.seed, "oom", job.spec.id) < 0.3
            outcome, cause, code = Outcome.FAILED, "oom" if oom else "user", 137 if oom else 1
            lost = self._lost(job, ran)
        start = self.at(ran.start)
        return Attempt(
            job=row,
            team_id=row.team_id,
            pool=self.pool,
            number=ran.number,
            state=AttemptState.ENDED,
            outcome=outcome.value,
            cause=cause,
            exit_code=code,
            workers=ran.workers,
            gpus=gpus(ran.gpus * 1_000_000),
            placement=placement_json(ran.placement),
            filler=ran.filler,
            started_at=start,
            running_at=start,
            ended_at=self.at(ran.end or 0.0),
            eligible_at=eligible,
            last_checkpoint_at=self._checkpoint(job, ran),
            lost_gpu_seconds=lost,
            stop_reason=ran.reason[:16],
        )

    def _checkpoint(self, job: SimJob, ran: RanAttempt) -> datetime | None:
        every = job.spec.request.checkpoint_every
        if not every or ran.end is None:
            return None
        done = int((ran.end - ran.start) / every + 1e-9)
        return self.at(ran.start + done * every) if done else None

    def _lost(self, job: SimJob, ran: RanAttempt) -> Decimal:
        length = (ran.end or 0.0) - ran.start
        every = job.spec.request.checkpoint_every
        lost = length if not every else length - int(length / every + 1e-9) * every
        return Decimal(str(round(ran.gpus * lost, 3)))

    def events(self, job: SimJob, row: Job, attempts: list[Attempt]) -> Iterator[JobEvent]:
        label = f"philly-{self.teams[job.spec.team]}"
        yield JobEvent(job=row, at=row.submitted_at, kind="submitted", to_state="waiting", actor_label=label)
        for attempt in attempts:
            assert attempt.ended_at is not None
            more = {"job": row, "attempt": attempt, "actor_label": "scheduler"}
            yield JobEvent(kind="state", at=attempt.started_at, from_state="waiting", to_state="running", **more)
            yield JobEvent(
                kind="attempt",
                at=attempt.ended_at,
                from_state="running",
                to_state="ended",
                data={"number": attempt.number, "outcome": attempt.outcome},
                **more,
            )
            last = attempt is attempts[-1]
            to_state = row.state if last else "waiting"
            yield JobEvent(kind="state", at=attempt.ended_at, from_state="running", to_state=to_state, **more)

    def allocations(self, attempt: Attempt) -> Iterator[Allocation]:
        during = DateTimeTZRange(attempt.started_at, attempt.ended_at, "[)")
        for node, devices, share in attempt.placement:
            for index in device_indices(devices):
                yield Allocation(
                    attempt=attempt,
                    gpu_id=self.gpu_ids[node, index],
                    team_id=attempt.team_id,
                    pool=self.pool,
                    share=gpus(share),
                    during=during,
                )

    def command(self, attempt: Attempt) -> Command:
        return Command(
            cluster_id=self.pool.cluster_id,
            attempt=attempt,
            kind=Command.Kind.START,
            state=Command.State.DONE,
            created_at=attempt.started_at,
            due_at=attempt.started_at,
            done_at=attempt.started_at,
            tries=1,
        )

    def samples(self, attempt: Attempt) -> Iterator[GPUSample]:
        """Every full hour in which it held a device; one in fifty is missing, as in life."""
        assert attempt.ended_at is not None
        level = 0.3 + 0.65 * chance(self.seed, "level", attempt.job_id)
        at = attempt.started_at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        while at <= attempt.ended_at:
            for node, devices, _ in attempt.placement:
                for index in device_indices(devices):
                    luck = chance(self.seed, attempt.number, attempt.job_id, node, index, at.isoformat())
                    if luck < 0.02:
                        continue
                    busy = 0.0 if luck < 0.07 else min(1.0, max(0.0, level + 0.3 * (luck - 0.5)))
                    yield GPUSample(
                        gpu_id=self.gpu_ids[node, index],
                        attempt=attempt,
                        at=at,
                        seconds=SAMPLE,
                        activity=busy,
                        metric="sm_active",
                        power_watts=30 + 220 * busy,
                    )
            at += timedelta(hours=1)


def write_history(
    run: Run, begins: datetime, now: datetime, pool: Pool, owners: dict[str, User], seed: int
) -> list[Unfinished]:
    """Finished jobs become rows; what is left over is returned, to be submitted live."""
    writer = _Writer(run, begins, now, pool, owners, seed)
    finished = [job for job in run.jobs.values() if job.finished and job.attempts]
    rows = [writer.job(job) for job in finished]
    copy_in(rows)
    attempts: list[Attempt] = []
    per_job: list[tuple[SimJob, Job, list[Attempt]]] = []
    for job, row in zip(finished, rows, strict=True):
        eligible, mine = row.submitted_at, []
        for ran in job.attempts:
            mine.append(writer.attempt(job, row, ran, eligible))
            eligible = writer.at(ran.end or 0.0)
        attempts += mine
        per_job.append((job, row, mine))
    copy_in(attempts)
    copy_in([event for job, row, mine in per_job for event in writer.events(job, row, mine)])
    copy_in([allocation for attempt in attempts for allocation in writer.allocations(attempt)])
    copy_in([writer.command(attempt) for attempt in attempts])
    copy_in(
        [
            Mark(attempt=attempt, kind=Mark.Kind.CHECKPOINT, at=attempt.last_checkpoint_at)
            for attempt in attempts
            if attempt.last_checkpoint_at is not None
        ]
    )
    copy_in([sample for attempt in attempts for sample in writer.samples(attempt)])
    _outages(writer)
    return [
        Unfinished(
            writer.teams[job.spec.team],
            job.spec.name,
            job.spec.request.gpus * job.spec.request.workers,
            max(1.0, job.spec.runs - job.saved),
        )
        for job in run.jobs.values()
        if not job.finished and job.state in ("waiting", "running")
    ]


def _outages(writer: _Writer) -> None:
    down: dict[int, float] = {}
    rows = []
    for event in writer.run.scenario.events:
        for node in event.data["nodes"]:
            if event.data["is"] == "down":
                down[node] = event.at
            elif node in down:
                during = DateTimeTZRange(writer.at(down.pop(node)), writer.at(event.at), "[)")
                rows.append(
                    NodeInterval(
                        node_id=node, state="down", during=during, reason="hardware fault", actor_label="cluster philly"
                    )
                )
    NodeInterval.objects.bulk_create(rows)
