"""A job's way through the house: submit, decide, send, run, end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied
from django.db import connection, transaction
from django.utils import timezone

from scheduling.backends.base import NotFound, RunReport, RunState, Unreachable
from scheduling.models import Allocation, Attempt, Command, Cycle, Decision, Drift, Hold, Job, NodeInterval
from scheduling.services import cycle as cycle_service
from scheduling.services.cycle import LOCK, run_cycle
from scheduling.services.dispatch import attempt_token, dispatch, dispatch_cluster
from scheduling.services.errors import Conflict, InvalidRequest
from scheduling.services.jobs import cancel_job, hold_job, in_bulk, mark, release_job, set_priority
from scheduling.services.ledger import check_ledger
from scheduling.services.reconcile import reconcile, reconcile_cluster
from scheduling.services.registry import backend_for
from scheduling.services.replay import replay
from teams.models import Team
from tests.factories import House, house

pytestmark = pytest.mark.django_db


@pytest.fixture
def place() -> House:
    return house()


def until(place: House, done: Callable[[], bool], seconds: float = 20) -> None:
    """Turn the loop until something holds."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, [str(problem) for problem in check_ledger()]
        place.step()
        time.sleep(0.05)


def state(job: Job) -> str:
    return Job.objects.values_list("state", flat=True).get(pk=job.pk)


def consistent() -> None:
    assert [str(problem) for problem in check_ledger()] == []


def test_a_job_starts_on_free_gpus_finishes_and_the_ledger_is_closed(place: House) -> None:
    job = place.submit(gpus=2, simulation={"runs": 1800})
    assert run_cycle().starts == 1
    assert state(job) == "running"
    assert Allocation.objects.filter(attempt__job=job, during__endswith=None).count() == 2
    until(place, lambda: state(job) == "succeeded")
    attempt = job.attempts.get()
    assert attempt.outcome == "succeeded"
    assert attempt.exit_code == 0
    assert not Allocation.objects.filter(during__endswith=None).exists()
    lasted = (attempt.ended_at - attempt.running_at).total_seconds()
    assert lasted == pytest.approx(0.5, abs=0.2)
    consistent()


def test_every_decision_is_stored_with_its_numbers_and_can_be_replayed(place: House) -> None:
    job = place.submit()
    run_cycle()
    decision = Decision.objects.get(job=job, kind="start")
    assert "team vision holds 0 of guarantee 8" in decision.because
    assert [start.job for start in replay(decision.cycle).starts] == [job.pk]


def test_a_gang_that_does_not_fit_says_why_and_does_not_start_in_part(place: House) -> None:
    first = place.submit(gpus=8, interruptible=True)
    gang = place.submit(gpus=8, workers=2, interruptible=True)
    run_cycle()
    assert (state(first), state(gang)) == ("running", "waiting")
    group = Job.objects.select_related("reason_group").get(pk=gang.pk).reason_group
    assert group is not None
    assert (group.code, group.blockers[0]["asked"], group.blockers[0]["free"]) == ("no-capacity", 16_000_000, 8_000_000)


def test_borrowed_gpus_are_given_back_with_grace_and_the_victim_resumes(place: House) -> None:
    long = {"runs": 3600 * 8}
    borrowed = [
        place.submit(name=f"v{n}", gpus=8, interruptible=True, grace=timedelta(seconds=1), simulation=long)
        for n in range(2)
    ]
    place.step()
    place.step()
    assert [state(job) for job in borrowed] == ["running", "running"]
    Attempt.objects.update(started_at=timezone.now() - timedelta(minutes=10))
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL gpuportal.correcting = 'test'")
        cursor.execute("UPDATE scheduling_gpu SET exists = tstzrange(now() - interval '1 day', NULL)")
        cursor.execute(
            "UPDATE scheduling_allocation a SET during = tstzrange(t.started_at, NULL) "
            "FROM scheduling_attempt t WHERE t.id = a.attempt_id"
        )
    owed = place.submit("bob", "nlp", gpus=8, simulation={"runs": 3600})
    assert run_cycle().evictions == 1
    assert Hold.objects.get().job == owed
    victim = Attempt.objects.get(state="stopping")
    assert victim.evicted_for == owed
    until(place, lambda: state(owed) == "running")
    victim.refresh_from_db()
    assert (victim.outcome, victim.cause) == ("preempted", "preemption")
    assert victim.lost_gpu_seconds > 0
    assert state(victim.job) == "waiting"
    until(place, lambda: state(victim.job) == "running")
    assert victim.job.attempts.count() == 2
    consistent()


