"""The database itself refuses what the ledger must never hold."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.utils import timezone

from scheduling.models import GPU, Allocation, Attempt, Job, JobEvent, JobState
from scheduling.services import states
from scheduling.services.states import IllegalMove
from teams.actors import Actor
from teams.models import AuditEvent, Quota
from teams.services import audit
from tests.factories import House, house

pytestmark = pytest.mark.django_db


@pytest.fixture
def place() -> House:
    return house()


def attempt_of(place: House, **more: object) -> Attempt:
    job = place.submit()
    now = timezone.now()
    values = {
        "job": job, "team": job.team, "pool": place.pool, "number": 1, "workers": 1, "gpus": 1,
        "placement": [], "started_at": now, "eligible_at": now, **more,
    }  # fmt: skip
    return Attempt.objects.create(**values)


def allocate(attempt: Attempt, gpu: GPU, share: str = "1", begins: int = 0, ends: int | None = None) -> Allocation:
    start = attempt.started_at
    during = DateTimeTZRange(
        start + timedelta(hours=begins), None if ends is None else start + timedelta(hours=ends), "[)"
    )
    return Allocation.objects.create(
        attempt=attempt, gpu=gpu, team=attempt.team, pool=attempt.pool, share=Decimal(share), during=during
    )


def refused(text: str):  # type: ignore[no-untyped-def]
    return pytest.raises(IntegrityError, match=text)


def test_a_whole_gpu_is_held_by_one_attempt_at_most(place: House) -> None:
    gpu = GPU.objects.first()
    allocate(attempt_of(place), gpu)
    with refused("whole_gpu_held_once"):
        allocate(attempt_of(place), gpu)


def test_the_same_gpu_may_be_held_one_after_the_other(place: House) -> None:
    gpu = GPU.objects.first()
    first = attempt_of(place)
    allocate(first, gpu, ends=1)
    allocate(first, gpu, begins=1, ends=2)
    assert Allocation.objects.count() == 2


def test_shares_on_one_gpu_never_exceed_one(place: House) -> None:
    gpu = GPU.objects.first()
    for share in ("0.6", "0.4"):
        allocate(attempt_of(place), gpu, share)
    with refused("is held by 1.000000 already, 0.000001"):
        allocate(attempt_of(place), gpu, "0.000001")


def test_shares_are_summed_over_the_instants_of_overlap_only(place: House) -> None:
    gpu = GPU.objects.first()
    allocate(attempt_of(place), gpu, "0.6", begins=0, ends=1)
    allocate(attempt_of(place), gpu, "0.6", begins=1, ends=2)
    allocate(attempt_of(place), gpu, "0.4", begins=0, ends=3)
    with refused("does not fit"):
        allocate(attempt_of(place), gpu, "0.5", begins=0, ends=3)


def test_a_share_and_a_whole_gpu_exclude_one_another(place: House) -> None:
    one, two = GPU.objects.all()[:2]
    allocate(attempt_of(place), one, "0.1")
    with refused("does not fit"), transaction.atomic():
        allocate(attempt_of(place), one)
    allocate(attempt_of(place), two)
    with refused("does not fit"):
        allocate(attempt_of(place), two, "0.1")


def test_a_job_has_one_open_attempt_at_most(place: House) -> None:
    first = attempt_of(place)
    with refused("one_open_attempt_per_job"):
        Attempt.objects.create(
            job=first.job, team=first.team, pool=first.pool, number=2, workers=1, gpus=1, placement=[],
            started_at=first.started_at, eligible_at=first.started_at,
        )  # fmt: skip


def test_a_closed_allocation_is_not_changed_and_none_is_deleted(place: House) -> None:
    row = allocate(attempt_of(place), GPU.objects.first(), ends=1)
    with refused("append-only"), transaction.atomic():
        Allocation.objects.filter(pk=row.pk).update(during=DateTimeTZRange(row.during.lower, None, "[)"))
    with refused("append-only"):
        row.delete()


def test_a_correction_with_its_reason_may_change_the_ledger(place: House) -> None:
    row = allocate(attempt_of(place), GPU.objects.first(), ends=1)
    other = GPU.objects.last()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL gpuportal.correcting = 'test'")
    Allocation.objects.filter(pk=row.pk).update(gpu=other)
    row.refresh_from_db()
    assert row.gpu == other


def test_events_and_audit_are_append_only(place: House) -> None:
    place.submit()
    audit.record(Actor.system("test"), "test", place.pool)
    for rows in (JobEvent.objects.all(), AuditEvent.objects.all()):
        with refused("append-only"), transaction.atomic():
            rows.delete()
        with refused("append-only"), transaction.atomic():
            rows.update(reason="changed")


@pytest.mark.parametrize("field", ["guaranteed", "limit", "weight"])
def test_a_quota_is_never_negative(place: House, field: str) -> None:
    with refused("quota_"):
        Quota.objects.filter(team=place.teams["vision"]).update(**{field: Decimal(-1)})


def test_only_legal_moves_change_a_state(place: House) -> None:
    job = place.submit()
    now = timezone.now()
    with pytest.raises(IllegalMove, match="cannot go from waiting to succeeded"):
        states.move_job(job, JobState.SUCCEEDED, at=now)
    states.move_job(job, JobState.CANCELLED, at=now, actor_label="ann", reason="changed my mind")
    with pytest.raises(IllegalMove, match="from cancelled to running"):
        states.move_job(job, JobState.RUNNING, at=now)
    event = job.events.order_by("-id").first()
    assert event is not None
    assert (event.from_state, event.to_state, event.actor_label, event.reason, event.at) == (
        "waiting", "cancelled", "ann", "changed my mind", now,
    )  # fmt: skip


def test_a_final_job_has_an_end_and_no_other_has(place: House) -> None:
    job = place.submit()
    with refused("job_finished_exactly_when_final"):
        Job.objects.filter(pk=job.pk).update(state="failed")
