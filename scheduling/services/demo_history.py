"""Writing a simulated past down as history: jobs, attempts, allocations, events, node outages and samples."""

from __future__ import annotations

from collections.abc import Iterator
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
from scheduling.services.commands import start_payload
from scheduling.services.demo_pools import pool_states
from teams.models import User

#: History has one sample per device and hour; the live feed one per minute.
SAMPLE = 3600

#: A job of the history fails at its end with this chance, whatever its trace says (it has no end states).
FAILS = 0.1
#: Seconds to write a checkpoint after the signal, in the live part.
GRACE = 2

_STATES = {
    "succeeded": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
    "waiting": JobState.WAITING,
    "running": JobState.RUNNING,
}


class _Writer:
    def __init__(
        self, run: Run, begins: datetime, now: datetime, pool: Pool, owners: dict[str, User], seed: int
    ) -> None:
        self.run, self.begins, self.now, self.pool, self.owners, self.seed = run, begins, now, pool, owners, seed
        self.until = (now - begins).total_seconds()
        self.nodes = dict(pool.nodes.values_list("id", "name"))
        self.teams = {team.id: team.name for team in run.scenario.teams}
        self.gpu_ids = {
            (node, index): number
            for node, index, number in GPU.objects.filter(pool=pool).values_list("node_id", "index", "id")
        }

    def at(self, seconds: float) -> datetime:
        return min(self.now, self.begins + timedelta(seconds=seconds))

    def fails(self, job: SimJob) -> bool:
        return job.state == "succeeded" and chance(self.seed, "failed", job.spec.id - 1) < FAILS

    def job(self, job: SimJob) -> Job:
        spec, request = job.spec, job.spec.request
        state = JobState.FAILED if self.fails(job) else _STATES[job.state]
        end = self.at(job.end) if job.end is not None else None
        first = self.at(job.attempts[0].start) if job.attempts else None
        result = None
        if job.attempts:
            ran = job.attempts[0]
            every = request.checkpoint_every
            if every and self.length(ran) >= every:
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
            grace=timedelta(seconds=GRACE) if request.interruptible else timedelta(0),
            command=f"python train.py --trace-job {spec.id - 1}",
            simulation=None if job.finished else {"runs": self.left(job), "fails": self._to_fail(job)},
            submitted_at=self.at(spec.at),
            eligible_at=self.at(job.eligible_at),
            first_started_at=first,
            first_result_at=result,
            finished_at=end,
            user_failures=int(state == JobState.FAILED),
        )

    def length(self, ran: RanAttempt) -> float:
        """Seconds it ran, up to now where it still runs."""
        return (self.until if ran.end is None else ran.end) - ran.start

    def left(self, job: SimJob) -> float:
        """Seconds of work that the live cluster has to do."""
        done = job.saved + (self.length(job.attempts[-1]) if job.open else 0.0)
        return max(1.0, job.spec.runs + job.redo - done)

    def _to_fail(self, job: SimJob) -> list[dict[str, object]]:
        if chance(self.seed, "failed", job.spec.id - 1) >= FAILS:
            return []
        number = len(job.attempts) + (0 if job.open else 1)
        return [{"attempt": number, "after": self.left(job), "exit": 1, "cause": "user"}]

    def attempt(self, job: SimJob, row: Job, ran: RanAttempt, eligible: datetime) -> Attempt:
        outcome = ran.outcome
        cause = {Outcome.PREEMPTED: "preemption", Outcome.NODE_FAILED: "node"}.get(outcome, "") if outcome else ""
        code: int | None = 0 if outcome is Outcome.SUCCEEDED else None
        lost = Decimal(str(round(ran.lost_gpu_seconds, 3)))
        if ran is job.attempts[-1] and self.fails(job):
            oom = chance(self.seed, "oom", job.spec.id) < 0.3
            outcome, cause, code = Outcome.FAILED, "oom" if oom else "user", 137 if oom else 1
            lost = self._lost(job, ran)
        start = self.at(ran.start)
        return Attempt(
            job=row,
            team_id=row.team_id,
            pool=self.pool,
            number=ran.number,
            state=AttemptState.ENDED if outcome else AttemptState.RUNNING,
            outcome=outcome.value if outcome else "",
            cause=cause,
            exit_code=code,
            workers=ran.workers,
            gpus=gpus(ran.gpus * 1_000_000),
            placement=placement_json(ran.placement),
            filler=ran.filler,
            started_at=start,
            running_at=start,
            ended_at=None if ran.end is None else self.at(ran.end),
            eligible_at=eligible,
            last_checkpoint_at=self._checkpoint(job, ran),
            lost_gpu_seconds=lost,
            stop_reason=ran.reason[:16],
        )

    def _checkpoint(self, job: SimJob, ran: RanAttempt) -> datetime | None:
        every = job.spec.request.checkpoint_every
        if not every:
            return None
        done = int(self.length(ran) / every + 1e-9)
        return self.at(ran.start + done * every) if done else None

    def _lost(self, job: SimJob, ran: RanAttempt) -> Decimal:
        """GPU-seconds since the last checkpoint, or since the start."""
        every = job.spec.request.checkpoint_every
        length = self.length(ran)
        lost = length if not every else length - int(length / every + 1e-9) * every
        return Decimal(str(round(ran.gpus * lost, 3)))

    def events(self, job: SimJob, row: Job, attempts: list[Attempt]) -> Iterator[JobEvent]:
        label = f"philly-{self.teams[job.spec.team]}"
        yield JobEvent(job=row, at=row.submitted_at, kind="submitted", to_state="waiting", actor_label=label)
        for attempt in attempts:
            more = {"job": row, "attempt": attempt, "actor_label": "scheduler"}
            yield JobEvent(kind="state", at=attempt.started_at, from_state="waiting", to_state="running", **more)
            if attempt.ended_at is None:
                return
            yield JobEvent(
                kind="attempt",
                at=attempt.ended_at,
                from_state="running",
                to_state="ended",
                data={"number": attempt.number, "outcome": attempt.outcome},
                **more,
            )
            to_state = "waiting" if attempt is not attempts[-1] else row.state
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

    def command(self, attempt: Attempt, row: Job) -> Command:
        """Done long ago; that of an attempt which still runs is sent to the simulated cluster, which goes on with it."""
        ended = attempt.state == AttemptState.ENDED
        return Command(
            cluster_id=self.pool.cluster_id,
            attempt=attempt,
            kind=Command.Kind.START,
            state=Command.State.DONE if ended else Command.State.PENDING,
            payload={} if ended else start_payload(attempt, row, self.pool, self.nodes),
            created_at=attempt.started_at,
            due_at=attempt.started_at,
            done_at=attempt.started_at if ended else None,
            tries=int(ended),
        )

    def outages(self) -> Iterator[NodeInterval]:
        down: dict[int, float] = {}
        for event in self.run.scenario.events:
            for node in event.data["nodes"]:
                if event.data["is"] == "down":
                    down[node] = event.at
                elif node in down:
                    yield NodeInterval(
                        node_id=node,
                        state="down",
                        during=DateTimeTZRange(self.at(down.pop(node)), self.at(event.at), "[)"),
                        reason="hardware fault",
                        actor_label=f"cluster {self.pool.cluster.name}",
                    )

    def samples(self, attempt: Attempt) -> Iterator[GPUSample]:
        """Every full hour in which it held a device; one in fifty is missing, as in life."""
        level = 0.3 + 0.65 * chance(self.seed, "level", attempt.job_id)
        at = attempt.started_at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        while at <= (attempt.ended_at or self.now):
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


