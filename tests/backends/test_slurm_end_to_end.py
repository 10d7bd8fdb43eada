"""200 mixed jobs of three teams, through the loop, on a real Slurm with 4 nodes of 8 GPUs: the ledger is Slurm's."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest

from scheduling.models import Allocation, Attempt, Cluster, Drift, Job, Pool
from scheduling.services.connect import discover, save_cluster
from scheduling.services.cycle import run_cycle
from scheduling.services.dispatch import dispatch
from scheduling.services.ledger import CHECKS
from scheduling.services.policy import set_policy
from scheduling.services.reconcile import reconcile
from scheduling.services.submit import JobSpec, submit_job
from teams.actors import Actor
from teams.models import Membership, Team, User
from teams.services.quotas import QuotaSpec, set_quota
from tests.backends.slurm_cluster import ACCOUNTS, SlurmCluster, running_slurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.django_db(transaction=True),
]

SYSTEM = Actor.system("tests")
TEAMS = ("vision", "speech", "robots")
#: Guaranteed GPUs in each pool of 16.
GUARANTEED = {"vision": 8, "speech": 4, "robots": 4}
LONG_JOBS = 8

#: Each worker notes where it ran and on which devices, as Slurm gave them to it.
NOTE = 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES" >>"$GPUPORTAL_RECORD.noted"\n'
#: Works until its checkpoint says that it has done enough; writes it when told to stop.
RESUMABLE = (
    NOTE
    + """state="$GPUPORTAL_CHECKPOINT_DIR/done"; mkdir -p "$GPUPORTAL_CHECKPOINT_DIR"
