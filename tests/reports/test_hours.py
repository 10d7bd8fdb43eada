"""Reading roll-ups: local days, edges inside an hour, the running hour, scopes."""

from __future__ import annotations

from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest

from scheduling.models import HourlyUse
from scheduling.reports.hours import Use, read, typical_week
from scheduling.reports.intervals import HOUR_US, Bucket
from scheduling.reports.scope import Scope
from scheduling.services import rollup
from tests.reports.ledger import Ledger, at
from tests.reports.test_rollup import mixed_month, raw_allocated


def scope(since: str, until: str, now: str | None = None, zone: str = "UTC", **more: object) -> Scope:
    return Scope(at(since), at(until), at(now or until), ZoneInfo(zone), **more)


def allocated(table, position: int) -> Decimal:
    return table.by("bucket")[position,].allocated / HOUR_US


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ("2025-10-25 20:00", "2025-10-27 05:00", [16, 200, 48]),
        ("2025-03-29 20:00", "2025-03-31 05:00", [24, 184, 56]),
    ],
)
def test_days_of_berlin_have_23_and_25_hours(ledger: Ledger, start: str, end: str, expected: list[int]) -> None:
    pool, team = ledger.pool(gpus=8), ledger.team("vision")
    ledger.run(team, pool, start, end, gpus=8)
    rollup.roll_up(at(end))
    table = read(scope(start, end, zone="Europe/Berlin"), Bucket.DAY)
    assert [allocated(table, day) for day in range(3)] == expected


def test_days_of_a_half_hour_zone_are_cut_inside_the_hour(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=1), ledger.team("vision")
    ledger.run(team, pool, "03-03 18:00", "03-03 19:00")
    rollup.roll_up(at("03-05 00:00"))
    table = read(scope("03-02 18:30", "03-04 18:30", zone="Asia/Kolkata"), Bucket.DAY)
    assert [allocated(table, day) for day in range(2)] == [Decimal("0.5"), Decimal("0.5")]


def test_a_running_job_counts_up_to_now_though_the_hour_is_not_over(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=2), ledger.team("vision")
    ledger.run(team, pool, "03-03 06:00", None, gpus=2)
    rollup.roll_up(at("03-03 07:10"))
    table = read(scope("03-03 00:00", "03-04 00:00", now="03-03 09:45"))
    assert table.total.allocated / HOUR_US == Decimal("7.5")
    assert table.total.capacity / HOUR_US == Decimal("19.5")


def test_any_range_equals_the_raw_intervals(ledger: Ledger) -> None:
    mixed_month(ledger)
    rollup.roll_up(at("02-01 00:00"))
    for since, until in (
        ("01-02 03:10:30", "01-02 03:11"),
        ("01-03 00:00:01", "01-30 17:17:17"),
        ("01-06 05:00", "01-06 07:00"),
    ):
        table = read(scope(since, until, now="02-01 00:00"))
        raw = raw_allocated(at(since), at(until), at("02-01 00:00")) * 1_000_000
        assert table.total.allocated + table.total.overlap == raw
        assert table.total.difference == 0


def test_only_the_teams_in_scope_are_counted_and_hardware_is_left_out_for_them(ledger: Ledger) -> None:
    pool, mine, other = ledger.pool(gpus=8), ledger.team("mine"), ledger.team("other")
    ledger.run(mine, pool, "03-03 00:00", "03-03 02:30", gpus=2)
    ledger.run(other, pool, "03-03 00:00", "03-03 02:30", gpus=3, first=2)
    rollup.roll_up(at("03-03 02:00"))
    total = read(scope("03-03 00:00", "03-03 03:00", teams=frozenset({mine.pk}), whole=False)).total
    assert (total.allocated / HOUR_US, total.capacity, total.idle) == (5, 0, 0)


def test_the_typical_week_sums_to_the_range(ledger: Ledger) -> None:
    mixed_month(ledger)
    rollup.roll_up(at("02-01 00:00"))
    wanted = scope("01-06 00:00", "01-20 00:00", zone="Europe/Berlin")
    week = typical_week(wanted)
    assert len(week) == 168
    assert sum((use.capacity for use in week.values()), Decimal(0)) == read(wanted).total.capacity


def test_100_gpus_for_a_week_are_47_62_per_cent_not_producing() -> None:
    h = Decimal(HOUR_US)
    use = Use(
        capacity=16800 * h, down=500 * h, maintenance=200 * h, free=3000 * h, stranded=300 * h, reserved=2200 * h,
        no_activity=1400 * h, lost_failed=400 * h, productive=8800 * h,
    )  # fmt: skip
    assert use.states == use.capacity
    assert round(use.not_producing / use.capacity * 100, 2) == Decimal("47.62")


def test_the_period_before_has_the_same_length_on_the_clock() -> None:
    week = scope("2025-10-26 23:00", "2025-11-02 23:00", zone="Europe/Berlin")
    assert week.before().since == at("2025-10-19 22:00")


def test_reading_writes_nothing(ledger: Ledger) -> None:
    mixed_month(ledger)
    rollup.roll_up(at("01-10 00:00"))
    before = HourlyUse.objects.count()
    read(scope("01-01 00:00", "02-01 00:00"), Bucket.DAY)
    assert HourlyUse.objects.count() == before