def write_history(run: Run, begins: datetime, now: datetime, pool: Pool, owners: dict[str, User], seed: int) -> None:
    """Everything that a simulation came to, as rows; what still runs or waits at its end goes on from there."""
    writer = _Writer(run, begins, now, pool, owners, seed)
    submitted = [job for job in run.jobs.values() if job.attempts or job.state == "waiting"]
    rows = [writer.job(job) for job in submitted]
    copy_in(rows)
    per_job = []
    for job, row in zip(submitted, rows, strict=True):
        eligible, mine = row.submitted_at, []
        for ran in job.attempts:
            mine.append(writer.attempt(job, row, ran, eligible))
            eligible = writer.at(ran.end or 0.0)
        per_job.append((job, row, mine))
    attempts = [attempt for _, _, mine in per_job for attempt in mine]
    copy_in(attempts)
    copy_in([event for job, row, mine in per_job for event in writer.events(job, row, mine)])
    copy_in([allocation for attempt in attempts for allocation in writer.allocations(attempt)])
    copy_in([writer.command(attempt, row) for _, row, mine in per_job for attempt in mine])
    copy_in(
        [
            Mark(attempt=attempt, kind=Mark.Kind.CHECKPOINT, at=attempt.last_checkpoint_at)
            for attempt in attempts
            if attempt.last_checkpoint_at is not None
        ]
    )
    copy_in([sample for attempt in attempts for sample in writer.samples(attempt)])
    copy_in(list(writer.outages()))
    copy_in(list(pool_states(run, writer.at, pool)))