def test_a_failed_job_is_retried_after_the_backoff_and_then_final(place: House) -> None:
    fails = [{"attempt": n, "after": 60, "exit": 3} for n in (1, 2)]
    job = place.submit(retries=1, simulation={"runs": 600, "fails": fails})
    until(place, lambda: job.attempts.filter(state="ended").exists())
    job.refresh_from_db()
    assert job.state == "waiting"
    assert job.backoff_until is not None
    assert job.backoff_until > timezone.now()
    run_cycle()
    assert state(job) == "waiting"
    Job.objects.filter(pk=job.pk).update(backoff_until=timezone.now())
    until(place, lambda: state(job) == "failed")
    assert list(job.attempts.order_by("number").values_list("outcome", "exit_code")) == [("failed", 3)] * 2
    consistent()


def test_a_dependent_starts_after_success_and_is_cancelled_after_failure(place: House) -> None:
    good = place.submit(simulation={"runs": 60})
    bad = place.submit(simulation={"runs": 60, "fails": [{"attempt": 1, "after": 30}]})
    after_good = place.submit(after=[good.pk], simulation={"runs": 60})
    after_both = place.submit(after=[good.pk, bad.pk])
    run_cycle()
    assert state(after_good) == "waiting"
    until(place, lambda: state(after_good) == "succeeded")
    until(place, lambda: state(after_both) == "cancelled")
    consistent()


def test_a_node_that_goes_down_ends_its_attempts_at_no_cost_to_the_user(place: House) -> None:
    job = place.submit(gpus=8, simulation={"runs": 360_000})
    place.step()
    config = place.cluster.config
    place.cluster.config = {**config, "down": ["n1"]}
    place.cluster.save()
    reconcile()
    job.refresh_from_db()
    attempt = job.attempts.get()
    assert (attempt.outcome, attempt.cause, job.infrastructure_failures, job.user_failures) == (
        "node_failed", "node", 1, 0,
    )  # fmt: skip
    interval = NodeInterval.objects.get(node__name="n1")
    assert (interval.state, interval.during.upper) == ("down", None)
    Job.objects.filter(pk=job.pk).update(backoff_until=None)
    run_cycle()
    assert job.attempts.get(number=2).placement[0][0] != attempt.placement[0][0]
    consistent()


def test_an_unreachable_cluster_gets_nothing_new_and_keeps_what_runs(place: House) -> None:
    old = place.submit(simulation={"runs": 360_000})
    place.step()
    config = dict(place.cluster.config)
    place.cluster.config = {**config, "unreachable": True}
    place.cluster.save()
    reconcile()
    new = place.submit()
    run_cycle()
    assert (state(old), state(new)) == ("running", "waiting")
    assert Job.objects.get(pk=new.pk).reason_group.code == "cluster-unavailable"
    place.cluster.refresh_from_db()
    assert not place.cluster.reachable
    place.cluster.config = config
    place.cluster.save()
    reconcile()
    until(place, lambda: state(new) in ("running", "succeeded"))


def test_a_start_sent_twice_runs_once(place: House) -> None:
    job = place.submit(simulation={"runs": 3600})
    run_cycle()
    dispatch()
    Command.objects.update(state="pending")
    dispatch()
    until(place, lambda: state(job) == "succeeded")
    assert job.attempts.count() == 1
    consistent()


def test_a_crash_between_sending_and_recording_sends_again_and_loses_nothing(place: House) -> None:
    job = place.submit(simulation={"runs": 3600})
    run_cycle()

    class Crash(Exception):
        pass

    class Crashing:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def start(self, command: Any) -> None:
            self.inner.start(command)
            raise Crash

    with pytest.raises(Crash), transaction.atomic():
        dispatch_cluster(place.cluster, backend=Crashing(backend_for(place.cluster)))  # type: ignore[arg-type]
    assert Command.objects.get().state == "pending"
    until(place, lambda: state(job) == "succeeded")
    assert job.attempts.count() == 1


