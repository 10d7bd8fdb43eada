"""Jobs that hold GPUs without using them: warn the owner, count down, then stop or only flag; with a dry run and a
ledger of what was saved."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal

import structlog
from django.core.mail import send_mail
from django.db import connection, transaction

from scheduling.models import Attempt, AttemptState, IdleCase
from scheduling.reports.page import rule
from scheduling.services import clock, states
from scheduling.services.jobs import cancel_job
from teams.actors import Actor

log = structlog.get_logger(__name__)

# An attempt is idle while every device it holds is: the youngest begin of its devices' last idle spans counts, and
# the spans must reach to the present.
_IDLE = """
SELECT t.id, max(lower(s.during)) FROM scheduling_attempt t
JOIN scheduling_allocation a ON a.attempt_id = t.id AND upper_inf(a.during)
JOIN LATERAL (
    SELECT x.during, x.active FROM scheduling_activityspan x WHERE x.allocation_id = a.id
    ORDER BY upper(x.during) DESC LIMIT 1
) AS s ON true
WHERE t.state = 'running'
GROUP BY t.id, t.workers
HAVING bool_and(NOT s.active) AND min(upper(s.during)) >= %s
   AND count(*) = (SELECT count(*) FROM scheduling_allocation b WHERE b.attempt_id = t.id AND upper_inf(b.during))
"""


def watch_idle(now: datetime | None = None) -> dict[str, int]:
    """One pass: open, recover, flag or stop. Returns the number of each. Without a policy (warn after 0) nothing."""
    now = now or clock.now()
    in_force = rule()
    done = {"warned": 0, "recovered": 0, "ended": 0, "flagged": 0, "stopped": 0, "would-stop": 0}
    if not in_force.idle_warn_after:
        return done
    stale = timedelta(seconds=max(300, in_force.idle_window_seconds))
    with connection.cursor() as cursor:
        cursor.execute(_IDLE, [now - stale])
        idle = dict(cursor.fetchall())
    for case in IdleCase.objects.filter(state="open").select_related("attempt"):
        if case.attempt.state == AttemptState.ENDED:
            done[_close(case, "ended", now)] += 1
        elif case.attempt_id not in idle:
            done[_close(case, "recovered", now)] += 1
        elif now >= case.due_at:
            action = (
                "flagged" if in_force.idle_action == "flag" else "would-stop" if in_force.idle_dry_run else "stopped"
            )
            done[_act(case, action, now)] += 1
    known = set(IdleCase.objects.filter(attempt_id__in=idle, state__in=("open", "flagged", "would-stop", "stopped"))
                .values_list("attempt_id", flat=True))  # fmt: skip
    for number, since in idle.items():
        if number not in known and now - since >= timedelta(seconds=in_force.idle_warn_after):
            _warn(number, since, now, timedelta(seconds=in_force.idle_countdown))
            done["warned"] += 1
    return done


def _warn(number: int, since: datetime, now: datetime, countdown: timedelta) -> None:
    attempt = Attempt.objects.select_related("job__owner").get(pk=number)
    with transaction.atomic():
        case = IdleCase.objects.create(
            attempt=attempt, idle_since=since, warned_at=now, due_at=now + countdown, gpus=attempt.gpus
        )
        states.record(
            attempt.job, "idle", at=now, attempt=attempt, actor_label="idle policy",
            reason=f"{attempt.gpus.normalize():f} GPUs without activity since {since:%Y-%m-%d %H:%M}Z; due {case.due_at:%H:%M}Z",
        )  # fmt: skip
    owner = attempt.job.owner
    if owner.email:
        send_mail(
            f"{attempt.job.name} holds GPUs without using them",
            f"Job {attempt.job_id} has shown no activity on its {attempt.gpus.normalize():f} GPUs since"
            f" {since:%Y-%m-%d %H:%M}Z. At {case.due_at:%Y-%m-%d %H:%M}Z the idle policy acts on it.",
            None,
            [owner.email],
            fail_silently=True,
        )


def _close(case: IdleCase, state: str, now: datetime) -> str:
    case.state, case.closed_at = state, now
    case.save(update_fields=["state", "closed_at"])
    return state


@transaction.atomic
def _act(case: IdleCase, action: str, now: datetime) -> str:
    attempt = Attempt.objects.select_for_update().select_related("job", "pool__gpu_model").get(pk=case.attempt_id)
    if attempt.state != AttemptState.RUNNING:
        return _close(case, "ended", now)
    case.saved_gpu_hours, case.saved_money = savings(attempt, now)
    case.state, case.closed_at = action, now
    case.save()
    if action == "stopped":
        cancel_job(actor=Actor.system("idle policy"), job_id=attempt.job_id, reason="no activity on its GPUs")
    else:
        states.record(attempt.job, "idle", at=now, attempt=attempt, actor_label="idle policy", reason=action)
    return action


def savings(attempt: Attempt, now: datetime) -> tuple[Decimal, Decimal]:
    """GPU-hours until the walltime, and their price; without a walltime nothing can be said: zero."""
    walltime = attempt.job.walltime
    if walltime is None:
        return Decimal(0), Decimal(0)
    left = max(timedelta(0), attempt.started_at + walltime - now)
    hours = (attempt.gpus * Decimal(left // timedelta(milliseconds=1)) / 3_600_000).quantize(Decimal("0.001"))
    return hours, (hours * attempt.pool.price).quantize(Decimal("0.01"))