done=$(cat "$state" 2>/dev/null || echo 0)
trap 'echo "$done" >"$state"; exit 143' TERM
while [ "$done" -lt %d ]; do sleep 0.5 & wait $!; done=$((done + 1)); done
echo "$done" >"$state"
"""
)


@pytest.fixture
def portal() -> Iterator[tuple[SlurmCluster, Cluster]]:
    with running_slurm() as slurm:
        config, secret = slurm.config("commands", checkpoint_directory=str(slurm.base / "jobs" / "checkpoints"))
        (slurm.base / "jobs" / "checkpoints").mkdir(mode=0o1777)
        (slurm.base / "jobs" / "checkpoints").chmod(0o1777)
        config["dispatch_parallel"] = 4
        discovery = discover("slurm", "slurm", config, secret)
        cluster = save_cluster(
            actor=SYSTEM, name="slurm", kind="slurm", config=config, secret=secret, description=discovery.description
        )
        set_policy(actor=SYSTEM, changes={"min_runtime": 5, "backoff": 1, "backoff_max": 4}, reason="test")
        for name, account in zip(TEAMS, ACCOUNTS, strict=True):
            team = Team.objects.create(name=name)
            user = User.objects.create(username=account)
            Membership.objects.create(user=user, team=team, role="lead")
            for pool in Pool.objects.all():
                set_quota(actor=SYSTEM, team=team, pool_id=pool.pk, spec=QuotaSpec(Decimal(GUARANTEED[name])))
        yield slurm, cluster


def submit(team: str, **changes: object) -> Job:
    user = User.objects.get(username=ACCOUNTS[TEAMS.index(team)])
    given: dict[str, object] = {
        "name": "job",
        "team": team,
        "walltime": timedelta(minutes=5),
        "pools": list(Pool.objects.values_list("name", flat=True)),
    }
    return submit_job(actor=Actor.person(user), spec=JobSpec(**(given | changes)))  # type: ignore[arg-type]


def submit_mixture(dice: random.Random) -> None:
    """Single GPUs, whole nodes, gangs even and uneven, jobs that fail once, urgent ones, shares of none."""
    shapes = [(1, 1)] * 8 + [(1, 2)] * 5 + [(1, 4)] * 3 + [(1, 8)] + [(2, 1)] * 2 + [(3, 2)] + [(2, 4)] + [(5, 2)]
    for index in range(200 - LONG_JOBS):
        workers, gpus = dice.choice(shapes)
        seconds = dice.uniform(3, 6)
        command = f"{NOTE}sleep {seconds:.1f}\n"
        if index % 20 == 7:
            command += '[ "$GPUPORTAL_RESTART_COUNT" -gt 0 ] || exit 3\n'
        submit(
            dice.choices(TEAMS, (2, 1, 1))[0],
            name=f"job-{index}",
            workers=workers,
            gpus=gpus,
            command=command,
            retries=1,
            priority="high" if index % 13 == 0 else "normal",
            interruptible=workers * gpus > 4,
            grace=timedelta(seconds=5),
        )


def drive(until: float) -> None:
    """The loop, until every job has ended."""
    while Job.objects.filter(finished_at=None).exists():
        assert time.monotonic() < until, Counter(Job.objects.values_list("state", flat=True))
        one_round()


def one_round() -> None:
    run_cycle()
    dispatch()
    reconcile()
    time.sleep(0.1)


def test_200_mixed_jobs_end_well_and_the_ledger_is_slurms(portal: tuple[SlurmCluster, Cluster]) -> None:
    slurm, _ = portal
    began = time.monotonic()
    # One team borrows everything; then the others come for their guarantees.
    for index in range(LONG_JOBS):
        submit(
            "vision",
            name=f"long-{index}",
            gpus=4,
            command=RESUMABLE % 60,
            interruptible=True,
            checkpoint_every=timedelta(seconds=30),
            grace=timedelta(seconds=10),
        )
    end = time.monotonic() + 60
    while Attempt.objects.filter(state="running").count() < LONG_JOBS:
        assert time.monotonic() < end, "all 32 GPUs are to be borrowed"
        one_round()
    submit_mixture(random.Random(4))
    drive(time.monotonic() + 480)

    assert Counter(Job.objects.values_list("state", flat=True)) == {"succeeded": 200}
    evicted = Attempt.objects.filter(outcome="preempted")
    assert evicted.exists(), "guarantees were given back by evictions"
    for job in Job.objects.filter(name__startswith="long-"):
        done = slurm.base / "jobs" / "checkpoints" / str(job.pk) / "done"
        assert done.read_text().strip() == "60", "it went on from its checkpoint and did all its work"
    compare_with_slurm(slurm)
    for name, query in CHECKS.items():
        assert rows(query) == [], name
    print(f"{Attempt.objects.count()} attempts, {evicted.count()} evicted, {time.monotonic() - began:.0f} s")  # noqa: T201


def compare_with_slurm(slurm: SlurmCluster) -> None:
    """Outcome, exit code, nodes, devices and times of every attempt, against what Slurm says and its jobs noted."""
    said = {}
    for job in json.loads(slurm.run("squeue", "--json"))["jobs"]:
        if job["het_job_offset"] == 0:
            said[json.loads(job["comment"])["attempt"]] = job
    held: dict[tuple[str, int], list[tuple[datetime, datetime]]] = defaultdict(list)
    attempts = list(Attempt.objects.exclude(backend_id="").select_related("job__owner"))
    assert {str(attempt.uuid) for attempt in attempts} == set(said), "as many jobs in Slurm as attempts, one each"
    unsent = Attempt.objects.filter(backend_id="").values_list("detail", flat=True)
    assert set(unsent) <= {"stopped before it was sent"}
    for attempt in attempts:
        job = said[str(attempt.uuid)]
        assert attempt.backend_id == str(job["job_id"])
        assert job["user_name"] == attempt.job.owner.username
        assert attempt.outcome == expected_outcome(job, attempt)
        status = job["exit_code"]
        assert attempt.exit_code == (status >> 8 if not status & 0x7F else 128 + (status & 0x7F))
        start, end = (datetime.fromtimestamp(job[name], UTC) for name in ("start_time", "end_time"))
        # The ledger begins with the decision: before Slurm's start. It ends to the second with Slurm.
        assert attempt.started_at - timedelta(seconds=1) <= start
        assert attempt.ended_at == max(end, attempt.started_at)
        rows_of_it = Allocation.objects.filter(attempt=attempt, during__endswith=attempt.ended_at)
        devices = {(row.gpu.node.name, row.gpu.index) for row in rows_of_it.select_related("gpu__node")}
        noted = noted_devices(slurm, str(attempt.uuid))
        if noted:  # else it was stopped before it came to it
            assert devices == noted, f"attempt {attempt.uuid}: ledger {sorted(devices)}, Slurm {sorted(noted)}"
        for device in devices:
            held[device].append((start, end))
    for device, intervals in held.items():
        ordered = sorted(intervals)
        for (_, end), (start, _) in pairwise(ordered):
            assert end <= start, f"{device} was held twice"
    assert not Drift.objects.exists()


def expected_outcome(job: dict[str, object], attempt: Attempt) -> str:
    state = job["job_state"]
    if attempt.stop_requested_at is not None and state != "COMPLETED":
        return "preempted"
    return {"COMPLETED": "succeeded", "FAILED": "failed", "TIMEOUT": "timed_out"}[str(state)]


def noted_devices(slurm: SlurmCluster, attempt: str) -> set[tuple[str, int]]:
    path = Path(slurm.output) / f"{attempt}.noted"
    if not path.exists():
        return set()
    found = set()
    for line in path.read_text().splitlines():
        node, devices = line.split()
        found |= {(node, int(index)) for index in devices.split(",")}
    return found


def rows(query: str) -> list[object]:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())
