"""The arithmetic of design.md section 7, with its worked numbers."""

from __future__ import annotations

from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduling.reports.intervals import (
    Bucket,
    Held,
    Interval,
    buckets,
    clip,
    epoch_us,
    held_in,
    hours,
    length_us,
    offset_label,
    subtract,
    union,
)
from tests.reports.ledger import at

BERLIN = ZoneInfo("Europe/Berlin")
UTC_ZONE = ZoneInfo("UTC")


def by_day(start: str, end: str, gpus: int, zone: ZoneInfo) -> list[int]:
    days = buckets(at(start), at(end), Bucket.DAY, zone)
    return [int(hours(amount)) for amount in held_in([Held(at(start), at(end), Decimal(gpus))], days, at(end))]


def test_the_day_summer_time_ends_has_25_hours() -> None:
    assert by_day("2025-10-25 20:00", "2025-10-27 05:00", 8, BERLIN) == [16, 200, 48]


def test_the_day_summer_time_begins_has_23_hours() -> None:
    assert by_day("2025-03-29 20:00", "2025-03-31 05:00", 8, BERLIN) == [24, 184, 56]


def test_a_run_of_three_days_falls_into_four() -> None:
    assert by_day("03-03 06:00", "03-06 12:00", 8, UTC_ZONE) == [144, 192, 192, 96]


def test_what_still_runs_counts_up_to_now() -> None:
    day = [Interval(at("03-03 00:00"), at("03-04 00:00"))]
    assert held_in([Held(at("03-03 06:00"), None, Decimal("0.25"))], day, at("03-03 10:00")) == [Decimal(3_600_000_000)]


def test_months_end_where_the_local_month_ends() -> None:
    months = buckets(at("2025-01-31 12:00"), at("2025-03-01 12:00"), Bucket.MONTH, BERLIN)
    assert [month.start for month in months] == [at("2025-01-31 12:00"), at("2025-01-31 23:00"), at("2025-02-28 23:00")]


def test_weeks_begin_on_monday() -> None:
    weeks = buckets(at("2025-03-05 00:00"), at("2025-03-18 00:00"), Bucket.WEEK, UTC_ZONE)
    assert [week.start for week in weeks] == [at("2025-03-05 00:00"), at("2025-03-10 00:00"), at("2025-03-17 00:00")]


def test_hours_of_a_half_hour_zone_begin_at_the_half_hour() -> None:
    edges = buckets(at("2025-03-05 00:00"), at("2025-03-05 01:00"), Bucket.HOUR, ZoneInfo("Asia/Kolkata"))
    assert [edge.start for edge in edges] == [at("2025-03-05 00:00"), at("2025-03-05 00:30")]


def test_the_day_summer_time_ends_has_25_hour_buckets() -> None:
    assert len(buckets(at("2025-10-25 22:00"), at("2025-10-26 23:00"), Bucket.HOUR, BERLIN)) == 25


def test_touching_intervals_are_one_and_overlap_counts_once() -> None:
    rows = [Interval(at(f"03-03 0{a}:00"), at(f"03-03 0{b}:00")) for a, b in ((1, 3), (3, 4), (2, 5), (7, 7))]
    assert union(rows) == [Interval(at("03-03 01:00"), at("03-03 05:00"))]


def test_a_hole_splits_what_it_lies_in() -> None:
    whole, hole = Interval(at("03-03 01:00"), at("03-03 05:00")), Interval(at("03-03 02:00"), at("03-03 03:00"))
    assert subtract([whole], [hole]) == [Interval(whole.start, hole.start), Interval(hole.end, whole.end)]


def test_what_lies_outside_the_range_is_not_counted() -> None:
    assert clip(Interval(at("03-03 01:00"), at("03-03 02:00")), at("03-03 02:00"), at("03-03 03:00")) is None


def test_an_instant_without_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        epoch_us(at("03-03 01:00").replace(tzinfo=None))


def test_the_offset_is_printed_as_it_was_on_that_day() -> None:
    assert offset_label(at("2025-07-01 00:00"), BERLIN) == "UTC+02:00"
    assert offset_label(at("2025-01-01 00:00"), ZoneInfo("America/St_Johns")) == "UTC-03:30"


_SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50)), max_size=12)


#: A busy machine draws slowly; what is tested is arithmetic, not time.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(_SPANS, _SPANS)
def test_what_is_left_and_what_was_taken_add_up(rows: list[tuple[int, int]], holes: list[tuple[int, int]]) -> None:
    base = at("03-03 00:00")
    step = at("03-03 00:01") - base
    a = [Interval(base + step * s, base + step * (s + n)) for s, n in rows]
    b = [Interval(base + step * s, base + step * (s + n)) for s, n in holes]
    assert length_us(union(a + b)) == length_us(subtract(a, b)) + length_us(union(b))


@unhurried
@given(st.integers(0, 400 * 24 * 60), st.integers(1, 100 * 24 * 60), st.sampled_from(list(Bucket)))
def test_buckets_cover_the_range_without_gap_or_overlap(offset: int, length: int, step: Bucket) -> None:
    minute = at("03-03 00:01") - at("03-03 00:00")
    since = at("2025-01-01 00:00") + minute * offset
    until = since + minute * min(length, 3000 if step is Bucket.HOUR else length)
    rows = buckets(since, until, step, BERLIN)
    assert rows[0].start == since and rows[-1].end == until
    assert all(left.end == right.start for left, right in zip(rows, rows[1:], strict=False))
