"""What people and programs may hear of: put into the outbox with the change itself, told a moment later.

``services/states.py`` passes every change of a job through ``note``. It costs nothing while nobody listens to an event,
and one insert for a batch of changes when somebody does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from scheduling.models import AttemptState, Channel, Event, Happening, JobEvent, JobState, Outcome, Preference, Webhook
from scheduling.services.wakeup import wake_tell
from teams.models import Team

#: Kind of the job event that says that a job has waited for long.
LONG_WAIT = "waiting-long"

#: How people hear of an event who have chosen nothing: quiet.
DEFAULTS: Mapping[str, str] = {
    Event.JOB_STARTED: Channel.OFF,
    Event.JOB_ENDED: Channel.OFF,
    Event.JOB_FAILED: Channel.INBOX,
    Event.JOB_EVICTED: Channel.INBOX,
    Event.JOB_WAITING_LONG: Channel.INBOX,
    Event.BUDGET_WARNING: Channel.INBOX,
    Event.BUDGET_EXHAUSTED: Channel.INBOX,
    Event.WEBHOOK_DISABLED: Channel.INBOX,
}

#: Seconds for which this process remembers what is listened to: a new listener hears of what happens after that.
MEMORY = 2.0


class _Heard:
    """What somebody listens to, as last asked."""

    events: frozenset[str] = frozenset()
    until = 0.0


def forget_listeners() -> None:
    """Somebody began or ceased to listen: ask again."""
    _Heard.until = 0.0


def listened_to() -> frozenset[str]:
    """Events that some webhook or person wants to hear of."""
    if time.monotonic() >= _Heard.until:
        by_default = {event for event, channel in DEFAULTS.items() if channel != Channel.OFF}
        wanted = Preference.objects.exclude(channel=Channel.OFF).exclude(event__in=by_default).values_list("event")
        hooked = Webhook.objects.filter(enabled=True).values_list("events", flat=True)
        _Heard.events = frozenset(by_default.union(*hooked, (row[0] for row in wanted.distinct())))
        _Heard.until = time.monotonic() + MEMORY
    return _Heard.events


def event_of(change: JobEvent) -> str | None:
    """The public event that a change of a job or attempt is, if any. Asks nothing of the database."""
    if change.kind == LONG_WAIT:
        return Event.JOB_WAITING_LONG
    if change.kind == "attempt":
        attempt = change.attempt
        evicted = change.to_state == AttemptState.ENDED and change.data.get("outcome") == Outcome.PREEMPTED
        # Moved or resized, it goes on at once: that is no eviction.
        return Event.JOB_EVICTED if evicted and attempt is not None and not attempt.continue_workers else None
    if change.kind != "state":
        return None
    if change.to_state == JobState.RUNNING:
        return Event.JOB_STARTED
    if change.to_state in (JobState.FAILED, JobState.TIMED_OUT):
        return Event.JOB_FAILED
    if change.to_state == JobState.CANCELLED:
        asked = change.job.cancel_requested_at is not None
        return Event.JOB_ENDED if asked else Event.JOB_FAILED
    return Event.JOB_ENDED if change.to_state == JobState.SUCCEEDED else None


def note(changes: Iterable[JobEvent]) -> None:
    """Put what somebody listens to into the outbox; the changes are saved and in the caller's transaction."""
    found = [(event, change) for change in changes if (event := event_of(change)) is not None]
    if not found:
        return
    wanted = listened_to()
    rows = [
        Happening(event=event, at=change.at, team_id=_team_of(change), job_event=change)
        for event, change in found
        if event in wanted
    ]
    if rows:
        Happening.objects.bulk_create(rows, batch_size=2000)
        wake_tell()


def _team_of(change: JobEvent) -> int:
    return change.attempt.team_id if change.attempt is not None else change.job.team_id


def announce(event: Event, *, team: Team | None, at: datetime, **data: Any) -> None:
    """Something that is not about one job. ``team`` none = the whole organisation."""
    Happening.objects.create(event=event, at=at, team=team, data=data)
    wake_tell()
