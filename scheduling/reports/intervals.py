"""Exact arithmetic on stretches of time: integers of microseconds, never floats (design.md 7).

An interval is half open: its start belongs to it, its end does not. Instants are aware; the days and months of a
report are those of the viewer's clock, so that a day has 23 or 25 hours when summer time begins or ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple
from zoneinfo import ZoneInfo

HOUR_US = 3_600_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


class Interval(NamedTuple):
    start: datetime
    end: datetime


class Bucket(StrEnum):
    """Steps of a report's time axis, on the viewer's clock."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Held:
    """So many GPUs (a share has decimals) held from ``start`` to ``end``; ``end`` ``None`` = still."""

    start: datetime
    end: datetime | None
    gpus: Decimal = Decimal(1)


def microseconds(length: timedelta) -> int:
    return length // _US


def epoch_us(instant: datetime) -> int:
    """Whole microseconds since 1970. Raises ``ValueError`` for a naive instant."""
    if instant.tzinfo is None:
        raise ValueError(f"{instant.isoformat()} has no time zone: an instant must be aware")
    return (instant - _EPOCH) // _US


def hours(gpu_us: Decimal | int) -> Decimal:
    """GPU-microseconds as GPU-hours, to the millionth."""
    return (Decimal(gpu_us) / HOUR_US).quantize(Decimal("0.000001"))


def clip(interval: Interval, since: datetime, until: datetime) -> Interval | None:
    """The part of ``interval`` between ``since`` and ``until``, or ``None``."""
    start, end = max(interval.start, since), min(interval.end, until)
    return Interval(start, end) if start < end else None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; touching ones are joined, empty ones dropped."""
    joined: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval.start < interval.end):
        if joined and start <= joined[-1].end:
            joined[-1] = Interval(joined[-1].start, max(joined[-1].end, end))
        else:
            joined.append(Interval(start, end))
    return joined


def subtract(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """What of ``intervals`` lies in none of ``holes``."""
    left = union(intervals)
    for hole in union(holes):
        kept = []
        for start, end in left:
            if hole.end <= start or hole.start >= end:
                kept.append(Interval(start, end))
                continue
            if start < hole.start:
                kept.append(Interval(start, hole.start))
            if hole.end < end:
                kept.append(Interval(hole.end, end))
        left = kept
    return left


def length_us(intervals: Iterable[Interval]) -> int:
    return sum(microseconds(end - start) for start, end in intervals)


def held_in(held: Iterable[Held], buckets: Sequence[Interval], now: datetime) -> list[Decimal]:
    """GPU-microseconds of ``held`` in each bucket; what is still held counts up to ``now``."""
    sums = [Decimal(0)] * len(buckets)
    for row in held:
        whole = Interval(row.start, min(row.end or now, now))
        for position, bucket in enumerate(buckets):
            part = clip(whole, bucket.start, bucket.end)
            if part is not None:
                sums[position] += microseconds(part.end - part.start) * row.gpus
    return sums


# -- the viewer's clock ------------------------------------------------------------------------------------------


def local_midnight(day: datetime, zone: ZoneInfo) -> datetime:
    """First instant of the local day that ``day`` (a local, naive midnight) names, as UTC."""
    return datetime.combine(day.date(), time(0), tzinfo=zone).astimezone(UTC)


def buckets(since: datetime, until: datetime, step: Bucket, zone: ZoneInfo) -> list[Interval]:
    """``since`` to ``until`` cut where hours, days, weeks (Monday) or months begin on the clock of ``zone``.

    The first and last bucket are clipped. Hours are real hours: one is missing or doubled when the clock jumps.
    """
    if since >= until:
        return []
    edges = [since, *(edge for edge in _edges(since, until, step, zone) if since < edge < until), until]
    return [Interval(start, end) for start, end in zip(edges, edges[1:], strict=False)]


def _edges(since: datetime, until: datetime, step: Bucket, zone: ZoneInfo) -> Iterator[datetime]:
    local = since.astimezone(zone)
    if step is Bucket.HOUR:
        # Zones with an offset of half an hour have their hours there too.
        into = timedelta(minutes=local.minute, seconds=local.second, microseconds=local.microsecond)
        edge = since.astimezone(UTC) - into
        while edge < until:
            yield edge
            edge += timedelta(hours=1)
        return
    day = datetime.combine(local.date(), time(0))
    if step is Bucket.WEEK:
        day -= timedelta(days=day.weekday())
    elif step is Bucket.MONTH:
        day = day.replace(day=1)
    while (edge := local_midnight(day, zone)) < until:
        yield edge
        if step is Bucket.MONTH:
            day = (day.replace(day=28) + timedelta(days=4)).replace(day=1)
        else:
            day += timedelta(days=7 if step is Bucket.WEEK else 1)


def hour_floor(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def hour_ceil(instant: datetime) -> datetime:
    floor = hour_floor(instant)
    return floor if floor == instant else floor + timedelta(hours=1)


def offset_label(instant: datetime, zone: ZoneInfo) -> str:
    """``UTC+02:00``: printed on every chart, because Plotly knows no time zones."""
    offset = instant.astimezone(zone).strftime("%z")
    return f"UTC{offset[:3]}:{offset[3:5]}"
