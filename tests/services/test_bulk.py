"""Many rows at once come out as ``bulk_create`` would have stored them, under the same guarantees."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import IntegrityError, transaction

from scheduling.models import Command, Job, ReportingRule
from scheduling.services import clock
from scheduling.services.bulk import copy_in
from teams.models import Team
from tests.factories import house

pytestmark = pytest.mark.django_db


def _job(name: str, **values: object) -> Job:
    place = Job.objects.order_by("id").first()
    assert place is not None
    now = clock.now()
    return Job(
        name=name, team=place.team, owner=place.owner, pools=place.pools, submitted_at=now, eligible_at=now, **values
    )


def test_every_kind_of_value_comes_back_as_it_was() -> None:
    house().submit()
    odd = "tab\there, \\N, newline\nand ünïcode"
    rows = [
        _job(odd, environment={"A": odd}, walltime=timedelta(hours=30), avoid_nodes=[3, 1], command="\\."),
        _job("share", gpus=0, share=Decimal("0.125"), environment={}),
    ]
    copy_in(rows)
    stored = {job.pk: job for job in Job.objects.filter(pk__in=[row.pk for row in rows])}
    for row in rows:
        for field in Job._meta.concrete_fields:
            assert getattr(stored[row.pk], field.attname) == getattr(row, field.attname), field.name


def test_numbers_follow_the_order_of_the_rows_and_never_meet_those_of_others() -> None:
    first = house().submit()
    rows = [_job(f"j{number}") for number in range(100)]
    copy_in(rows)
    numbers = [row.pk for row in rows]
    assert numbers == sorted(numbers)
    assert first.pk not in numbers
    later = _job("later")
    later.save()
    assert later.pk > numbers[-1]


def test_times_that_django_sets_are_set() -> None:
    rule = ReportingRule()
    copy_in([rule])
    assert ReportingRule.objects.get(pk=rule.pk).created_at is not None


def test_a_row_that_breaks_a_constraint_stores_none() -> None:
    house().submit()
    with pytest.raises(IntegrityError, match="job_asks_for_gpus_or_one_share"), transaction.atomic():
        copy_in([_job("good"), _job("bad", gpus=0)])
    assert Job.objects.count() == 1


def test_no_rows_are_no_question_to_the_database(django_assert_num_queries: object) -> None:
    with django_assert_num_queries(0):  # type: ignore[operator]
        copy_in([])


def test_what_points_to_nothing_is_refused() -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        copy_in([Team(name="child", parent_id=99)])
        Team.objects.all().exists()
        transaction.get_connection().check_constraints()
    assert not Command.objects.exists()
