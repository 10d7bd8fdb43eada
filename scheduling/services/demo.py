"""The demonstration: a slice of the real Philly trace as history and as a live feed on a simulated cluster.

The history is what the engine itself makes of the trace: a simulation over the past weeks, written down as jobs,
attempts and allocations. From then on the feed goes on submitting the trace's jobs at their own times, sped up.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import structlog
from django.core.exceptions import PermissionDenied
from django.db import connection, transaction

from scheduling.backends.simulated import chance
from scheduling.engine.scenario import Event, JobSpec, Scenario
from scheduling.engine.simulation import Run, Simulation
from scheduling.engine.snapshot import GPU, Cluster, Node, Policy, Pool, Quota, Request, Team
from scheduling.models import Cluster as ClusterRow
from scheduling.models import DemoFeed, PolicyVersion
from scheduling.models import Pool as PoolRow
from scheduling.services import clock
from scheduling.services.connect import discover, save_cluster
from scheduling.services.demo_history import FAILS, GRACE, write_history
from scheduling.services.errors import Conflict, InvalidRequest
from scheduling.services.registry import simulated_store
from scheduling.services.submit import JobSpec as SubmitSpec
from scheduling.services.submit import submit_jobs
from scheduling.services.wakeup import wake_cycle, wake_dispatch
from teams.actors import Actor
from teams.models import Membership, Role, StaffRole, User
from teams.models import Team as TeamRow
from teams.services.quotas import QuotaSpec, set_quota
from teams.services.users import create_user

log = structlog.get_logger(__name__)

DATA = Path(__file__).resolve().parent.parent / "demo_data"
ACTOR = Actor.system("demonstration")
CLUSTER = "philly"
SEED = 2017
GPUS_PER_NODE = 8
CHECKPOINT = 1800.0

DEPARTMENTS: dict[str, tuple[str, ...]] = {
    "vision": ("6214e9", "7f04ca", "11cb48", "103959"),
    "language": ("b436b2", "ee9e8c", "e13805"),
    "speech": ("6c71a0", "2869ce", "ed69ec", "0e4a51"),
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One row of the trace: seconds since the slice begins."""

    at: float
    duration: float
    gpus: int
    team: str


@lru_cache(maxsize=1)
def trace() -> tuple[TraceJob, ...]:
    with gzip.open(DATA / "philly-2017-10.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    first = datetime.fromisoformat(rows[0]["timestamp"]).replace(hour=0, minute=0, second=0, tzinfo=UTC)
    return tuple(
        TraceJob(
            (datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC) - first).total_seconds(),
            float(row["duration"]),
            int(row["num_gpus"]),
            row["cluster"],
        )
        for row in rows
    )


