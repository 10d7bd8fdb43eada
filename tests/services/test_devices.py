"""The ledger follows the devices that a cluster chose."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal

import pytest
from django.db import transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.models import GPU, Allocation, Attempt, Cluster, GPUModel, Job, Node, Pool
from scheduling.services import clock
from scheduling.services.devices import follow_devices
from scheduling.services.ledger import CHECKS
from teams.models import Team, User

pytestmark = pytest.mark.django_db


@pytest.fixture
def node() -> Node:
    model = GPUModel.objects.create(
        name="h100", memory_bytes=0, tdp_watts=700, idle_watts=70, price_per_hour=Decimal(3)
    )
    cluster = Cluster.objects.create(name="c", kind="slurm")
    pool = Pool.objects.create(name="p", cluster=cluster, gpu_model=model)
    node = Node.objects.create(cluster=cluster, pool=pool, name="n0")
    born = clock.now() - timedelta(days=1)
    for index in range(4):
        GPU.objects.create(node=node, pool=pool, index=index, exists=DateTimeTZRange(born, None, "[)"))
    return node


def attempt_on(node: Node, *devices: int, minutes_ago: float = 10, ended_ago: float | None = None) -> Attempt:
    now = clock.now()
    begun = now - timedelta(minutes=minutes_ago)
    ended = None if ended_ago is None else now - timedelta(minutes=ended_ago)
    team, _ = Team.objects.get_or_create(name="t")
    user, _ = User.objects.get_or_create(username="u")
    state = {"state": "running"} if ended is None else {"state": "succeeded", "finished_at": ended}
    job = Job.objects.create(
        name="j",
        team=team,
        owner=user,
        pools=[node.pool_id],
        submitted_at=begun,
        eligible_at=begun,
        gpus=len(devices),
        **state,
    )
    attempt = Attempt.objects.create(
        job=job, team=team, pool_id=node.pool_id, number=1, workers=1, gpus=len(devices), started_at=begun,
        eligible_at=begun, placement=[[node.pk, sum(1 << d for d in devices), 1_000_000]], ended_at=ended,
        state="running" if ended is None else "ended", outcome="" if ended is None else "succeeded",
    )  # fmt: skip
    for index in devices:
        Allocation.objects.create(
            attempt=attempt, gpu=node.gpus.get(index=index), team=team, pool_id=node.pool_id,
            during=DateTimeTZRange(begun, ended, "[)"),
        )  # fmt: skip
    return attempt


def follow(attempt: Attempt, *devices: int, started: datetime | None = None) -> bool:
    attempt.refresh_from_db()
    with transaction.atomic():
        return follow_devices(attempt, {"n0": devices}, clock.now(), started=started)


def held(attempt: Attempt) -> list[int]:
    rows = Allocation.objects.filter(attempt=attempt, during__endswith=None, during__isempty=False)
    return sorted(rows.values_list("gpu__index", flat=True))


def mask(attempt: Attempt) -> int:
    attempt.refresh_from_db()
    return int(attempt.placement[0][1])


def nothing_broken() -> None:
    from django.db import connection

    for name in ("a device held by more than it has", "an allocation that does not end with its attempt"):
        with connection.cursor() as cursor:
            cursor.execute(CHECKS[name])
            assert cursor.fetchall() == [], name


def test_free_devices_are_taken_for_the_whole_interval(node: Node) -> None:
    attempt = attempt_on(node, 0, 1)
    assert follow(attempt, 1, 3)
    assert held(attempt) == [1, 3]
    assert mask(attempt) == 0b1010
    assert Allocation.objects.filter(attempt=attempt).count() == 2, "no interval is split"
    assert not follow(attempt, 1, 3), "told again it changes nothing"
    nothing_broken()


def test_two_attempts_change_places(node: Node) -> None:
    first, second = attempt_on(node, 0, 1), attempt_on(node, 2, 3, minutes_ago=5)
    assert follow(first, 2, 3)
    assert (held(first), held(second)) == ([2, 3], [0, 1])
    assert not follow(second, 0, 1), "it has been put there already"
    assert (mask(first), mask(second)) == (0b1100, 0b0011)
    nothing_broken()


def test_three_attempts_in_a_circle_come_right(node: Node) -> None:
    attempts = [attempt_on(node, index) for index in range(3)]
    for attempt, device in zip(attempts, (1, 2, 0), strict=True):
        follow(attempt, device)
    assert [held(attempt) for attempt in attempts] == [[1], [2], [0]]
    nothing_broken()


def test_where_an_ended_attempt_held_the_device_meanwhile_the_interval_is_split(node: Node) -> None:
    ended = attempt_on(node, 3, minutes_ago=20, ended_ago=5)
    attempt = attempt_on(node, 0, minutes_ago=10)
    assert follow(attempt, 3)
    assert held(attempt) == [3]
    assert Allocation.objects.filter(attempt=attempt).count() == 2
    assert Allocation.objects.get(attempt=ended).gpu.index == 3, "the history of the other is not touched"
    nothing_broken()


def test_the_split_is_where_the_cluster_started_it(node: Node) -> None:
    attempt_on(node, 3, minutes_ago=20, ended_ago=9)
    attempt = attempt_on(node, 0, minutes_ago=10)
    started = clock.now() - timedelta(minutes=8)
    assert follow(attempt, 3, started=started)
    assert Allocation.objects.get(attempt=attempt, gpu__index=3).during.lower == started
    assert Allocation.objects.get(attempt=attempt, gpu__index=0).during.upper == started
    nothing_broken()


@pytest.mark.parametrize("told", [{"n0": (0,)}, {"n1": (0, 1)}, {"n0": (0, 9)}, {}])
def test_what_cannot_be_compared_is_left_alone(node: Node, told: dict[str, tuple[int, ...]]) -> None:
    attempt = attempt_on(node, 0, 1)
    with transaction.atomic():
        assert not follow_devices(attempt, told, clock.now())
    assert held(attempt) == [0, 1]
