"""Sending the outbox: each command at least once, each idempotent by the attempt's UUID."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction

from scheduling.backends.base import Backend, BackendError, NotFound, Rejected, Started, Unreachable
from scheduling.engine.retry import Outcome
from scheduling.models import Attempt, AttemptState, Cluster, Command
from scheduling.services import clock
from scheduling.services.clusters import cluster_failed, cluster_seen
from scheduling.services.commands import start_command, stop_command
from scheduling.services.ending import end_attempt
from scheduling.services.registry import backend_for
from scheduling.services.wakeup import wake_cycle, wake_reconcile

log = structlog.get_logger(__name__)

BATCH = 200
#: Longest pause between two tries of one command.
MOST_BACKOFF = timedelta(seconds=60)


@dataclass(slots=True)
class Sent:
    """What came back for one command: a result or a typed error."""

    command: Command
    backend_id: str = ""
    error: BackendError | None = None


def dispatch() -> int:
    """Send what is due, cluster by cluster; returns how many commands were settled."""
    due = Command.objects.filter(state=Command.State.PENDING, due_at__lte=clock.now())
    clusters = Cluster.objects.filter(pk__in=due.values("cluster_id"), enabled=True).order_by("pk")
    return sum(dispatch_cluster(cluster) for cluster in clusters)


def dispatch_cluster(cluster: Cluster, *, backend: Backend | None = None) -> int:
    """Send one cluster's due commands in batches until none is left or it stops answering."""
    settled = 0
    backend = backend or backend_for(cluster)
    while True:
        done, go_on = _batch(cluster, backend)
        settled += done
        if not go_on:
            return settled


def _batch(cluster: Cluster, backend: Backend) -> tuple[int, bool]:
    """One batch in one transaction: its rows stay locked while it is sent, so no other worker sends them too. After a
    crash they are simply sent again."""
    with transaction.atomic():
        rows = list(
            Command.objects.select_for_update(skip_locked=True, of=("self",))
            .filter(cluster=cluster, state=Command.State.PENDING, due_at__lte=clock.now())
            .select_related("attempt")
            .order_by("id")[:BATCH]
        )
        if not rows:
            return 0, False
        to_send = [row for row in rows if not _overtaken(row)]
        answers = _send(cluster, backend, to_send)
        now = clock.now()
        unreachable = None
        for sent in answers:
            if isinstance(sent.error, Unreachable):
                unreachable = sent.error
            _settle(sent, now)
        if unreachable is not None:
            cluster_failed(cluster, str(unreachable), now)
        elif answers:
            cluster_seen(cluster, now)
    wake_reconcile()
    return len(rows), unreachable is None and len(rows) == BATCH


def _overtaken(command: Command) -> bool:
    """A start whose attempt is to stop already is never sent; a stop goes only after its start."""
    attempt = command.attempt
    if command.kind == Command.Kind.START:
        attempt = Attempt.objects.select_for_update().get(pk=command.attempt_id)
        if attempt.state == AttemptState.ENDED:
            _done(command, clock.now())
            return True
        if attempt.state == AttemptState.STOPPING and command.tries == 0:
            now = clock.now()
            outcome = outcome_of_stop(attempt.stop_reason)
            end_attempt(attempt, outcome=outcome, at=now, actor_label="scheduler", detail="stopped before it was sent")
            Command.objects.filter(attempt=attempt, state=Command.State.PENDING).update(
                state=Command.State.DONE, done_at=now
            )
            command.state = Command.State.DONE
            wake_cycle()
            return True
        command.attempt = attempt
        return False
    if attempt.state == AttemptState.ENDED:
        _done(command, clock.now())
        return True
    return Command.objects.filter(
        attempt_id=command.attempt_id, kind=Command.Kind.START, state=Command.State.PENDING
    ).exists()


def outcome_of_stop(reason: str) -> Outcome:
    """How an attempt ends that we stopped."""
    return {"cancel": Outcome.CANCELLED, "idle": Outcome.CANCELLED, "walltime": Outcome.TIMED_OUT}.get(
        reason, Outcome.PREEMPTED
    )


