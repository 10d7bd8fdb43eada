"""The demonstration: the trace's own numbers as history, and a feed that goes on from them."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection
from django.db.models import Sum

from scheduling.models import (
    Allocation,
    Attempt,
    Cluster,
    Command,
    DemoFeed,
    GPUSample,
    Job,
    JobEvent,
    NodeInterval,
    PoolState,
)
from scheduling.services import clock
from scheduling.services import demo as service
from scheduling.services.cycle import run_cycle
from scheduling.services.demo import Options, feed, load_demo, shape, slice_length, trace
from scheduling.services.dispatch import dispatch
from scheduling.services.errors import Conflict
from scheduling.services.ledger import check_ledger
from scheduling.services.reconcile import reconcile
from teams.models import Membership, Quota, Team, User

pytestmark = pytest.mark.django_db

SMALL = Options(nodes=4, weeks=1, speed=60, thin=40)


def consistent() -> None:
    assert [str(problem) for problem in check_ledger()] == []


def of_trace(job: Job) -> Any:
    return trace()[int(job.name.rsplit("-", 1)[1])]


def held(job: Job) -> float:
    """GPU-seconds in the ledger."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(share * extract(epoch FROM coalesce(upper(during), %s) - lower(during))), 0)"
            " FROM scheduling_allocation a JOIN scheduling_attempt t ON t.id = a.attempt_id WHERE t.job_id = %s",
            [clock.now(), job.pk],
        )
        return float(cursor.fetchone()[0])


def test_the_history_has_the_gpu_hours_of_the_trace_and_a_consistent_ledger() -> None:
    load_demo(SMALL)
    consistent()
    due = [job for number, job in enumerate(trace()) if number % SMALL.thin == 0 and job.at < 7 * 86_400]
    assert Job.objects.count() == len(due)
    finished = Job.objects.exclude(state__in=["waiting", "running"])
    assert finished.count() > 0.9 * len(due)
    lost = Attempt.objects.filter(outcome__in=["preempted", "node_failed"]).aggregate(x=Sum("lost_gpu_seconds"))["x"]
    ran_twice = finished.filter(attempts__number__gt=1).distinct()
    for job in finished.exclude(pk__in=ran_twice.values("pk")):
        row = of_trace(job)
        assert held(job) == pytest.approx(max(1.0, row.duration) * row.gpus, abs=0.01), job
    asked = sum(max(1.0, of_trace(job).duration) * of_trace(job).gpus for job in finished)
    open_lost = sum(row.lost_gpu_seconds for row in Attempt.objects.filter(job__state__in=["waiting", "running"]))
    assert sum(held(job) for job in finished) == pytest.approx(asked + float(lost - open_lost), rel=1e-6)


def test_every_job_of_the_history_tells_its_life_in_order() -> None:
    load_demo(SMALL)
    for job in Job.objects.prefetch_related("attempts").order_by("pk")[:300]:
        attempts = sorted(job.attempts.all(), key=lambda row: row.number)
        assert [row.number for row in attempts] == list(range(1, len(attempts) + 1))
        assert all(a.ended_at <= b.started_at for a, b in pairwise(attempts))
        if attempts:
            assert job.submitted_at <= attempts[0].started_at == job.first_started_at
        events = list(JobEvent.objects.filter(job=job).order_by("id"))
        assert all(a.at <= b.at for a, b in pairwise(events))
        assert events[-1].to_state == job.state
    assert NodeInterval.objects.filter(state="down").exists()
    assert not GPUSample.objects.filter(activity__gt=1).exists()


def test_the_pool_of_the_past_is_told_as_the_ledger_has_it() -> None:
    load_demo(SMALL)
    capacity = SMALL.nodes * 8
    assert PoolState.objects.count() > 100
    for row in PoolState.objects.order_by("?")[:50]:
        taken = Allocation.objects.filter(during__contains=row.at).aggregate(x=Sum("share"))["x"] or Decimal(0)
        down = NodeInterval.objects.filter(during__contains=row.at).values_list("node_id", flat=True)
        assert row.free == capacity - 8 * len(down) - taken
        assert row.stranded == min(row.free, row.demand)
        assert sum(int(size) * number for size, number in row.pieces.items()) == row.free
        waiting = Job.objects.filter(submitted_at__lt=row.at, first_started_at__gt=row.at).count()
        assert (row.demand > 0) or waiting == 0


def test_what_still_runs_goes_on_on_the_simulated_cluster_and_ends_there() -> None:
    load_demo(SMALL)
    running = list(Attempt.objects.filter(state="running").select_related("job"))
    assert running, "the slice leaves something running"
    assert Command.objects.filter(state="pending").count() == len(running)
    dispatch()
    assert not Command.objects.filter(state="pending").exists()
    reconcile()
    for row in Attempt.objects.filter(pk__in=[row.pk for row in running], state="running"):
        assert row.backend_id.startswith("sim-")
        assert row.running_at == row.started_at < row.seen_at
    run_cycle()
    consistent()
    for row in running:
        left = row.job.simulation["runs"]
        assert 1 <= left <= max(1.0, of_trace(row.job).duration)


