"""Delivered against entitled, borrowed and lent, by hand; the budget split; evictions."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.reports.fairness import fairness
from scheduling.reports.journeys import preemptions
from scheduling.reports.spend import hundred_percent, spend
from scheduling.services import rollup
from teams.models import Quota
from tests.reports.ledger import Ledger, at
from tests.reports.test_hours import scope

HOUR = Decimal(3_600_000_000)


def test_an_hour_above_the_guarantee_does_not_pay_for_an_hour_below_it(ledger: Ledger) -> None:
    pool, vision, speech = ledger.pool(gpus=8), ledger.team("vision"), ledger.team("speech")
    for team in (vision, speech):
        Quota.objects.create(team=team, pool=pool, guaranteed=4, during=DateTimeTZRange(at("01-01 00:00"), None))
    ledger.run(vision, pool, "03-03 00:00", "03-03 01:00", gpus=8)
    ledger.run(speech, pool, "03-03 01:00", "03-03 02:00", gpus=4)
    rollup.roll_up(at("03-03 02:00"))
    report = fairness(scope("03-03 00:00", "03-03 02:30", now="03-03 02:30"))
    rows = {row.team: row for row in report.teams}
    assert [x / HOUR for x in (rows[vision.pk].delivered, rows[vision.pk].entitled)] == [8, 10]
    assert [x / HOUR for x in (rows[vision.pk].borrowed, rows[vision.pk].lent)] == [4, 6]
    assert [x / HOUR for x in (rows[speech.pk].borrowed, rows[speech.pk].lent)] == [0, 6]
    # ratios 0.8 and 0.4
    assert report.index == pytest.approx(1.2**2 / (2 * (0.64 + 0.16)))


def test_the_shares_of_the_budget_add_up_to_100(ledger: Ledger) -> None:
    assert sum(hundred_percent([Decimal(1)] * 3)) == 100
    assert hundred_percent([Decimal(0)] * 3) == [0, 0, 0]
    pool, team = ledger.pool(gpus=3), ledger.team("vision")
    ledger.run(team, pool, "03-03 00:00", "03-03 07:00", outcome="failed")
    rollup.roll_up(at("03-04 00:00"))
    report = spend(scope("03-03 00:00", "03-04 00:00"))
    assert sum(row.percent for row in report.split) == 100
    assert report.total == 144 and {row.part: row.money for row in report.split}["lost_failed"] == 14


def test_evictions_name_who_gained_and_who_lost(ledger: Ledger) -> None:
    pool, vision, speech = ledger.pool(), ledger.team("vision"), ledger.team("speech")
    gainer = ledger.job(speech, pool, "03-03 01:00")
    ledger.run(vision, pool, "03-03 00:00", "03-03 03:00", gpus=2, outcome="preempted", checkpoint="03-03 01:00",
               evicted_for=gainer, stop_reason="reclaim")  # fmt: skip
    (row,) = preemptions(scope("03-03 00:00", "03-04 00:00"))
    assert (row.victim, row.gainer, row.reason, row.lost_gpu_hours) == (vision.pk, speech.pk, "reclaim", 4)
