"""Samples into spans of activity and hours of energy, by the idle rule in force.

A span is a stretch of one allocation that was measured without a gap and is either active or not. An allocation is
without activity while its ratio stays below the threshold for at least the window; shorter dips count as activity.
Samples may overlap or come late: of several that cover a moment the one that ends first counts, so no moment counts
twice, and a span is worked out anew from the day on which anything new arrived.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.models import ActivitySpan, DirtyRange, RollupState
from scheduling.reports.page import rule
from scheduling.services import clock

#: Samples that arrive this much later than they were taken are still taken in.
LATENESS = timedelta(hours=2)


class Sample(NamedTuple):
    start: datetime
    end: datetime
    activity: float
    metric: str


class Span(NamedTuple):
    start: datetime
    end: datetime
    active: bool
    activity: Decimal
    metric: str


def spans_of(samples: list[Sample], threshold: float, window: timedelta) -> list[Span]:
    """Pure: from the samples of one allocation, in any order, its spans."""
    pieces: list[Sample] = []
    for start, end, activity, metric in sorted(samples, key=lambda sample: (sample.end, sample.start)):
        begin = max(start, pieces[-1].end) if pieces else start
        if begin < end:
            pieces.append(Sample(begin, end, activity, metric))
    runs: list[list[Sample]] = []
    for piece in pieces:
        low = piece.activity < threshold
        if runs and runs[-1][-1].end == piece.start and (runs[-1][-1].activity < threshold) == low:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    # A dip that is shorter than the window is activity, and one with what it touches.
    spans: list[Span] = []
    for run in runs:
        idle = run[0].activity < threshold and run[-1].end - run[0].start >= window
        span = _span(run, active=not idle)
        if spans and spans[-1].end == span.start and spans[-1].active == span.active:
            spans[-1] = _joined(spans[-1], span)
        else:
            spans.append(span)
    return spans


def _span(run: list[Sample], *, active: bool) -> Span:
    length = sum((piece.end - piece.start).total_seconds() for piece in run)
    mean = sum(piece.activity * (piece.end - piece.start).total_seconds() for piece in run) / length
    metric = "+".join(sorted({piece.metric for piece in run if piece.metric}))[:48]
    return Span(run[0].start, run[-1].end, active, Decimal(mean).quantize(Decimal("0.000001")), metric)


def _joined(left: Span, right: Span) -> Span:
    a, b = ((span.end - span.start).total_seconds() for span in (left, right))
    mean = (float(left.activity) * a + float(right.activity) * b) / (a + b)
    metrics = {*left.metric.split("+"), *right.metric.split("+")} - {""}
    return Span(
        left.start, right.end, left.active, Decimal(mean).quantize(Decimal("0.000001")), "+".join(sorted(metrics))[:48]
    )


_SAMPLES = """
SELECT a.id, greatest(s.at - s.seconds * interval '1 second', lower(a.during)),
       least(s.at, coalesce(upper(a.during), s.at)), s.activity, s.metric
FROM scheduling_gpusample s JOIN scheduling_allocation a ON a.gpu_id = s.gpu_id
    AND a.during && tstzrange(s.at - s.seconds * interval '1 second', s.at)
WHERE s.at > %s AND s.at <= %s AND s.activity IS NOT NULL
ORDER BY a.id
"""

# The energy counter goes before power; a sample is split where an hour ends. What nobody held is its own row.
_ENERGY = """
INSERT INTO scheduling_hourlyenergy (hour, pool_id, team_id, source, joules, measured)
SELECT h.hour, g.pool_id, a.team_id, CASE WHEN s.energy_joules IS NULL THEN 'power' ELSE 'counter' END,
       sum(coalesce(s.energy_joules / s.seconds, s.power_watts) * p.seconds * coalesce(a.share::float, 1)),
       sum(p.seconds::numeric * 1000000 * coalesce(a.share, 1))