def slice_length() -> float:
    """Whole weeks, so that the feed comes round at the same time of the week."""
    week = 7 * 86_400.0
    return -(-trace()[-1].at // week) * week


def database_is_empty() -> bool:
    return not TeamRow.objects.exists() and not ClusterRow.objects.exists() and not User.objects.exists()


@dataclass(frozen=True, slots=True)
class Options:
    nodes: int = 20
    weeks: int = 3
    speed: float = 60.0
    thin: int = 5


@dataclass(frozen=True, slots=True)
class Account:
    """A sign-in of the demonstration; the password works once."""

    role: str
    username: str
    password: str


def _silent(_: str) -> None:
    """Tell nobody."""


def load_demo(options: Options, say: Say = _silent, *, reset: bool = False) -> list[Account]:
    """Fill an empty database, or with ``reset`` one that holds a demonstration already, which is then thrown away.

    Raises ``Conflict`` when the database holds anything else. All or nothing.
    """
    with transaction.atomic():
        if reset and not database_is_empty():
            say("Throwing the old demonstration away …")
            _empty_database()
        return _load(options, say)


def _empty_database() -> None:
    """Everything goes, the ledger too: only where the database was filled by a demonstration."""
    if not DemoFeed.objects.exists():
        raise Conflict("The database holds no demonstration; --reset only throws away a demonstration.")
    with connection.cursor() as cursor:
        kept = {"django_migrations", "django_content_type", "auth_permission"}
        tables = [name for name in connection.introspection.table_names(cursor) if name not in kept]
        names = ", ".join(connection.ops.quote_name(name) for name in tables)
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # nothing may be left to check on what goes
        cursor.execute(f"TRUNCATE {names} RESTART IDENTITY")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")


def _forget_old_runs() -> None:
    """Job numbers begin again: runs of an earlier database would be taken for theirs."""
    store = simulated_store(CLUSTER)
    for suffix in ("", "-wal", "-shm"):
        store.with_name(store.name + suffix).unlink(missing_ok=True)


def _load(options: Options, say: Say) -> list[Account]:
    if not database_is_empty():
        raise Conflict("The database is not empty; the demonstration is only loaded into an empty one.")
    _forget_old_runs()
    now = clock.now()
    begins = now - timedelta(weeks=options.weeks)
    say("Connecting a simulated cluster …")
    pool = _cluster(options, begins)
    say("Making teams, quotas and accounts …")
    teams = _teams(pool, options, begins)
    accounts = _accounts(teams)
    _policy(options.speed)
    say(f"Scheduling {options.weeks} weeks of the trace as history …")
    run = _simulate(options, pool, teams)
    say("Writing the history down …")
    write_history(run, begins, now, pool, _owners(), SEED)
    DemoFeed.objects.create(position=options.weeks * 7 * 86_400.0, speed=options.speed, thin=options.thin, as_of=now)
    wake_dispatch()
    wake_cycle()
    return accounts


# -- hardware, teams, accounts ---------------------------------------------------------------------------------


def _cluster(options: Options, begins: datetime) -> PoolRow:
    racks = [
        {
            "name": f"r{rack + 1}n[1-{min(4, options.nodes - 4 * rack)}]",
            "gpus": GPUS_PER_NODE,
            "gpu_model": "P100",
            "gpu_memory": 16 << 30,
            "domains": {"rack": f"r{rack + 1}"},
            "shareable": rack == 0,
        }
        for rack in range(-(-options.nodes // 4))
    ]
    config = {"speed": options.speed, "seed": SEED, "levels": ["rack"], "nodes": racks}
    found = discover(CLUSTER, "simulated", config, {})
    cluster = save_cluster(
        actor=ACTOR, name=CLUSTER, kind="simulated", config=config, secret={}, description=found.description
    )
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_gpu SET exists = tstzrange(%s, NULL, '[)')", [begins])
    return cluster.pools.get()


def shares_of_nodes() -> dict[str, int]:
    with (DATA / "philly-virtual-clusters.csv").open(newline="") as file:
        return {row["vc"]: int(row["node num"]) for row in csv.DictReader(file)}


def _teams(pool: PoolRow, options: Options, begins: datetime) -> dict[str, TeamRow]:
    """Departments and leaves; guarantees in proportion to the virtual clusters' nodes, rounded down."""
    nodes = shares_of_nodes()
    whole = sum(nodes.values())
    capacity = options.nodes * GPUS_PER_NODE
    guarantee = {name: Decimal(count * capacity // whole) for name, count in nodes.items()}
    teams: dict[str, TeamRow] = {}
    for department, names in DEPARTMENTS.items():
        parent = TeamRow.objects.create(name=department, title=department.capitalize())
        total = sum((guarantee[name] for name in names), Decimal(0))
        set_quota(actor=ACTOR, team=parent, pool_id=pool.pk, spec=QuotaSpec(total), reason="demonstration")
        for name in names:
            teams[name] = TeamRow.objects.create(name=name, title=f"Philly virtual cluster {name}", parent=parent)
            set_quota(
                actor=ACTOR, team=teams[name], pool_id=pool.pk, spec=QuotaSpec(guarantee[name]), reason="demonstration"
            )
            robot = User.objects.create(username=f"philly-{name}", is_active=False)
            robot.set_unusable_password()
            robot.save()
            Membership.objects.create(user=robot, team=teams[name], role=Role.MEMBER)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE teams_quota SET during = tstzrange(%s, NULL, '[)')", [begins])
    return teams


def _accounts(teams: dict[str, TeamRow]) -> list[Account]:
    made = []
    for role, username, staff in (
        ("researcher", "rita", StaffRole.NONE),
        ("team lead", "leo", StaffRole.NONE),
        ("manager", "mara", StaffRole.MANAGER),
        ("administrator", "ada", StaffRole.ADMIN),
    ):
        user, password = create_user(actor=ACTOR, username=username, staff_role=staff.value)
        made.append(Account(role, username, password))
        if role in ("researcher", "team lead"):
            wanted = Role.MEMBER if role == "researcher" else Role.LEAD
            Membership.objects.create(user=user, team=teams["6214e9"], role=wanted)
    return made


def _owners() -> dict[str, User]:
    return {user.username.removeprefix("philly-"): user for user in User.objects.filter(username__startswith="philly-")}


def _policy(speed: float) -> None:
    """Durations of the policy shrink with the speed, or no eviction would ever be allowed."""
    PolicyVersion.objects.create(
        settings={
            "half_life": max(3600.0, 7 * 86_400 / speed),
            "min_runtime": 300 / speed,
            "default_walltime": max(60.0, 86_400 / speed),
            "plan_timeout": max(30.0, 600 / speed),
            "backoff": max(1.0, 30 / speed),
            "grow_after": max(5.0, 600 / speed),
        },
        reason=f"demonstration at {speed:g} times real time",
    )


# -- history ---------------------------------------------------------------------------------------------------


def _thinned(thin: int) -> Iterator[tuple[int, TraceJob]]:
    """Every ``thin``-th job, the same ones in history and feed."""
    return ((number, job) for number, job in enumerate(trace()) if number % thin == 0)


def interruptible(number: int) -> bool:
    return chance(SEED, "interruptible", number) < 0.7


def ends_badly(number: int) -> bool:
    """The trace has no end states: one in ten fails at its end (drawn)."""
    return chance(SEED, "failed", number) < FAILS


def _simulate(options: Options, pool: PoolRow, teams: dict[str, TeamRow]) -> Run:
    node_rows = list(pool.nodes.order_by("pk"))
    engine_pool = Pool(pool.pk, pool.name, pool.cluster_id)
    nodes = tuple(Node(row.pk, row.name, pool.pk, GPUS_PER_NODE, (row.domains["rack"],)) for row in node_rows)
    quotas = {row.team_id: Quota(int(row.guaranteed * GPU)) for row in pool.quotas.all()}
    engine_teams = tuple(
        Team(row.pk, row.name, row.parent_id, MappingProxyType({pool.pk: quotas[row.pk]} if row.pk in quotas else {}))
        for row in TeamRow.objects.all()
    )
    until = options.weeks * 7 * 86_400.0
    jobs = tuple(
        _spec(number, job, pool.pk, teams[job.team].pk) for number, job in _thinned(options.thin) if job.at < until
    )
    scenario = Scenario(
        name="demonstration",
        file="demonstration",
        start=datetime(2017, 10, 2, tzinfo=UTC),
        tick=3600.0,
        policy=Policy(),
        clusters=(Cluster(pool.cluster_id, CLUSTER, ("rack",)),),
        pools=(engine_pool,),
        nodes=nodes,
        teams=engine_teams,
        jobs=jobs,
        events=tuple(_outages(nodes, until)),
    )
    return Simulation(scenario, until=until).run()


def _spec(number: int, job: TraceJob, pool: int, team: int) -> JobSpec:
    workers, gpus = shape(job.gpus)
    free = interruptible(number)
    request = Request(
        pools=(pool,),
        gpus=gpus,
        workers=workers,
        min_workers=workers,
        interruptible=free,
        checkpoint_every=CHECKPOINT if free else None,
    )
    return JobSpec(number + 1, f"philly-{number:05d}", team, request, runs=max(1.0, job.duration), at=job.at)


def shape(gpus: int) -> tuple[int, int]:
    """Workers and GPUs per worker of a job of the trace: whole nodes above eight GPUs."""
    if gpus <= GPUS_PER_NODE:
        return 1, gpus
    workers = -(-gpus // GPUS_PER_NODE)
    return workers, -(-gpus // workers)


def _outages(nodes: tuple[Node, ...], until: float) -> Iterator[Event]:
    """A node fails every few days and is back after some hours."""
    at, number = 2.2 * 86_400, 0
    while at < until - 86_400:
        node = nodes[int(chance(SEED, "node", number) * len(nodes))]
        hours = 2 + 10 * chance(SEED, "outage", number)
        for when, state in ((at, "down"), (at + hours * 3600, "up")):
            yield Event(when, "node", MappingProxyType({"nodes": [node.id], "is": state}))
        number += 1
        at += (1.5 + 2 * chance(SEED, "gap", number)) * 86_400


# -- the live feed ---------------------------------------------------------------------------------------------


def feed() -> int:
    """Submit what is due; returns how many jobs. While the portal was off the trace stood still."""
    with transaction.atomic():
        state = DemoFeed.objects.select_for_update(skip_locked=True).filter(running=True).first()
        if state is None:
            return 0
        now = clock.now()
        elapsed = min(10.0, max(0.0, (now - state.as_of).total_seconds()))
        upto = state.position + elapsed * state.speed
        length = slice_length()
        due = [
            (number, job)
            for number, job in _thinned(state.thin)
            if state.position <= job.at < upto or state.position <= job.at + length < upto
        ]
        state.position = upto if upto < length else upto - length
        state.as_of = now
        state.save(update_fields=["position", "as_of"])
        owners = _owners()
        for number, job in due:
            try:
                submit_jobs(actor=ACTOR, spec=_live(number, job), owner=owners[job.team])
            except (InvalidRequest, PermissionDenied) as error:  # somebody has changed teams or hardware
                log.warning("demo.not_submitted", job=number, team=job.team, error=str(error))
    return len(due)


def _live(number: int, job: TraceJob) -> SubmitSpec:
    workers, gpus = shape(job.gpus)
    seconds = max(1.0, job.duration)
    free = interruptible(number)
    fails = [{"attempt": 1, "after": seconds, "exit": 1, "cause": "user"}] if ends_badly(number) else []
    return SubmitSpec(
        name=f"philly-{number:05d}",
        team=job.team,
        command=f"python train.py --trace-job {number}",
        gpus=gpus,
        workers=workers,
        interruptible=free,
        checkpoint_every=timedelta(seconds=CHECKPOINT) if free else None,
        grace=timedelta(seconds=GRACE) if free else timedelta(0),
        simulation={"runs": seconds, "fails": fails},
    )
