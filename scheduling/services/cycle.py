"""One pass of the scheduling loop: take the lock, load, plan, write everything in one transaction.

Decisions, attempts, allocations and the commands for the clusters are committed together or not at all. What changed
since it was read (a job cancelled, an attempt ended) is dropped from the plan; the next pass decides anew.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace

import structlog
from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.engine.decisions import Evict, EvictionReason, NewHold, Plan, Start
from scheduling.engine.plan import plan
from scheduling.models import (
    GPU,
    Allocation,
    Attempt,
    AttemptState,
    Command,
    Cycle,
    Decision,
    Estimate,
    Hold,
    Job,
    JobEvent,
    JobState,
    Node,
    Pool,
    Reservation,
)
from scheduling.services import clock, states
from scheduling.services.amounts import device_indices, gpus, placement_json
from scheduling.services.commands import start_payload, stop_payload
from scheduling.services.reasons import store_reasons
from scheduling.services.replay import decisions_hash, pack
from scheduling.services.snapshot import Loaded, load
from scheduling.services.usage import store_usage
from scheduling.services.wakeup import wake_dispatch

log = structlog.get_logger(__name__)

#: Key of the advisory lock: one cycle at a time, for all clusters together. It ends with its transaction, so a dead
#: worker cannot keep it.
LOCK = 0x67707570

#: Passes in one call while each still decides something.
MOST_PASSES = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call of ``run_cycle`` came to."""

    passes: int
    starts: int
    evictions: int
    #: Seconds until the engine wants to be asked again; ``None`` = only after an event.
    wake_in: float | None
    locked_out: bool = False


def run_cycle(*, asked_at: float | None = None) -> Outcome:
    """Pass after pass until nothing changes. ``asked_at`` (POSIX seconds): a wake-up older than the latest cycle has
    been served already and is skipped."""
    if asked_at is not None and _served(asked_at):
        return Outcome(0, 0, 0, None)
    starts = evictions = 0
    wake_in: float | None = None
    for number in range(1, MOST_PASSES + 1):
        result = _one_pass(first=number == 1)
        if result is None:
            return Outcome(number - 1, starts, evictions, None, locked_out=True)
        changed, done, wake_in = result
        starts += done.starts
        evictions += done.evictions
        if not changed:
            return Outcome(number, starts, evictions, wake_in)
    return Outcome(MOST_PASSES, starts, evictions, wake_in)


def _served(asked_at: float) -> bool:
    latest = Cycle.objects.order_by("-id").values_list("started_at", flat=True).first()
    return latest is not None and latest.timestamp() > asked_at + 0.5