def _send(cluster: Cluster, backend: Backend, rows: list[Command]) -> list[Sent]:
    """The calls themselves, in parallel where the cluster's settings say so; no database in the threads."""
    prepared = [(row, _environment(row) if row.kind == Command.Kind.START else {}) for row in rows]
    parallel = int(cluster.config.get("dispatch_parallel", 1))
    if parallel <= 1:
        answers = []
        for row, environment in prepared:
            answers.append(_call(backend, row, environment))
            if isinstance(answers[-1].error, Unreachable):
                break
        return answers
    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(lambda item: _call(backend, *item), prepared))


def _call(backend: Backend, command: Command, environment: Mapping[str, str]) -> Sent:
    try:
        if command.kind == Command.Kind.START:
            started: Started = backend.start(start_command(command, environment))
            return Sent(command, started.backend_id)
        backend.stop(stop_command(command))
        return Sent(command)
    except BackendError as error:
        return Sent(command, error=error)


def attempt_token(attempt: Attempt) -> str:
    """The attempt's secret. It follows from the UUID, so a start that is sent twice carries the same one both times."""
    digest = hmac.new(settings.SECRET_KEY.encode(), b"attempt:" + attempt.uuid.bytes, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _environment(command: Command) -> dict[str, str]:
    """What a running job is told, with a secret of its own to mark checkpoints and first results."""
    attempt = command.attempt
    token = attempt_token(attempt)
    attempt.token_hash = hashlib.sha256(token.encode()).hexdigest()
    Attempt.objects.filter(pk=attempt.pk).update(token_hash=attempt.token_hash)
    return {
        "GPUPORTAL_ATTEMPT": str(attempt.uuid),
        "GPUPORTAL_JOB_ID": str(attempt.job_id),
        "GPUPORTAL_RESTART_COUNT": str(attempt.number - 1),
        "GPUPORTAL_CHECKPOINT_DIR": f"{settings.GPUPORTAL_CHECKPOINT_ROOT}/{attempt.job_id}",
        "GPUPORTAL_API_URL": settings.GPUPORTAL_PUBLIC_URL,
        "GPUPORTAL_TOKEN": token,
    }


def _done(command: Command, now: datetime) -> None:
    command.state, command.done_at = Command.State.DONE, now
    command.save(update_fields=["state", "done_at"])


def _settle(sent: Sent, now: datetime) -> None:
    command, error = sent.command, sent.error
    command.tries += 1
    if error is None:
        command.last_error = ""
        _done_with_tries(command, now)
        if command.kind == Command.Kind.START:
            Attempt.objects.filter(pk=command.attempt_id).update(backend_id=sent.backend_id[:100], seen_at=now)
        return
    command.last_error = str(error)[:1000]
    if isinstance(error, Unreachable):
        pause = min(MOST_BACKOFF, timedelta(seconds=2.0 ** min(command.tries - 1, 10)))
        command.due_at = now + pause
        command.save(update_fields=["tries", "last_error", "due_at"])
        return
    if isinstance(error, NotFound) and command.kind == Command.Kind.STOP:
        _done_with_tries(command, now)  # reconcile finds out what became of it
        return
    command.state, command.done_at = Command.State.FAILED, now
    command.save(update_fields=["state", "done_at", "tries", "last_error"])
    log.warning("dispatch.failed", attempt=str(command.attempt.uuid), kind=command.kind, error=command.last_error)
    if command.kind == Command.Kind.START and isinstance(error, Rejected | NotFound):
        attempt = Attempt.objects.select_for_update().get(pk=command.attempt_id)
        if attempt.state != AttemptState.ENDED:
            end_attempt(
                attempt,
                outcome=Outcome.FAILED,
                at=now,
                actor_label=f"cluster {command.cluster.name}",
                cause="rejected",
                detail=str(error),
            )
            wake_cycle()


def _done_with_tries(command: Command, now: datetime) -> None:
    command.state, command.done_at = Command.State.DONE, now
    command.save(update_fields=["state", "done_at", "tries", "last_error"])
