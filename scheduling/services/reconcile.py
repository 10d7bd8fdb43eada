"""What the cluster reports wins over what the ledger believed; each correction is recorded.

``observe`` is called without a transaction; each report is then applied in one of its own, on the locked row, so that a
report which comes late or twice changes nothing the second time.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from uuid import UUID

import structlog
from django.db import transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.backends.base import (
    Backend,
    BackendError,
    NodeCondition,
    NodeReport,
    NotFound,
    Observation,
    RunReport,
    RunState,
    StopCommand,
    Unreachable,
)
from scheduling.engine.retry import Outcome
from scheduling.models import (
    Attempt,
    AttemptState,
    Cluster,
    Command,
    Drift,
    Job,
    Mark,
    Node,
    NodeInterval,
)
from scheduling.services import clock, states
from scheduling.services.clusters import cluster_failed, cluster_seen
from scheduling.services.devices import believed_devices, follow_devices
from scheduling.services.dispatch import outcome_of_stop
from scheduling.services.ending import end_attempt
from scheduling.services.registry import backend_for
from scheduling.services.telemetry import store_samples
from scheduling.services.wakeup import wake_cycle

log = structlog.get_logger(__name__)

#: A started attempt that the cluster does not list for so long is lost.
LOST_AFTER = timedelta(seconds=60)
#: Past its walltime by so much without the cluster ending it, an attempt is stopped by us.
WALLTIME_SLACK = timedelta(minutes=5)

_OUTCOMES = {
    RunState.SUCCEEDED: Outcome.SUCCEEDED,
    RunState.FAILED: Outcome.FAILED,
    RunState.TIMED_OUT: Outcome.TIMED_OUT,
    RunState.NODE_FAILED: Outcome.NODE_FAILED,
    RunState.PREEMPTED: Outcome.PREEMPTED,
    RunState.REQUEUED: Outcome.PREEMPTED,
}


def reconcile() -> int:
    """All enabled clusters; returns how many rows were corrected or brought on."""
    return sum(reconcile_cluster(cluster) for cluster in Cluster.objects.filter(enabled=True).order_by("pk"))


def reconcile_cluster(cluster: Cluster, *, backend: Backend | None = None) -> int:
    """Ask one cluster and apply what it says."""
    attempts = {
        attempt.uuid: attempt.pk
        for attempt in Attempt.objects.filter(pool__cluster=cluster).exclude(state=AttemptState.ENDED)
    }
    asked_at = clock.now()
    try:
        backend = backend or backend_for(cluster)
        seen = backend.observe(cluster.observed_until, list(attempts))
    except BackendError as error:
        cluster_failed(cluster, str(error), asked_at)
        return 0
    cluster_seen(cluster, clock.now())
    changed = _nodes(cluster, seen.nodes, asked_at)
    # What has ended first: others may be on its devices by now.
    runs = sorted(seen.runs, key=lambda report: not report.state.final)
    changed += sum(_apply(cluster, backend, report, attempts.get(report.attempt)) for report in runs)
    if seen.complete:
        changed += _missing(cluster, seen, attempts, asked_at)
    _overdue(cluster)
    store_samples(cluster, seen.samples)
    if seen.cursor != cluster.observed_until:
        Cluster.objects.filter(pk=cluster.pk).update(observed_until=seen.cursor[:200])
    if changed:
        wake_cycle()
    return changed


# -- attempts --------------------------------------------------------------------------------------------------


def _apply(cluster: Cluster, backend: Backend, report: RunReport, attempt_id: int | None) -> int:
    if attempt_id is None:
        return _stray(cluster, backend, report)
    with transaction.atomic():
        attempt = Attempt.objects.select_for_update(of=("self",)).select_related("job").filter(pk=attempt_id).first()
        if attempt is None or attempt.state == AttemptState.ENDED:
            return 0
        now = clock.now()
        changed = _marks(attempt, report)
        attempt.seen_at = now
        if report.backend_id and report.backend_id != attempt.backend_id:
            attempt.backend_id = report.backend_id[:100]
        if report.devices is not None:
            changed += _devices(cluster, attempt, report)
        if report.state.final:
            _end(cluster, attempt, report, now)
            return 1
        if attempt.state == AttemptState.STARTING and report.state in (RunState.RUNNING, RunState.STOPPING):
            at = min(now, max(report.started_at or now, attempt.started_at))
            states.move_attempt(attempt, AttemptState.RUNNING, at=at, actor_label=f"cluster {cluster.name}")
            return 1
        attempt.save(update_fields=["seen_at", "backend_id", "last_checkpoint_at"])
        return changed


def _end(cluster: Cluster, attempt: Attempt, report: RunReport, now: datetime) -> None:
    outcome = _OUTCOMES.get(report.state)
    cause = report.cause.value
    stopped = attempt.state == AttemptState.STOPPING
    if outcome is None or (stopped and outcome in (Outcome.FAILED, Outcome.PREEMPTED)):
        outcome = outcome_of_stop(attempt.stop_reason) if stopped else Outcome.CANCELLED
        cause = {Outcome.PREEMPTED: "preemption", Outcome.TIMED_OUT: "walltime"}.get(outcome, "")
    if report.state is RunState.REQUEUED:
        _drift(cluster, "requeued", attempt, "running", "requeued by the cluster", "cancelled there, queued again here")
    failed: Iterable[int] = ()
    if outcome is Outcome.NODE_FAILED:
        named = Node.objects.filter(
            pk__in={row[0] for row in attempt.placement}, state="down", retired_at=None
        ).values_list("pk", flat=True)
        failed = list(named)
    end_attempt(
        attempt,
        outcome=outcome,
        at=min(now, report.ended_at or now),
        actor_label=f"cluster {cluster.name}",
        exit_code=report.exit_code,
        cause=cause,
        detail=report.detail,
        failed_nodes=failed,
    )


def _marks(attempt: Attempt, report: RunReport) -> int:
    """Checkpoints and first results that the cluster knows of."""
    changed = 0
    checkpoint = report.last_checkpoint_at
    if checkpoint is not None and (attempt.last_checkpoint_at is None or checkpoint > attempt.last_checkpoint_at):
        attempt.last_checkpoint_at = checkpoint
        Mark.objects.create(attempt=attempt, kind=Mark.Kind.CHECKPOINT, at=checkpoint)
        changed = 1
    if report.first_result_at is not None and attempt.job.first_result_at is None:
        Job.objects.filter(pk=attempt.job_id, first_result_at=None).update(first_result_at=report.first_result_at)
        attempt.job.first_result_at = report.first_result_at
        Mark.objects.create(attempt=attempt, kind=Mark.Kind.FIRST_RESULT, at=report.first_result_at)
    return changed


def _devices(cluster: Cluster, attempt: Attempt, report: RunReport) -> int:
    """The cluster chose other devices than the ledger has (Slurm always does): the ledger follows, which is no drift."""
    assert report.devices is not None
    believed = believed_devices(attempt)
    now = clock.now()
    if not follow_devices(attempt, report.devices, min(now, report.ended_at or now), started=report.started_at):
        return 0
    told = {node: set(indices) for node, indices in report.devices.items()}
    log.info("devices", attempt=str(attempt.uuid), ledger=_text(believed), cluster=_text(told))
    return 1


def _text(devices: dict[str, set[int]]) -> str:
    return ", ".join(f"{node}: {sorted(indices)}" for node, indices in sorted(devices.items()))


def _stray(cluster: Cluster, backend: Backend, report: RunReport) -> int:
    """The cluster runs an attempt that the ledger has closed, or never knew: it is stopped there."""
    if report.state.final:
        return 0
    attempt = Attempt.objects.filter(uuid=report.attempt, state=AttemptState.ENDED).first()
    if attempt is None and Attempt.objects.filter(uuid=report.attempt).exists():
        return 0  # began after we asked
    known = Drift.objects.filter(cluster=cluster, kind="unknown-job", subject=str(report.attempt), resolved_at=None)
    try:
        backend.stop(StopCommand(report.attempt, timedelta(0), "not in the ledger", report.backend_id))
        action = "stopped on the cluster"
    except (Unreachable, NotFound) as error:
        action = f"could not be stopped yet: {error}"
    if not known.exists():
        _drift(cluster, "unknown-job", attempt, "ended" if attempt else "unknown", report.state.value, action)
    return 1


def _missing(cluster: Cluster, seen: Observation, attempts: dict[UUID, int], asked_at: datetime) -> int:
    """Attempts that a complete answer does not mention: lost, after a while."""
    told = {report.attempt for report in seen.runs}
    gone = [number for uuid, number in attempts.items() if uuid not in told]
    lost = 0
    for number in gone:
        with transaction.atomic():
            attempt = Attempt.objects.select_for_update().filter(pk=number).first()
            if attempt is None or attempt.state == AttemptState.ENDED:
                continue
            start = Command.objects.filter(attempt=attempt, kind=Command.Kind.START).first()
            if start is None or start.state != Command.State.DONE or start.done_at is None:
                continue  # not sent yet
            since = max(filter(None, (attempt.seen_at, start.done_at)))
            if asked_at - since < LOST_AFTER:
                continue
            _drift(cluster, "missing", attempt, attempt.state, "not there", "closed as lost")
            stopped = attempt.state == AttemptState.STOPPING
            end_attempt(
                attempt,
                outcome=outcome_of_stop(attempt.stop_reason) if stopped else Outcome.LOST,
                at=since,
                actor_label=f"cluster {cluster.name}",
                cause="preemption" if stopped else "node",
                detail="the cluster knows this attempt no longer",
            )
            lost += 1
    return lost


def _overdue(cluster: Cluster) -> None:
    """The cluster should have ended these at their walltime."""
    now = clock.now()
    rows = Attempt.objects.filter(
        pool__cluster=cluster, state=AttemptState.RUNNING, job__walltime__isnull=False, running_at__isnull=False
    ).select_related("job")
    for row in rows.extra(
        where=["scheduling_attempt.running_at + scheduling_job.walltime < %s"], params=[now - WALLTIME_SLACK]
    ):
        request_stop(row.pk, reason="walltime", actor_label=states.SCHEDULER, detail="past its walltime")


def request_stop(attempt_id: int, *, reason: str, actor_label: str, detail: str) -> bool:
    """Tell an attempt to end, with its grace; False when it is ending already."""
    from scheduling.services.commands import stop_payload
    from scheduling.services.wakeup import wake_dispatch

    with transaction.atomic():
        attempt = Attempt.objects.select_for_update(of=("self",)).select_related("job", "pool").get(pk=attempt_id)
        if attempt.state not in (AttemptState.STARTING, AttemptState.RUNNING):
            return False
        now = clock.now()
        attempt.stop_requested_at, attempt.stop_reason = now, reason
        attempt.stop_by = now + attempt.job.grace
        states.move_attempt(attempt, AttemptState.STOPPING, at=now, actor_label=actor_label, reason=detail)
        Command.objects.create(
            cluster_id=attempt.pool.cluster_id,
            attempt=attempt,
            kind=Command.Kind.STOP,
            payload=stop_payload(attempt.job.grace, reason),
            created_at=now,
            due_at=now,
        )
        wake_dispatch()
        wake_cycle()
    return True


def _drift(
    cluster: Cluster, kind: str, attempt: Attempt | None, ledger_said: str, cluster_said: str, action: str
) -> None:
    now = clock.now()
    subject = str(attempt.uuid) if attempt is not None else "unknown attempt"
    Drift.objects.create(
        cluster=cluster,
        at=now,
        kind=kind,
        attempt=attempt,
        subject=subject,
        ledger_said=ledger_said[:300],
        cluster_said=cluster_said[:300],
        action=action[:300],
        resolved_at=now,
    )
    if attempt is not None:
        states.record(
            attempt.job,
            "drift",
            at=now,
            actor_label=f"cluster {cluster.name}",
            attempt=attempt,
            reason=f"ledger: {ledger_said}; cluster: {cluster_said}; {action}",
        )
    log.warning("drift", cluster=cluster.name, kind=kind, subject=subject, action=action)


# -- nodes -----------------------------------------------------------------------------------------------------


def _nodes(cluster: Cluster, reports: Iterable[NodeReport], at: datetime) -> int:
    """States of nodes, with their history: down time is part of every report."""
    rows = {node.name: node for node in Node.objects.filter(cluster=cluster, retired_at=None)}
    changed = 0
    seen = []
    for report in reports:
        node = rows.get(report.name)
        if node is None:
            continue
        state = report.condition.value
        if node.drained_by_portal and report.condition is NodeCondition.UP:
            state = "drained"
        seen.append(node.pk)
        if state != node.state:
            set_node_state(node, state, at, reason=report.reason, actor_label=f"cluster {cluster.name}")
            changed += 1
    Node.objects.filter(pk__in=seen).update(state_seen_at=at)
    return changed


@transaction.atomic
def set_node_state(node: Node, state: str, at: datetime, *, reason: str, actor_label: str) -> None:
    """Change a node's state: the interval that runs is closed, a new one opened unless it is up again."""
    open_rows = NodeInterval.objects.select_for_update().filter(node=node, during__endswith=None)
    for row in open_rows:
        begins = row.during.lower
        if begins >= at:
            row.delete()
        else:
            row.during = DateTimeTZRange(begins, at, "[)")
            row.save(update_fields=["during"])
    if state != "up":
        NodeInterval.objects.create(
            node=node,
            state=state,
            during=DateTimeTZRange(at, None, "[)"),
            reason=reason[:300],
            actor_label=actor_label[:200],
        )
    Node.objects.filter(pk=node.pk).update(state=state, state_reason=reason[:300], state_seen_at=at)
    node.state, node.state_reason = state, reason