def _one_pass(*, first: bool) -> tuple[bool, Cycle, float | None] | None:
    """``None`` when somebody else is at it."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [LOCK])
            if not cursor.fetchone()[0]:
                return None
        began = time.monotonic()
        now = clock.now()
        loaded = load(now)
        loaded_at = time.monotonic()
        decided = plan(loaded.snapshot)
        planned_at = time.monotonic()
        cycle = Cycle(
            started_at=now,
            load_ms=(loaded_at - began) * 1000,
            plan_ms=(planned_at - loaded_at) * 1000,
            waiting=len(loaded.snapshot.waiting),
            running=len(loaded.snapshot.running),
        )
        changed = _Commit(cycle, loaded, decided).write(refresh=first)
        cycle.commit_ms = (time.monotonic() - planned_at) * 1000
        cycle.finished_at = clock.now()
        cycle.save()
    wake_in = None if decided.wake_at is None else max(0.0, decided.wake_at - clock.seconds(now))
    if changed:
        log.info("cycle", cycle=cycle.pk, starts=cycle.starts, evictions=cycle.evictions, waiting=cycle.waiting)
    return changed, cycle, wake_in


class _Commit:
    """Writes one plan."""

    def __init__(self, cycle: Cycle, loaded: Loaded, decided: Plan) -> None:
        self.cycle, self.loaded, self.plan = cycle, loaded, decided
        self.now = loaded.now
        self.events: list[JobEvent] = []
        self.decisions: list[Decision] = []
        self.commands: list[Command] = []
        self.jobs: dict[int, Job] = {}
        self.attempts: dict[int, Attempt] = {}

    def write(self, *, refresh: bool) -> bool:
        """Returns whether anything was decided. Everything or nothing: the caller's transaction."""
        asked = self.plan
        self._lock_rows()
        self.plan = self._still_valid()
        decided = bool(self.plan.starts or self.plan.evictions or self.plan.holds or self.plan.released)
        self.cycle.starts, self.cycle.evictions = len(self.plan.starts), len(self.plan.evictions)
        if decided:
            self.cycle.snapshot = pack(self.loaded.snapshot)
            self.cycle.plan_hash = decisions_hash(asked)
        self.cycle.save()
        if decided:
            self._release()
            self._start()
            self._evict()
            self._hold()
            states.save_all(self.events)
            Decision.objects.bulk_create(self.decisions, batch_size=1000)
            Command.objects.bulk_create(self.commands, batch_size=1000)
            wake_dispatch()
        if decided or refresh:
            self._reserve()
            self._explain()
            store_usage(self.loaded.usage, self.now)
            self._growable()
        return decided

    # -- what still holds --------------------------------------------------------------------------------------

    def _lock_rows(self) -> None:
        wanted = {start.job for start in self.plan.starts} | {hold.job for hold in self.plan.holds}
        rows = Job.objects.select_for_update(of=("self",), skip_locked=True).filter(pk__in=wanted)
        self.jobs = {job.pk: job for job in rows.select_related("owner", "team").order_by("pk")}
        victims = {eviction.attempt for eviction in self.plan.evictions}
        held = Attempt.objects.select_for_update(of=("self",), skip_locked=True).filter(pk__in=victims)
        self.attempts = {row.pk: row for row in held.select_related("pool", "job").order_by("pk")}

    def _unchanged(self, job_id: int) -> bool:
        job = self.jobs.get(job_id)
        return job is not None and job.state == JobState.WAITING and job.version == self.loaded.versions.get(job_id)

    def _still_valid(self) -> Plan:
        """The plan without what has changed since it was made: an eviction goes with the job it was for."""
        alive = {
            number
            for number, row in self.attempts.items()
            if row.state in (AttemptState.STARTING, AttemptState.RUNNING)
        }
        evictions = tuple(
            eviction
            for eviction in self.plan.evictions
            if eviction.attempt in alive
            and (eviction.for_job is None or self._unchanged(eviction.for_job) or eviction.for_job in self._moving())
        )
        evicted = {eviction.attempt for eviction in evictions}
        holds = tuple(
            hold
            for hold in self.plan.holds
            if set(hold.victims) <= evicted and (self._unchanged(hold.job) or hold.job in self._moving())
        )
        kept = {hold.job for hold in holds}
        evictions = tuple(
            e for e in evictions if e.for_job is None or e.for_job in kept or e.reason is EvictionReason.RESERVATION
        )
        starts = tuple(start for start in self.plan.starts if self._unchanged(start.job))
        return replace(self.plan, starts=starts, evictions=evictions, holds=holds)

    def _moving(self) -> set[int]:
        """Jobs whose own attempt is stopped to go on elsewhere or in another size."""
        return {
            self.loaded.attempt_jobs[eviction.attempt] for eviction in self.plan.evictions if eviction.continue_workers
        }

    # -- writing -----------------------------------------------------------------------------------------------

    def _release(self) -> None:
        for hold in Hold.objects.filter(job_id__in=self.plan.released).select_related("job"):
            self.decisions.append(self._decision(Decision.Kind.RELEASE, hold.job_id, "4.8: lapsed or not needed"))
            hold.delete()

    def _decision(self, kind: str, job_id: int, because: str, **data: object) -> Decision:
        return Decision(cycle=self.cycle, kind=kind, job_id=job_id, at=self.now, because=because[:1000], data=data)

    def _start(self) -> None:
        starts = self.plan.starts
        if not starts:
            return
        numbers = _last_numbers([start.job for start in starts])
        devices = _devices({slot.node for start in starts for slot in start.placement})
        pools = _pools({start.pool for start in starts})
        nodes = _node_names({slot.node for start in starts for slot in start.placement})
        attempts = [self._attempt(start, numbers.get(start.job, 0) + 1) for start in starts]
        Attempt.objects.bulk_create(attempts, batch_size=1000)
        allocations: list[Allocation] = []
        for start, attempt in zip(starts, attempts, strict=True):
            job = self.jobs[start.job]
            allocations += self._allocations(start, attempt, devices)
            because = start.because
            self.events.append(
                states.move_job(job, JobState.RUNNING, at=self.now, reason=because, save=False, attempt=attempt.number)
            )
            job.reason_group = None
            decision = self._decision(
                Decision.Kind.START, job.pk, because, placement=attempt.placement, filler=start.filler
            )
            decision.attempt = attempt
            self.decisions.append(decision)
            payload = start_payload(attempt, job, pools[start.pool], nodes)
            self.commands.append(
                Command(
                    cluster_id=pools[start.pool].cluster_id,
                    attempt=attempt,
                    kind=Command.Kind.START,
                    payload=payload,
                    created_at=self.now,
                    due_at=self.now,
                )
            )
        Allocation.objects.bulk_create(allocations, batch_size=2000)
        Job.objects.bulk_update(
            [self.jobs[start.job] for start in starts],
            ["state", "version", "first_started_at", "reason_group"],
            batch_size=1000,
        )
        started = [start.job for start in starts]
        Hold.objects.filter(job_id__in=started).delete()
        Reservation.objects.filter(job_id__in=started).delete()
        Estimate.objects.filter(job_id__in=started, started_at=None).update(started_at=self.now)

    def _attempt(self, start: Start, number: int) -> Attempt:
        job = self.jobs[start.job]
        amount = sum(slot.devices.bit_count() * slot.share for slot in start.placement)
        return Attempt(
            uuid=uuid.uuid4(),
            job=job,
            team_id=job.team_id,
            pool_id=start.pool,
            number=number,
            workers=start.workers,
            gpus=gpus(amount),
            placement=placement_json(start.placement),
            filler=start.filler,
            filler_until=None if start.filler_until is None else clock.instant(start.filler_until),
            started_at=self.now,
            eligible_at=job.eligible_at,
        )

    def _allocations(self, start: Start, attempt: Attempt, devices: dict[tuple[int, int], int]) -> Iterable[Allocation]:
        during = DateTimeTZRange(self.now, None, "[)")
        for slot in start.placement:
            for index in device_indices(slot.devices):
                yield Allocation(
                    attempt=attempt,
                    gpu_id=devices[slot.node, index],
                    team_id=attempt.team_id,
                    pool_id=attempt.pool_id,
                    share=gpus(slot.share),
                    during=during,
                )

    def _evict(self) -> None:
        for eviction in self.plan.evictions:
            self._stop(eviction)
        Attempt.objects.bulk_update(
            [self.attempts[eviction.attempt] for eviction in self.plan.evictions],
            ["state", "stop_requested_at", "stop_by", "stop_reason", "evicted_for", "continue_workers"],
            batch_size=1000,
        )

    def _stop(self, eviction: Evict) -> None:
        attempt = self.attempts[eviction.attempt]
        self.events.append(
            states.move_attempt(
                attempt,
                AttemptState.STOPPING,
                at=self.now,
                reason=f"{eviction.reason}: {eviction.because}",
                save=False,
                for_job=eviction.for_job,
                lost_gpu_seconds=eviction.lost_work,
            )
        )
        attempt.stop_requested_at = self.now
        attempt.stop_by = clock.instant(eviction.free_at)
        attempt.stop_reason = eviction.reason.value
        attempt.evicted_for_id = eviction.for_job
        attempt.continue_workers = eviction.continue_workers or None
        decision = self._decision(
            Decision.Kind.EVICT,
            attempt.job_id,
            eviction.because,
            reason=eviction.reason.value,
            for_job=eviction.for_job,
            lost_gpu_seconds=eviction.lost_work,
            continue_workers=eviction.continue_workers,
        )
        decision.attempt = attempt
        self.decisions.append(decision)
        self.commands.append(
            Command(
                cluster_id=attempt.pool.cluster_id,
                attempt=attempt,
                kind=Command.Kind.STOP,
                payload=stop_payload(attempt.job.grace, eviction.reason.value),
                created_at=self.now,
                due_at=self.now,
            )
        )

    def _hold(self) -> None:
        for hold in self.plan.holds:
            Hold.objects.update_or_create(
                job_id=hold.job,
                defaults={
                    "pool_id": hold.pool,
                    "placement": placement_json(hold.placement),
                    "workers": hold.workers,
                    "victims": list(hold.victims),
                    "made_at": self.now,
                    "expires_at": clock.instant(hold.expires),
                },
            )
            self.decisions.append(self._hold_decision(hold))

    def _hold_decision(self, hold: NewHold) -> Decision:
        return self._decision(
            Decision.Kind.HOLD,
            hold.job,
            "4.8: capacity held until its victims have gone",
            placement=placement_json(hold.placement),
            victims=list(hold.victims),
            until=clock.instant(hold.expires).isoformat(),
        )

    # -- what people see ---------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Reservations as of this cycle: the old ones go, with their jobs or without."""
        wanted = {row.job: row for row in self.plan.reservations}
        Reservation.objects.exclude(job_id__in=wanted).delete()
        alive = set(Job.objects.filter(pk__in=wanted, state=JobState.WAITING).values_list("pk", flat=True))
        Reservation.objects.bulk_create(
            [
                Reservation(
                    job_id=row.job,
                    pool_id=row.pool,
                    placement=placement_json(row.placement),
                    starts_at=clock.instant(row.at),
                    cycle=self.cycle,
                )
                for number, row in sorted(wanted.items())
                if number in alive
            ],
            update_conflicts=True,
            unique_fields=["job"],
            update_fields=["pool", "placement", "starts_at", "cycle"],
        )

    def _explain(self) -> None:
        team_of = {job.id: job.team for job in self.loaded.snapshot.waiting}
        store_reasons(self.plan.blocked, team_of, self.loaded.groups, self.now, self.cycle, self.plan.shares)

    def _growable(self) -> None:
        since = self.plan.growable_since
        before = self.loaded.snapshot.growable_since
        for number in set(since) | set(before):
            if since.get(number) != before.get(number):
                at = since.get(number)
                Attempt.objects.filter(pk=number).update(growable_since=None if at is None else clock.instant(at))


def _last_numbers(job_ids: list[int]) -> dict[int, int]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT job_id, max(number) FROM scheduling_attempt WHERE job_id = ANY(%s) GROUP BY job_id", [job_ids]
        )
        return dict(cursor.fetchall())


def _devices(node_ids: set[int]) -> dict[tuple[int, int], int]:
    """(node id, index) -> GPU id of the devices that exist now."""
    rows = GPU.objects.filter(node_id__in=node_ids, exists__endswith=None).values_list("node_id", "index", "id")
    return {(node, index): number for node, index, number in rows}


def _pools(pool_ids: set[int]) -> dict[int, Pool]:
    return {pool.pk: pool for pool in Pool.objects.filter(pk__in=pool_ids).select_related("gpu_model")}


def _node_names(node_ids: set[int]) -> dict[int, str]:
    return dict(Node.objects.filter(pk__in=node_ids).values_list("pk", "name"))
