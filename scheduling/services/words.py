"""What is said about a happening: a line and a few words for people, data for programs."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings

from scheduling.models import Event, Happening, Job, JobEvent

_WHY_EVICTED = {
    "reclaim": "Its GPUs were taken back for a team that is entitled to them.",
    "preemption": "A job of higher priority in the team needed its GPUs.",
    "reservation": "It ran on GPUs that were promised to another job, which is due now.",
    "consolidation": "It was moved to make room for a larger job.",
    "shrink": "Some of its workers were taken back for a team that is entitled to them.",
}


@dataclass(frozen=True, slots=True)
class Words:
    """For the inbox and mails. ``path`` leads there within the portal."""

    title: str
    text: str
    path: str


def harmless(text: str) -> str:
    """One line in which control characters and direction overrides do nothing."""
    flat = " ".join(text.split())
    return "".join("\ufffd" if unicodedata.category(sign) in ("Cc", "Cf") else sign for sign in flat)


def duration(span: timedelta) -> str:
    minutes = round(span.total_seconds() / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h" if minutes < 2880 else f"{minutes // 1440} d"


def words_of(row: Happening) -> Words:
    """What a person reads. ``job_event`` is loaded with its job and attempt."""
    if row.job_event is None:
        return _other_words(row)
    change, job = row.job_event, row.job_event.job
    name = f"Job {job.pk} · {harmless(job.name)}"
    title, text = {
        Event.JOB_STARTED: lambda: (f"{name} started", f"Attempt {change.data.get('attempt', 1)} of team {job.team}."),
        Event.JOB_ENDED: lambda: (f"{name} {_ended(change)}", harmless(change.reason)),
        Event.JOB_FAILED: lambda: (f"{name} {_failed(change)}", harmless(change.reason)),
        Event.JOB_EVICTED: lambda: (f"{name} was evicted", _evicted(change)),
        Event.JOB_WAITING_LONG: lambda: (f"{name} has waited for {change.data['waited']}", harmless(change.reason)),
    }[Event(row.event)]()
    return Words(title[:300], text[:2000], f"/jobs/{job.pk}/")


def _ended(change: JobEvent) -> str:
    return "succeeded" if change.to_state == "succeeded" else "was cancelled"


def _failed(change: JobEvent) -> str:
    return {"failed": "failed", "timed_out": "ran out of its walltime"}.get(change.to_state, "was given up")


def _evicted(change: JobEvent) -> str:
    attempt = change.attempt
    assert attempt is not None
    why = _WHY_EVICTED.get(attempt.stop_reason, "The cluster stopped it.")
    lost = attempt.lost_gpu_seconds / 3600
    return f"{why} {lost:.2f} GPU-hours of work were lost. It waits again at its old place."


def _other_words(row: Happening) -> Words:
    data = row.data
    if row.event == Event.WEBHOOK_DISABLED:
        title = f"Webhook {harmless(data['name'])} was switched off"
        return Words(title[:300], harmless(data["reason"]), f"/webhooks/{data['webhook']}/")
    used = f"{data['spent']} of {data['amount']} {data['unit']} are spent in the period up to {data['ends'][:10]}."
    if row.event == Event.BUDGET_WARNING:
        title = f"Team {row.team} has used {data['percent']} % of its budget"
        return Words(title, used, "")
    then = " No new job of the team starts until then." if data["blocks"] else " Jobs go on starting."
    return Words(f"Team {row.team} has used up its budget", used + then, "")


def data_of(row: Happening) -> dict[str, Any]:
    """What a program reads: the facts as of the happening, not as of now."""
    team = row.team.name if row.team is not None else None
    if row.job_event is None:
        return {"team": team, **row.data}
    change, job = row.job_event, row.job_event.job
    found: dict[str, Any] = {"job": _job(job, change), "team": team, "reason": change.reason}
    if "waited_seconds" in change.data:
        found["waited_seconds"] = change.data["waited_seconds"]
    if change.attempt is not None:
        attempt = change.attempt
        found["attempt"] = {
            "uuid": str(attempt.uuid),
            "number": attempt.number,
            "outcome": change.data.get("outcome", ""),
            "exit_code": change.data.get("exit_code"),
            "cause": change.data.get("cause", ""),
            "stop_reason": attempt.stop_reason,
            "lost_gpu_seconds": change.data.get("lost_gpu_seconds", 0),
        }
    return found


def _job(job: Job, change: JobEvent) -> dict[str, Any]:
    state = change.to_state if change.kind == "state" else "waiting"
    return {
        "id": job.pk,
        "name": job.name,
        "owner": job.owner.username,
        "state": state,
        "array_id": job.array_id,
        "submitted_at": job.submitted_at.isoformat(),
        "url": f"{settings.GPUPORTAL_PUBLIC_URL}/jobs/{job.pk}/",
    }