def test_a_crash_in_the_commit_of_a_cycle_leaves_nothing_behind(place: House, monkeypatch: Any) -> None:
    job = place.submit()
    monkeypatch.setattr(cycle_service.Command.objects, "bulk_create", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_cycle()
    assert (state(job), Attempt.objects.count(), Allocation.objects.count(), Cycle.objects.count()) == (
        "waiting", 0, 0, 0,
    )  # fmt: skip
    monkeypatch.undo()
    assert run_cycle().starts == 1


def test_a_job_cancelled_while_the_cycle_plans_does_not_start(place: House, monkeypatch: Any) -> None:
    job = place.submit()
    real = cycle_service.plan

    def plan_and_cancel(snapshot: Any) -> Any:
        decided = real(snapshot)
        if state(job) == "waiting":
            cancel_job(actor=place.actor("ann"), job_id=job.pk)
        return decided

    monkeypatch.setattr(cycle_service, "plan", plan_and_cancel)
    assert run_cycle().starts == 0
    assert state(job) == "cancelled"
    consistent()


def test_an_attempt_that_the_cluster_forgot_is_lost_and_comes_back(place: House) -> None:
    job = place.submit(simulation={"runs": 360_000})
    place.step()
    attempt = job.attempts.get()
    place.cluster.refresh_from_db()
    backend = backend_for(place.cluster)
    with backend._open() as db:  # type: ignore[attr-defined]
        db.execute("DELETE FROM runs")
    reconcile()
    assert Attempt.objects.get(pk=attempt.pk).state != "ended"
    long_ago = timezone.now() - timedelta(minutes=5)
    Attempt.objects.filter(pk=attempt.pk).update(seen_at=long_ago)
    Command.objects.update(done_at=long_ago)
    reconcile()
    attempt.refresh_from_db()
    assert attempt.outcome == "lost"
    assert Drift.objects.get().kind == "missing"
    assert state(job) == "waiting"


def test_a_run_that_the_ledger_closed_is_stopped_on_the_cluster(place: House) -> None:
    stopped = []

    class Odd:
        def observe(self, since: str, attempts: Any) -> Any:
            from scheduling.backends.base import Observation

            report = RunReport(uuid.UUID(int=7), RunState.RUNNING)
            return Observation(timezone.now(), (report,), (), "", False)

        def stop(self, command: Any) -> None:
            stopped.append(command.attempt)

    reconcile_cluster(place.cluster, backend=Odd())  # type: ignore[arg-type]
    assert stopped == [uuid.UUID(int=7)]
    assert Drift.objects.get().kind == "unknown-job"


def test_a_cancelled_running_job_ends_after_its_grace(place: House) -> None:
    job = place.submit(interruptible=True, grace=timedelta(seconds=1), simulation={"runs": 360_000})
    place.step()
    cancel_job(actor=place.actor("ann"), job_id=job.pk)
    until(place, lambda: state(job) == "cancelled")
    assert job.attempts.get().outcome == "cancelled"
    consistent()


def test_a_start_that_was_never_sent_is_not_sent_after_the_cancel(place: House) -> None:
    job = place.submit()
    run_cycle()
    cancel_job(actor=place.actor("ann"), job_id=job.pk)
    dispatch()
    attempt = job.attempts.get()
    assert (attempt.outcome, state(job)) == ("cancelled", "cancelled")
    with pytest.raises(NotFound):
        backend_for(place.cluster).logs(attempt.uuid)
    consistent()


def test_held_jobs_wait_until_they_are_released(place: House) -> None:
    job = place.submit()
    hold_job(actor=place.actor("ann"), job_id=job.pk)
    run_cycle()
    assert Job.objects.get(pk=job.pk).reason_group.code == "held"
    release_job(actor=place.actor("lea"), job_id=job.pk)
    assert run_cycle().starts == 1


def test_changes_need_the_right_person_and_the_latest_version(place: House) -> None:
    job = place.submit()
    with pytest.raises(Job.DoesNotExist):
        cancel_job(actor=place.actor("bob"), job_id=job.pk)
    with pytest.raises(PermissionDenied):
        set_priority(actor=place.actor("ann"), job_id=job.pk, priority="urgent")
    set_priority(actor=place.actor("lea"), job_id=job.pk, priority="urgent", version=1)
    with pytest.raises(Conflict, match="has version 2, not 1"):
        set_priority(actor=place.actor("lea"), job_id=job.pk, priority="low", version=1)


def test_a_bulk_action_tells_each_result(place: House) -> None:
    mine, other = place.submit(), place.submit("bob", "nlp")
    actor = place.actor("ann")
    results = in_bulk([mine.pk, other.pk, 999], lambda number: cancel_job(actor=actor, job_id=number))
    assert [row.done for row in results] == [True, False, False]
    assert state(other) == "waiting"


def test_a_running_job_marks_checkpoints_with_its_own_secret_only(place: House) -> None:
    job = place.submit(simulation={"runs": 3600})
    place.step()
    attempt = job.attempts.get()
    with pytest.raises(PermissionDenied):
        mark(attempt_uuid=str(attempt.uuid), token="wrong", kind="checkpoint")
    mark(attempt_uuid=str(attempt.uuid), token=attempt_token(attempt), kind="checkpoint")
    attempt.refresh_from_db()
    assert attempt.last_checkpoint_at is not None
    assert Job.objects.get(pk=job.pk).first_result_at is not None


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"gpus": 0}, "gpus", "0 is not a whole number from 1 to 62"),
        ({"gpus": 9}, "gpus", "the largest node has 8"),
        ({"gpus": 8, "workers": 3}, "pools", "has room for 2"),
        ({"pools": ["b100"]}, "pools", "Unknown pool 'b100'; there are"),
        ({"team": "marketing"}, "team", "There is no team 'marketing'"),
        ({"team": "nlp"}, "team", "There is no team 'nlp' that you belong to"),
        ({"priority": "urgent"}, "priority", "Only leads"),
        ({"priority": "asap"}, "priority", "'asap' is not one of low, normal, high, urgent"),
        ({"walltime": timedelta(seconds=5)}, "walltime", "is not between"),
        ({"after": [12345]}, "after", "There is no job 12345"),
        ({"environment": {"GPUPORTAL_X": "1"}}, "environment", "set by the portal"),
        ({"environment": {"A B": "1"}}, "environment", "is not a name"),
        ({"name": "a\x00b"}, "name", "Control characters"),
        ({"share": Decimal("0.5")}, "gpus", "Leave out 'gpus'"),
        ({"gpus": 0, "share": Decimal("1.5")}, "share", "is not a fraction"),
        ({"workload_class": "mining"}, "workload_class", "is not one of training"),
        ({"checkpoint_every": timedelta(hours=1)}, "checkpoint_every", "interruptible"),
        ({"topology_level": "planet"}, "topology_level", "'planet' is not one of node"),
        ({"retries": -1}, "retries", "-1 is not a whole number"),
    ],
)
def test_a_request_that_cannot_be_is_refused_at_its_field(
    place: House, change: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        place.submit(**change)
    assert says in " ".join(caught.value.errors[field])
    assert not Job.objects.exists()


def test_inner_teams_own_no_jobs(place: House) -> None:
    Team.objects.create(name="vision-a", parent=place.teams["vision"])
    with pytest.raises(InvalidRequest, match="only leaf teams own jobs"):
        place.submit()


@pytest.mark.django_db(transaction=True)
def test_two_cycles_at_once_are_one_after_the_other(place: House) -> None:
    import psycopg

    place.submit()
    settings = connection.settings_dict
    with psycopg.connect(dbname=settings["NAME"], host=settings["HOST"], user=settings["USER"]) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
        assert run_cycle().locked_out
        other.rollback()
        assert run_cycle().starts == 1


def test_an_error_of_the_cluster_is_tried_again_later(place: House) -> None:
    place.submit()
    run_cycle()

    class Away:
        def start(self, command: Any) -> None:
            raise Unreachable("connection refused")

    dispatch_cluster(place.cluster, backend=Away())  # type: ignore[arg-type]
    command = Command.objects.get()
    assert (command.state, command.tries, command.last_error) == ("pending", 1, "connection refused")
    assert command.due_at > timezone.now()
