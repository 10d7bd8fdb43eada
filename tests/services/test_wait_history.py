"""Why jobs waited, over time."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from scheduling.models import WaitReason
from scheduling.services.jobs import hold_job, release_job
from scheduling.services.wait_history import note_wait_reasons
from tests.factories import house

pytestmark = pytest.mark.django_db


def test_a_reason_is_noted_when_it_changes_and_only_then() -> None:
    place = house()
    place.submit(name="whole", gpus=8, workers=2, interruptible=True, simulation={"runs": 1e7})
    place.step()
    job = place.submit(name="behind", gpus=8, interruptible=True)
    place.step()
    now = timezone.now()
    assert note_wait_reasons(now) == 1
    assert note_wait_reasons(now + timedelta(minutes=1)) == 0
    hold_job(actor=place.actor("ann"), job_id=job.pk)
    place.step()
    assert note_wait_reasons(now + timedelta(minutes=2)) == 1
    release_job(actor=place.actor("ann"), job_id=job.pk)
    place.step()
    assert note_wait_reasons(now + timedelta(minutes=3)) == 1
    rows = list(WaitReason.objects.filter(job=job))
    assert [row.code for row in rows] == ["no-capacity", "held", "no-capacity"]
    assert rows[0].since == job.submitted_at
    assert rows[0].blocker["asked"] == 8_000_000


def test_the_first_reason_after_a_long_silence_is_not_put_back_to_the_submit() -> None:
    place = house()
    place.submit(name="whole", gpus=8, workers=2, interruptible=True, simulation={"runs": 1e7})
    place.step()
    job = place.submit(name="behind", gpus=8, interruptible=True)
    place.step()
    later = timezone.now() + timedelta(hours=1)
    note_wait_reasons(later)
    assert WaitReason.objects.get(job=job).since == later