FROM scheduling_gpusample s JOIN scheduling_gpu g ON g.id = s.gpu_id
LEFT JOIN scheduling_allocation a ON a.gpu_id = s.gpu_id AND a.during @> s.at - interval '1 microsecond'
CROSS JOIN LATERAL (
    SELECT generate_series(date_trunc('hour', s.at - s.seconds * interval '1 second', 'UTC'),
                           s.at - interval '1 microsecond', interval '1 hour') AS hour
) AS h
CROSS JOIN LATERAL (
    SELECT extract(epoch FROM least(s.at, h.hour + interval '1 hour')
                   - greatest(s.at - s.seconds * interval '1 second', h.hour))::float AS seconds
) AS p
WHERE s.at > %(since)s AND s.at <= %(until)s + interval '1 hour' AND h.hour >= %(since)s AND h.hour < %(until)s
  AND coalesce(s.energy_joules, s.power_watts) IS NOT NULL AND s.seconds > 0
GROUP BY 1, 2, 3, 4
"""


@transaction.atomic
def build_spans(now: datetime | None = None) -> int:
    """Work out spans and energy from the last run on (a little earlier, for late samples); returns the spans written.

    Whole UTC days are done anew, as far as their samples are still kept.
    """
    now = now or clock.now()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [0x9907_0112])
        cursor.execute("SELECT min(at) FROM scheduling_gpusample")
        (oldest,) = cursor.fetchone()
    state, _ = RollupState.objects.get_or_create(pk=1)
    if oldest is None:
        return 0
    since = max(oldest, (state.spans_until or oldest) - LATENESS)
    day = since.replace(hour=0, minute=0, second=0, microsecond=0)
    written = 0
    while day < now:
        written += _day(day, min(day + timedelta(days=1), now))
        day += timedelta(days=1)
    RollupState.objects.filter(pk=1).update(spans_until=now)
    return written


def _day(day: datetime, until: datetime) -> int:
    in_force = rule()
    threshold, window = float(in_force.idle_threshold), timedelta(seconds=in_force.idle_window_seconds)
    by_allocation: dict[int, list[Sample]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_SAMPLES, [day, until])
        for allocation, start, end, activity, metric in cursor.fetchall():
            begin = max(start, day)
            if begin < end:
                by_allocation.setdefault(allocation, []).append(Sample(begin, end, activity, metric))
        cursor.execute("DELETE FROM scheduling_hourlyenergy WHERE hour >= %s AND hour < %s", [day, until])
        cursor.execute(_ENERGY, {"since": day, "until": until})
    wanted = {
        (number, span.start, span.end): span
        for number, samples in by_allocation.items()
        for span in spans_of(samples, threshold, window)
    }
    kept = _remove_differing(day, until, wanted)
    fresh = [
        ActivitySpan(
            allocation_id=number, during=DateTimeTZRange(start, end, "[)"), active=span.active, activity=span.activity,
            metric=span.metric,
        )
        for (number, start, end), span in wanted.items()
        if (number, start, end) not in kept
    ]  # fmt: skip
    ActivitySpan.objects.bulk_create(fresh, batch_size=5000)
    hour = clock.now().replace(minute=0, second=0, microsecond=0)
    past = [(span.during.lower, span.during.upper) for span in fresh if span.during.lower < hour]
    if past:
        DirtyRange.objects.create(since=min(row[0] for row in past), until=max(row[1] for row in past))
    return len(fresh)


def _remove_differing(
    day: datetime, until: datetime, wanted: dict[tuple[int, datetime, datetime], Span]
) -> set[tuple[int, Any, Any]]:
    """Delete the day's spans that are not wanted as they are; what is right stays and makes nothing dirty."""
    kept, wrong, dirty = set(), [], []
    rows = ActivitySpan.objects.filter(during__overlap=(day, until))
    for number, allocation, during, active, activity in rows.values_list(
        "id", "allocation_id", "during", "active", "activity"
    ):
        key = (allocation, during.lower, during.upper)
        span = wanted.get(key)
        if span is not None and (span.active, span.activity) == (active, activity):
            kept.add(key)
        else:
            wrong.append(number)
            dirty.append((during.lower, during.upper))
    if wrong:
        ActivitySpan.objects.filter(pk__in=wrong).delete()
        DirtyRange.objects.create(since=min(row[0] for row in dirty), until=max(row[1] for row in dirty))
    return kept
