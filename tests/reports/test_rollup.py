"""The hourly roll-up on hand-worked ledgers, against an independent SQL over the raw intervals."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal

import pytest
from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.db.models import Sum

from scheduling.models import (
    ActivitySpan,
    Allocation,
    Attempt,
    DirtyRange,
    HourlyUse,
    RollupState,
)
from scheduling.reports.ledger_sql import RESULT, STATES, parameters
from scheduling.services import rollup
from tests.reports.ledger import Ledger, at

HOUR = Decimal(3_600_000_000)
STATES_OF_ALL = (
    "down", "maintenance", "free", "stranded", "reserved", "startup", "no_activity", "lost_failed", "lost_preempted",
    "productive", "unknown",
)  # fmt: skip


def gpu_hours(since: str = "2025-01-01 00:00", until: str = "2026-01-01 00:00", **where: object) -> dict[str, Decimal]:
    """GPU-hours by state between two instants, out of the roll-up; zeros left out."""
    names = ("capacity", *STATES_OF_ALL, "busy", "measured", "overlap", "excess")
    rows = HourlyUse.objects.filter(hour__gte=at(since), hour__lt=at(until), **where)
    sums = rows.aggregate(**{name: Sum(name) for name in names})
    return {name: (value / HOUR).normalize() for name, value in sums.items() if value}


def rows() -> list[tuple[object, ...]]:
    return sorted(HourlyUse.objects.values_list(*RESULT), key=str)


def raw_allocated(since: datetime, until: datetime, now: datetime) -> Decimal:
    """The independent answer: the allocations themselves, by PostgreSQL's own range arithmetic."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT coalesce(sum(share * extract(epoch FROM upper(r) - lower(r))), 0) FROM (
                SELECT share, tstzrange(lower(during), coalesce(upper(during), %(now)s)) * tstzrange(%(since)s, %(until)s) AS r
                FROM scheduling_allocation WHERE during && tstzrange(%(since)s, %(until)s)
            ) AS x WHERE NOT isempty(r)
            """,
            {"since": since, "until": until, "now": now},
        )
        return Decimal(cursor.fetchone()[0])


def test_a_run_rolled_up_every_night_gives_144_192_192_96_and_a_second_run_changes_nothing(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=8), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 06:00", None, gpus=8)
    for night in ("03-04", "03-05", "03-06"):
        rollup.roll_up(at(f"{night} 00:00"))
    assert gpu_hours("2025-03-05 00:00", "2025-03-06 00:00")["unknown"] == 192
    Attempt.objects.filter(pk=attempt.pk).update(state="ended", outcome="succeeded", ended_at=at("03-06 12:00"))
    Allocation.objects.filter(attempt=attempt).update(during=DateTimeTZRange(at("03-03 06:00"), at("03-06 12:00")))
    rollup.roll_up(at("03-07 00:00"))
    days = [gpu_hours(f"2025-03-0{day} 00:00", f"2025-03-0{day + 1} 00:00")["unknown"] for day in (3, 4, 5, 6)]
    assert days == [144, 192, 192, 96]
    before = rows()
    assert rollup.roll_up(at("03-07 00:00")) == 0
    assert rows() == before


def test_a_rebuild_gives_the_same_rows(ledger: Ledger) -> None:
    mixed_month(ledger)
    rollup.roll_up(at("02-01 00:00"))
    rollup.roll_up(at("02-20 13:37"))
    before = rows()
    rollup.rebuild(at("02-20 13:37"))
    assert rows() == before
    assert len(before) > 500


def test_a_rebuild_in_pieces_gives_the_same_rows(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed_month(ledger)
    rollup.rebuild(at("02-20 13:37"))
    before = rows()
    monkeypatch.setattr(rollup, "CHUNK", timedelta(hours=7))
    rollup.rebuild(at("02-20 13:37"))
    assert rows() == before


def mixed_month(ledger: Ledger) -> None:
    """Down, drain, maintenance, shares, losses, requeues, idle spans, reservations: one of each."""
    pool, other = ledger.pool(gpus=8, nodes=2), ledger.pool("h100", gpus=4)
    vision, speech = ledger.team("vision"), ledger.team("speech")
    ledger.run(vision, pool, "01-02 03:10", "01-05 04:05", gpus=4, running="01-02 03:12", outcome="failed")
    ledger.run(vision, pool, "01-05 04:05", "01-09 00:00", gpus=4, stop="01-08 23:58", checkpoint="01-08 20:30",
               outcome="preempted")  # fmt: skip
    ledger.run(speech, pool, "01-03 00:00:00", None, gpus=2, first=4)
    ledger.run(speech, pool, "01-03 00:00:01", "01-03 00:00:02", gpus=1, first=6, share=Decimal("0.333333"))
    idle = ledger.run(speech, other, "01-10 00:00", "01-12 00:00", gpus=4, workload_class="interactive")
    for allocation in idle.allocations.all():
        ActivitySpan.objects.create(
            allocation=allocation, during=DateTimeTZRange(at("01-10 00:30"), at("01-11 00:00")), active=False,
            activity=Decimal("0.01"), metric="sm_active",
        )  # fmt: skip
        ActivitySpan.objects.create(
            allocation=allocation, during=DateTimeTZRange(at("01-11 00:00"), at("01-11 12:00")), active=True,
            activity=Decimal("0.8"), metric="sm_active",
        )  # fmt: skip
    ledger.node_state(pool, "down", "01-04 00:00", "01-04 06:30", node=0)
    ledger.node_state(pool, "drained", "01-07 00:00", "01-10 00:00", node=0)
    ledger.node_state(pool, "maintenance", "01-15 08:00", "01-15 12:00", node=1)
    ledger.node_state(other, "unknown", "01-20 00:00", "01-20 01:00")
    ledger.pool_state(pool, "01-06 00:00", free=10, reserved=3, stranded=4)
    ledger.pool_state(pool, "01-06 05:30", free=10)


def test_states_add_up_to_the_capacity_in_every_hour(ledger: Ledger) -> None:
    mixed_month(ledger)
    rollup.roll_up(at("02-01 00:00"))
    for hour, pool in HourlyUse.objects.values_list("hour", "pool").distinct():
        sums = HourlyUse.objects.filter(hour=hour, pool=pool).aggregate(
            **{n: Sum(n) for n in ("capacity", *STATES_OF_ALL)}
        )
        assert sums.pop("capacity") == sum(sums.values())
    assert rollup.verify_rollups(at("01-01 00:00"), at("02-01 00:00")) == []


def test_allocated_time_equals_the_raw_intervals_to_the_microsecond(ledger: Ledger) -> None:
    mixed_month(ledger)
    now = at("02-01 00:00")
    rollup.roll_up(now)
    held = HourlyUse.objects.filter(team__isnull=False).aggregate(
        sum=Sum("startup") + Sum("no_activity") + Sum("lost_failed") + Sum("lost_preempted") + Sum("productive")
        + Sum("unknown") + Sum("overlap")
    )["sum"]  # fmt: skip
    assert held == raw_allocated(at("01-01 00:00"), now, now) * 1_000_000


def test_work_after_the_last_checkpoint_of_a_preempted_run_is_lost(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=2), ledger.team("vision")
    ledger.run(team, pool, "03-03 00:00", "03-03 05:00", gpus=2, running="03-03 00:15", stop="03-03 04:30",
               checkpoint="03-03 03:00", outcome="preempted")  # fmt: skip
    rollup.roll_up(at("03-04 00:00"))
    spent = gpu_hours(team=team)
    assert spent == {
        "startup": Decimal("1.5"),  # a quarter to start, half an hour of grace, two devices
        "lost_preempted": 3,
        "unknown": Decimal("5.5"),
    }


def test_a_failed_run_without_checkpoint_loses_everything(ledger: Ledger) -> None:
    pool, team = ledger.pool(), ledger.team("vision")
    ledger.run(team, pool, "03-03 00:00", "03-03 05:00", outcome="failed")
    rollup.roll_up(at("03-04 00:00"))
    assert gpu_hours(team=team) == {"lost_failed": 5}


def test_a_loss_known_only_at_the_end_reaches_the_hours_it_was_made_in(ledger: Ledger) -> None:
    pool, team = ledger.pool(), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", None)
    rollup.roll_up(at("03-05 00:00"))
    assert gpu_hours(team=team) == {"unknown": 48}
    Attempt.objects.filter(pk=attempt.pk).update(
        state="ended", outcome="node_failed", ended_at=at("03-05 02:00"), last_checkpoint_at=at("03-04 12:00")
    )
    Allocation.objects.filter(attempt=attempt).update(during=DateTimeTZRange(at("03-03 00:00"), at("03-05 02:00")))
    rollup.roll_up(at("03-05 03:00"))
    assert gpu_hours(team=team) == {"unknown": 36, "lost_failed": 14}
    assert DirtyRange.objects.count() == 0


def test_a_late_correction_of_the_end_reaches_the_right_hours(ledger: Ledger) -> None:
    pool, team = ledger.pool(), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", "03-03 10:00")
    rollup.roll_up(at("03-05 00:00"))
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL gpuportal.correcting = 'the cluster says it ended earlier'")
        Allocation.objects.filter(attempt=attempt).update(during=DateTimeTZRange(at("03-03 00:00"), at("03-03 07:30")))
        Attempt.objects.filter(pk=attempt.pk).update(ended_at=at("03-03 07:30"))
    assert rollup.roll_up(at("03-05 00:00")) == 3
    assert gpu_hours(team=team) == {"unknown": Decimal("7.5")}
    assert rollup.verify_rollups(at("03-01 00:00"), at("03-05 00:00")) == []


def test_a_row_changed_behind_the_ledgers_back_is_found(ledger: Ledger) -> None:
    pool, team = ledger.pool(), ledger.team("vision")
    ledger.run(team, pool, "03-03 00:00", "03-03 10:00")
    rollup.roll_up(at("03-05 00:00"))
    HourlyUse.objects.filter(team=team, hour=at("03-03 04:00")).update(unknown=1)
    (problem,) = rollup.verify_rollups(at("03-01 00:00"), at("03-05 00:00"))
    assert problem.hour == at("03-03 04:00") and "differ from the ledger" in str(problem)


def test_more_held_than_there_is_shows_as_an_error_and_is_not_clipped(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=1, since="2025-03-03 05:00"), ledger.team("vision")
    ledger.run(team, pool, "03-03 04:00", "03-03 08:00")
    rollup.roll_up(at("03-04 00:00"))
    assert gpu_hours("2025-03-03 04:00", "2025-03-03 08:00")["unknown"] == 4
    assert any(
        "states add up to" in str(problem) for problem in rollup.verify_rollups(at("03-03 00:00"), at("03-04 00:00"))
    )


def test_a_node_that_is_down_in_the_middle_of_a_run_counts_as_down(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=4), ledger.team("vision")
    ledger.run(team, pool, "03-03 00:00", "03-03 10:00", gpus=2)
    ledger.node_state(pool, "down", "03-03 04:00", "03-03 06:00")
    rollup.roll_up(at("03-04 00:00"))
    day = gpu_hours("2025-03-03 00:00", "2025-03-04 00:00")
    assert (day["down"], day["unknown"], day["overlap"], day["free"]) == (8, 16, 4, 96 - 8 - 16)


def test_a_job_that_finishes_on_a_draining_node_counts_as_allocated(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=4), ledger.team("vision")
    ledger.run(team, pool, "03-03 00:00", "03-03 10:00", gpus=2)
    ledger.node_state(pool, "drained", "03-03 08:00", "03-03 12:00")
    rollup.roll_up(at("03-04 00:00"))
    day = gpu_hours("2025-03-03 00:00", "2025-03-04 00:00")
    assert (day["down"], day["unknown"], "overlap" in day) == (12, 20, False)


def test_idle_time_is_split_by_what_the_pool_recorded(ledger: Ledger) -> None:
    pool = ledger.pool(gpus=8)
    ledger.pool_state(pool, "03-03 00:00", free=8, reserved=2, stranded=3)
    ledger.pool_state(pool, "03-03 02:30", free=8)
    rollup.roll_up(at("03-03 04:00"))
    assert gpu_hours("2025-03-03 00:00", "2025-03-03 04:00") == {
        "capacity": 32, "reserved": 5, "stranded": Decimal("7.5"), "free": Decimal("19.5"),
    }  # fmt: skip


def test_more_recorded_as_reserved_than_is_idle_is_told_apart(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=2), ledger.team("vision")
    ledger.pool_state(pool, "03-03 00:00", free=2, reserved=2)
    ledger.run(team, pool, "03-03 00:00", "03-03 01:00")
    rollup.roll_up(at("03-03 01:00"))
    assert gpu_hours("2025-03-03 00:00", "2025-03-03 01:00") == {
        "capacity": 2,
        "reserved": 1,
        "unknown": 1,
        "excess": 1,
    }


def test_a_share_counts_as_its_part_of_the_device(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=1), ledger.team("vision")
    ledger.run(team, pool, "03-03 00:00", "03-03 03:00", share=Decimal("0.25"))
    ledger.run(team, pool, "03-03 01:00", "03-03 02:00", share=Decimal("0.333333"))
    rollup.roll_up(at("03-03 03:00"))
    assert HourlyUse.objects.get(team=team, hour=at("03-03 01:00")).unknown == Decimal("0.583333") * HOUR


def test_a_pool_without_jobs_is_all_free(ledger: Ledger) -> None:
    ledger.pool(gpus=4, since="2025-03-03 00:00")
    rollup.roll_up(at("03-04 00:00"))
    assert gpu_hours() == {"capacity": 96, "free": 96}


def test_without_hardware_there_is_nothing_to_roll_up(db: None) -> None:
    assert rollup.roll_up(at("03-04 00:00")) == 0
    assert RollupState.objects.get().rolled_until is None


def test_activity_is_counted_only_while_work_was_going_on(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=1), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", "03-03 04:00", running="03-03 01:00")
    ActivitySpan.objects.create(
        allocation=attempt.allocations.get(), during=DateTimeTZRange(at("03-03 00:30"), at("03-03 03:00")), active=True,
        activity=Decimal("0.5"), metric="sm_active",
    )  # fmt: skip
    rollup.roll_up(at("03-04 00:00"))
    assert gpu_hours(team=team) == {"startup": 1, "productive": 2, "unknown": 1, "busy": 1, "measured": 2}


def test_a_start_that_lies_in_the_future_of_the_clock_counts_nothing_yet(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=1), ledger.team("vision")
    ledger.run(team, pool, "03-03 12:00:05", None)
    with connection.cursor() as cursor:
        cursor.execute(STATES, parameters(at("03-03 11:00"), at("03-03 12:00")))
        assert [row[2] for row in cursor.fetchall()] == [None]


def test_parts_of_an_hour_add_up_to_the_hour(ledger: Ledger) -> None:
    mixed_month(ledger)
    edges = ["01-05 04:00", "01-05 04:05", "01-05 04:45", "01-05 05:00"]
    with connection.cursor() as cursor:

        def sums(start: str, end: str) -> Decimal:
            cursor.execute(STATES, parameters(at(start), at(end)))
            return sum((sum(row[10:16], Decimal(0)) for row in cursor.fetchall()), Decimal(0))

        assert sum(sums(a, b) for a, b in zip(edges, edges[1:], strict=False)) == sums(edges[0], edges[-1]) != 0
