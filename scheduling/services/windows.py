"""Occurrences of maintenance windows and advance reservations.

A weekly window keeps its local time: across a change to summer time it begins at the same hour on the clock, and lasts
as long on the clock, which is an hour less or more of real time when the change falls inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from scheduling.models import Window


def occurrences(window: Window, since: datetime, until: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Begin and end (UTC) of each occurrence that overlaps ``since`` … ``until``."""
    if window.cancelled_at is not None:
        return
    if not window.weekly:
        if window.ends_at > since and window.begins_at < until:
            yield window.begins_at, window.ends_at
        return
    zone = ZoneInfo(window.time_zone)
    begins = window.begins_at.astimezone(zone).replace(tzinfo=None)
    ends = window.ends_at.astimezone(zone).replace(tzinfo=None)
    length = ends - begins
    week = max(0, int((since.astimezone(zone).replace(tzinfo=None) - length - begins) / timedelta(days=7)) - 1)
    while True:
        local = begins + timedelta(days=7 * week)
        if window.repeat_until is not None and local.date() > window.repeat_until:
            return
        start = local.replace(tzinfo=zone).astimezone(UTC)
        end = (local + length).replace(tzinfo=zone).astimezone(UTC)
        if start >= until:
            return
        if end > since and end > start:
            yield start, end
        week += 1
