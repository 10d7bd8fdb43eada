"""Spans of activity, energy by hour, pool states, the idle policy."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from django.core import mail

from scheduling.models import (
    ActivitySpan,
    GPUSample,
    HourlyEnergy,
    HourlyUse,
    IdleCase,
    Job,
    NodeInterval,
    PoolState,
    ReportingRule,
    Reservation,
    Window,
)
from scheduling.reports.energy import carbon
from scheduling.reports.energy import energy as energy_of
from scheduling.services import activity, idle, pool_states, rollup
from scheduling.services.activity import Sample, spans_of
from tests.reports.ledger import Ledger, at
from tests.reports.test_hours import scope

TEN_MINUTES = timedelta(minutes=10)


def minutes(values: list[float], start: str = "03-03 00:00") -> list[Sample]:
    begin, step = at(start), timedelta(minutes=1)
    return [Sample(begin + step * i, begin + step * (i + 1), value, "sm_active") for i, value in enumerate(values)]


def test_a_dip_shorter_than_the_window_counts_as_activity() -> None:
    (span,) = spans_of(minutes([0.9] * 5 + [0.0] * 9 + [0.9] * 5), 0.05, TEN_MINUTES)
    assert span.active and span.end - span.start == timedelta(minutes=19)


def test_ten_minutes_below_the_threshold_are_without_activity() -> None:
    spans = spans_of(minutes([0.9] * 5 + [0.01] * 10 + [0.9] * 5), 0.05, TEN_MINUTES)
    assert [(span.active, span.end - span.start) for span in spans] == [
        (True, timedelta(minutes=5)), (False, TEN_MINUTES), (True, timedelta(minutes=5)),
    ]  # fmt: skip


def test_a_gap_in_the_samples_is_in_no_span() -> None:
    rows = minutes([0.9] * 3) + minutes([0.9] * 3, "03-03 01:00")
    assert [span.start for span in spans_of(rows, 0.05, TEN_MINUTES)] == [at("03-03 00:00"), at("03-03 01:00")]


def test_overlapping_samples_count_no_moment_twice() -> None:
    step = timedelta(minutes=1)
    begin = at("03-03 00:00")
    rows = [Sample(begin, begin + step * 2, 1.0, "a"), Sample(begin + step, begin + step * 3, 0.5, "b")]
    (span,) = spans_of(rows, 0.05, TEN_MINUTES)
    assert span.end - span.start == step * 3
    assert span.activity == Decimal("0.833333") and span.metric == "a+b"


def test_samples_reach_the_states_of_the_roll_up_and_a_second_build_changes_nothing(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=1), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", "03-03 04:00")
    ledger.samples(attempt, "03-03 00:00", "03-03 01:00", 0.8)
    ledger.samples(attempt, "03-03 01:00", "03-03 03:00", 0.0)
    activity.build_spans(at("03-03 05:00"))
    rollup.roll_up(at("03-03 05:00"))
    hours = {
        row.hour.hour: (row.productive / 3_600_000_000, row.no_activity / 3_600_000_000, row.unknown / 3_600_000_000)
        for row in HourlyUse.objects.filter(team=team)
    }
    assert hours == {0: (1, 0, 0), 1: (0, 1, 0), 2: (0, 1, 0), 3: (0, 0, 1)}
    assert activity.build_spans(at("03-03 05:00")) == 0


def test_spans_stay_when_samples_are_thrown_away(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=1), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", "03-03 04:00")
    ledger.samples(attempt, "03-03 00:00", "03-03 04:00", 0.8)
    activity.build_spans(at("03-03 05:00"))
    GPUSample.objects.all().delete()
    activity.build_spans(at("03-03 06:00"))
    assert ActivitySpan.objects.count() == 1


def test_carbon_is_multiplied_hour_by_hour() -> None:
    assert carbon([(1, 100), (9, 500)]) == pytest.approx(4.6)


def test_measured_energy_goes_before_the_model_and_the_counter_before_power(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=2), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", "03-03 02:00", gpus=1)
    ledger.samples(attempt, "03-03 00:00", "03-03 01:00", 0.8, power_watts=999.0, energy_joules=300.0 * 60)
    activity.build_spans(at("03-03 02:00"))
    rollup.roll_up(at("03-03 02:00"))
    row = HourlyEnergy.objects.get()
    assert (row.source, row.joules, row.team) == ("counter", pytest.approx(300 * 3600), team)
    report = energy_of(scope("03-03 00:00", "03-03 02:00"))
    # measured 0.3 kWh, then one hour at the TDP of 400 W, and the other device two hours at 50 W
    assert report.kwh == pytest.approx(0.3 + 0.4 + 0.1)
    assert report.measured_kwh == pytest.approx(0.3) and report.idle_kwh == pytest.approx(0.1)


def test_a_sample_across_the_hour_is_split(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=1), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", "03-03 02:00")
    ledger.samples(attempt, "03-03 00:30", "03-03 01:30", 0.8, seconds=3600, power_watts=100.0)
    activity.build_spans(at("03-03 02:00"))
    assert [(r.hour.hour, round(r.joules)) for r in HourlyEnergy.objects.order_by("hour")] == [
        (0, 180_000),
        (1, 180_000),
    ]


def test_a_pool_state_tells_free_reserved_stranded_and_pieces(ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=4, nodes=2), ledger.team("vision")
    ledger.run(team, pool, "03-03 00:00", None, gpus=3)
    waiting = ledger.job(team, pool, "03-03 00:00", gpus=8)
    ledger.job(team, pool, "03-03 00:00", gpus=2, held=True)
    node = pool.nodes.get(name="a100-1")
    from scheduling.models import Cycle

    Reservation.objects.create(
        job=waiting, pool=pool, placement=[[node.pk, 0b0011, 1_000_000]], starts_at=at("03-04 00:00"),
        cycle=Cycle.objects.create(started_at=at("03-03 00:00")),
    )  # fmt: skip
    assert pool_states.record_pool_states(at("03-03 01:00")) == 1
    row = PoolState.objects.get()
    assert (row.free, row.reserved, row.stranded, row.demand, row.pieces) == (5, 2, 3, 8, {"1": 1, "4": 1})
    assert pool_states.record_pool_states(at("03-03 01:00:05")) == 0
    Job.objects.filter(pk=waiting.pk).update(gpus=1)
    assert pool_states.record_pool_states(at("03-03 01:00:10")) == 1


def test_a_maintenance_window_becomes_history_of_its_nodes(ledger: Ledger) -> None:
    pool = ledger.pool(gpus=4)
    window = Window.objects.create(
        name="firmware", kind="maintenance", begins_at=at("03-03 01:00"), ends_at=at("03-03 03:00")
    )
    window.nodes.set(pool.nodes.all())
    for minute in ("00:30", "01:00", "02:00", "03:00"):
        pool_states.record_pool_states(at(f"03-03 {minute}"))
    row = NodeInterval.objects.get()
    assert (row.state, row.during.lower, row.during.upper) == ("maintenance", at("03-03 01:00"), at("03-03 03:00"))


@pytest.mark.parametrize(
    ("action", "dry", "state"), [("flag", False, "flagged"), ("stop", True, "would-stop"), ("stop", False, "stopped")]
)
def test_an_idle_job_is_warned_then_handled_by_the_policy(ledger: Ledger, action: str, dry: bool, state: str) -> None:
    ledger.owner.email = "owner@example.org"
    ledger.owner.save()
    ReportingRule.objects.create(idle_warn_after=1800, idle_countdown=600, idle_action=action, idle_dry_run=dry)
    pool, team = ledger.pool(gpus=2), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", None, gpus=2)
    Job.objects.filter(pk=attempt.job_id).update(walltime=timedelta(hours=10))
    ledger.samples(attempt, "03-03 00:00", "03-03 01:00", 0.0)
    activity.build_spans(at("03-03 01:00"))
    assert idle.watch_idle(at("03-03 00:20"))["warned"] == 0
    assert idle.watch_idle(at("03-03 01:00"))["warned"] == 1
    assert "holds GPUs without using them" in mail.outbox[0].subject
    ledger.samples(attempt, "03-03 01:00", "03-03 01:10", 0.0)
    activity.build_spans(at("03-03 01:10"))
    assert idle.watch_idle(at("03-03 01:10"))[state] == 1
    case = IdleCase.objects.get()
    assert case.state == state
    # until the walltime at 10:00: 8 h 50 min on two devices at 2 an hour
    assert case.saved_gpu_hours == Decimal("17.667") and case.saved_money == Decimal("35.33")
    attempt.refresh_from_db()
    assert (attempt.state == "stopping") == (state == "stopped")


def test_a_job_that_works_again_is_left_alone(ledger: Ledger) -> None:
    ReportingRule.objects.create(idle_warn_after=1800, idle_countdown=3600, idle_action="stop", idle_dry_run=False)
    pool, team = ledger.pool(gpus=1), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", None)
    ledger.samples(attempt, "03-03 00:00", "03-03 01:00", 0.0)
    activity.build_spans(at("03-03 01:00"))
    idle.watch_idle(at("03-03 01:00"))
    ledger.samples(attempt, "03-03 01:00", "03-03 02:30", 0.9)
    activity.build_spans(at("03-03 02:30"))
    assert idle.watch_idle(at("03-03 02:30"))["recovered"] == 1
