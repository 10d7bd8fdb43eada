"""The policy lab: recorded submissions run again, with a change."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.models import LabRun
from scheduling.services import lab
from scheduling.services.errors import InvalidRequest
from teams.actors import Actor
from teams.models import Quota
from tests.reports.ledger import Ledger, at

PERIOD = (at("03-03 00:00"), at("03-04 00:00"))


@pytest.fixture
def day(ledger: Ledger) -> Ledger:
    """One node of 8; vision runs two jobs of 8 GPUs, one after the other, an hour each."""
    pool, vision, speech = ledger.pool(gpus=8), ledger.team("vision"), ledger.team("speech")
    for team, guaranteed in ((vision, 8), (speech, 0)):
        Quota.objects.create(
            team=team, pool=pool, guaranteed=Decimal(guaranteed), during=DateTimeTZRange(at("2025-01-01 00:00"), None)
        )
    ledger.run(vision, pool, "03-03 01:00", "03-03 02:00", gpus=8, submitted="03-03 01:00")
    ledger.run(vision, pool, "03-03 02:00", "03-03 03:00", gpus=8, submitted="03-03 01:00")
    return ledger


def test_as_it_was_the_engine_gives_what_happened(day: Ledger) -> None:
    found = lab.answer(*PERIOD, [{"kind": "hardware", "pool": "a100", "nodes": 1}])
    assert found["happened"]["mean_wait"] == found["before"]["mean_wait"] == 1800
    assert found["happened"]["gpu_hours_allocated"] == found["before"]["gpu_hours_allocated"] == 16


def test_a_second_node_and_its_guarantee_end_the_waiting_and_the_team_wins(day: Ledger) -> None:
    more = [
        {"kind": "hardware", "pool": "a100", "nodes": 1},
        {"kind": "quota", "team": "vision", "pool": "a100", "guaranteed": 16},
    ]
    found = lab.answer(*PERIOD, more)
    assert found["after"]["mean_wait"] == 0
    (row,) = found["teams"]
    assert (row["team"], row["verdict"]) == ("vision", "wins")


def test_without_its_guarantee_a_job_that_cannot_be_interrupted_does_not_start(day: Ledger) -> None:
    found = lab.answer(*PERIOD, [{"kind": "quota", "team": "vision", "pool": "a100", "guaranteed": 0}])
    assert found["after"]["gpu_hours_allocated"] == 0
    again = lab.answer(
        *PERIOD,
        [
            {"kind": "quota", "team": "vision", "pool": "a100", "guaranteed": 0},
            {"kind": "interruptible", "checkpoint_every": 1800},
        ],
    )
    assert again["after"]["gpu_hours_allocated"] == 16


def test_a_question_is_kept_run_once_and_answered(day: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "enqueue", lambda _: None)
    changes = [{"kind": "policy", "name": "half_life", "value": 86400}]
    row = lab.ask(actor=Actor.system("test"), name="", since=PERIOD[0], until=PERIOD[1], changes=changes)
    lab.run(row.pk)
    lab.run(row.pk)
    row.refresh_from_db()
    assert (row.state, row.progress) == (LabRun.State.DONE, 1.0) and row.result["jobs"] == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "magic"}, "allowed are quota, hardware, policy, interruptible"),
        ({"kind": "hardware", "pool": "x", "nodes": 1}, "allowed are a100"),
        ({"kind": "hardware", "pool": "a100", "nodes": "many"}, "nodes “many” is not a number from -10000 to 10000"),
        ({"kind": "policy", "name": "speed", "value": 1}, "setting “speed” is unknown"),
        ({"kind": "quota", "team": "vision", "pool": "a100"}, "give guaranteed, limit or weight"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused_with_what_is_allowed(day: Ledger, change: dict, said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        lab.ask(actor=Actor.system("test"), name="", since=PERIOD[0], until=PERIOD[1], changes=[change])
    assert said in str(error.value)


def test_a_period_without_jobs_says_so(day: Ledger) -> None:
    with pytest.raises(lab.LabError, match="No job ran"):
        lab.answer(at("02-01 00:00"), at("02-02 00:00"), [])