def test_the_feed_submits_the_jobs_that_are_due_and_no_other() -> None:
    load_demo(SMALL)
    before = Job.objects.count()
    state = DemoFeed.objects.get()
    begins = state.position
    DemoFeed.objects.update(as_of=clock.now() - timedelta(seconds=8), speed=1000)
    done = feed()
    upto = DemoFeed.objects.get().position
    assert upto - begins == pytest.approx(8000, abs=2000)
    due = [n for n, job in enumerate(trace()) if n % SMALL.thin == 0 and begins <= job.at < upto]
    assert due
    new = list(Job.objects.order_by("id")[before:])
    assert done == len(due) == len(new)
    assert [job.name for job in new] == [f"philly-{number:05d}" for number in due]
    assert {job.team.name for job in new} == {trace()[number].team for number in due}
    assert feed() <= 5


def test_the_feed_comes_round_at_the_end_of_the_slice() -> None:
    load_demo(SMALL)
    DemoFeed.objects.update(position=slice_length() - 100, speed=1000, as_of=clock.now() - timedelta(seconds=5))
    feed()
    assert 3_000 < DemoFeed.objects.get().position < 7_000


def test_while_the_portal_is_off_the_trace_stands_still() -> None:
    load_demo(SMALL)
    begins = DemoFeed.objects.get().position
    DemoFeed.objects.update(as_of=clock.now() - timedelta(days=2))
    feed()
    assert DemoFeed.objects.get().position - begins <= 10 * 60 + 1


def test_a_job_that_cannot_be_submitted_does_not_stop_the_feed() -> None:
    load_demo(SMALL)
    Team.objects.filter(name="6214e9").update(archived_at=clock.now())
    DemoFeed.objects.update(speed=1000, as_of=clock.now() - timedelta(seconds=10))
    begins, before = DemoFeed.objects.get().position, Job.objects.count()
    feed()
    upto = DemoFeed.objects.get().position
    due = [job for n, job in enumerate(trace()) if n % SMALL.thin == 0 and begins <= job.at < upto]
    assert Job.objects.count() - before == sum(job.team != "6214e9" for job in due) < len(due)


def test_four_accounts_have_passwords_that_are_never_the_same_and_work_once() -> None:
    accounts = load_demo(SMALL)
    assert [account.role for account in accounts] == ["researcher", "team lead", "manager", "administrator"]
    for account in accounts:
        user = User.objects.get(username=account.username)
        assert user.check_password(account.password)
        assert user.must_change_password
    assert {row.role for row in Membership.objects.filter(user__username__in=["rita", "leo"])} == {"member", "lead"}
    first = {account.password for account in accounts}
    assert not first & {account.password for account in load_demo(SMALL, reset=True)}


def test_guarantees_follow_the_virtual_clusters_and_fit_the_hardware() -> None:
    load_demo(SMALL)
    assert Team.objects.filter(parent__isnull=True).count() == 3
    assert Team.objects.filter(parent__isnull=False).count() == len(service.shares_of_nodes()) == 11
    leaves = Quota.objects.filter(team__parent__isnull=False)
    assert leaves.aggregate(x=Sum("guaranteed"))["x"] <= SMALL.nodes * 8
    shares = service.shares_of_nodes()
    for row in leaves.select_related("team"):
        assert row.guaranteed == shares[row.team.name] * SMALL.nodes * 8 // sum(shares.values())


@pytest.mark.parametrize(("gpus", "expected"), [(1, (1, 1)), (8, (1, 8)), (12, (2, 6)), (24, (3, 8)), (32, (4, 8))])
def test_a_job_of_the_trace_becomes_a_gang_of_whole_nodes(gpus: int, expected: tuple[int, int]) -> None:
    assert shape(gpus) == expected


def test_no_job_of_the_trace_changes_its_size() -> None:
    for job in trace():
        workers, gpus = shape(job.gpus)
        assert workers * gpus == job.gpus


def test_a_database_with_anything_in_it_is_left_alone() -> None:
    Team.objects.create(name="ours")
    with pytest.raises(Conflict, match="not empty"):
        load_demo(SMALL)
    with pytest.raises(Conflict, match="no demonstration"):
        load_demo(SMALL, reset=True)
    assert list(Team.objects.values_list("name", flat=True)) == ["ours"]


def test_a_reset_throws_the_old_demonstration_away_whole() -> None:
    load_demo(SMALL)
    User.objects.create(username="someone")
    load_demo(SMALL, reset=True)
    assert not User.objects.filter(username="someone").exists()
    assert (Cluster.objects.get().pk, DemoFeed.objects.count(), Job.objects.order_by("id").first().pk) == (1, 1, 1)
    consistent()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "3"], "--nodes: 3 is not from 4 to 2000"),
        (["--weeks", "5"], "--weeks: 5 is not from 1 to 4"),
        (["--speed", "0"], "--speed: 0.0 is not from 1 to 1000"),
        (["--thin", "0"], "--thin: 0 is not from 1 to 100"),
        (["--reset"], "confirm it with --yes"),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        call_command("demo", *arguments, stdout=StringIO())
    assert not Team.objects.exists()


def test_the_command_prints_the_accounts() -> None:
    out = StringIO()
    call_command("demo", "--nodes", "4", "--weeks", "1", "--thin", "50", "--yes", stdout=out)
    for username in ("rita", "leo", "mara", "ada"):
        assert username in out.getvalue()
