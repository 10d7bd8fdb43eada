"""Rows -> the engine's snapshot. Only what can matter is read, without model instances.

Ids are those of the database, instants POSIX seconds, amounts millionths. Finished jobs are never touched, so that the
age of an installation does not slow its loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Q, QuerySet

from scheduling.engine.snapshot import (
    GPU,
    AttemptState,
    NodeState,
    Policy,
    Priority,
    Request,
    Snapshot,
    WindowKind,
    WorkloadClass,
)
from scheduling.engine.snapshot import (
    Attempt as EngineAttempt,
)
from scheduling.engine.snapshot import (
    Cluster as EngineCluster,
)
from scheduling.engine.snapshot import (
    Hold as EngineHold,
)
from scheduling.engine.snapshot import (
    Job as EngineJob,
)
from scheduling.engine.snapshot import (
    Node as EngineNode,
)
from scheduling.engine.snapshot import (
    Pool as EnginePool,
)
from scheduling.engine.snapshot import (
    Quota as EngineQuota,
)
from scheduling.engine.snapshot import (
    Team as EngineTeam,
)
from scheduling.engine.snapshot import (
    Window as EngineWindow,
)
from scheduling.models import GPU as GPURow
from scheduling.models import Attempt, Cluster, Hold, Job, Node, Pool, Window
from scheduling.services.amounts import millionths, placement_of
from scheduling.services.budgets import exhausted_teams
from scheduling.services.policy import current_policy
from scheduling.services.usage import Key, decayed_usage
from scheduling.services.windows import occurrences
from teams.models import Quota, Team

#: Windows that begin later than this from now do not concern any job yet.
HORIZON = timedelta(days=30)


@dataclass(slots=True)
class Loaded:
    """A snapshot and what the commit needs to know about the rows behind it."""

    snapshot: Snapshot
    now: datetime
    #: By job id, as read: its version (a changed one is not decided on) and its present reason group.
    versions: dict[int, int]
    groups: dict[int, int | None]
    usage: dict[Key, float]
    attempt_jobs: dict[int, int]


def engine_hardware(
    node_rows: QuerySet[Node] | None = None,
) -> tuple[tuple[EngineCluster, ...], tuple[EnginePool, ...], tuple[EngineNode, ...]]:
    """Clusters, pools and nodes in the engine's terms."""
    clusters = {
        cluster.pk: EngineCluster(
            cluster.pk, cluster.name, tuple(cluster.levels), cluster.reachable and cluster.enabled
        )
        for cluster in Cluster.objects.all()
    }
    pools = tuple(
        EnginePool(
            pool.pk,
            pool.name,
            pool.cluster_id,
            pool.gpu_model.memory_bytes,
            pool.default_walltime.total_seconds() if pool.default_walltime else None,
            float(pool.gpu_model.relative_speed),
        )
        for pool in Pool.objects.select_related("gpu_model").order_by("id")
    )
    rows = Node.objects.filter(retired_at=None) if node_rows is None else node_rows
    sizes, broken = _devices()
    nodes = []
    for number, name, pool, cluster, state, domains, shareable in rows.values_list(
        "id", "name", "pool_id", "cluster_id", "state", "domains", "shareable"
    ):
        if not sizes.get(number):
            continue
        levels = clusters[cluster].levels
        nodes.append(
            EngineNode(
                number,
                name,
                pool,
                sizes[number],
                tuple(str(domains.get(level, "")) for level in levels),
                NodeState(state),
                shareable,
                broken.get(number, 0),
            )
        )
    return tuple(clusters.values()), pools, tuple(nodes)


def _devices() -> tuple[dict[int, int], dict[int, int]]:
    """Devices per node, and which of them are broken (bit mask)."""
    sizes: dict[int, int] = {}
    with connection.cursor() as cursor:
        cursor.execute("SELECT node_id, max(index) + 1 FROM scheduling_gpu WHERE upper_inf(exists) GROUP BY node_id")
        sizes.update(cursor.fetchall())
    broken: dict[int, int] = {}
    for node, index in GPURow.objects.filter(broken=True, exists__endswith=None).values_list("node_id", "index"):
        broken[node] = broken.get(node, 0) | 1 << index
    return sizes, broken


def load(now: datetime) -> Loaded:
    """Everything that one cycle looks at."""
    policy = current_policy()
    clusters, pools, nodes = engine_hardware()
    usage = decayed_usage(now, policy.half_life)
    loader = _Jobs(now)
    running = loader.running()
    holds = tuple(
        EngineHold(job, pool, placement_of(rows), expires.timestamp(), tuple(victims), workers)
        for job, pool, rows, expires, victims, workers in Hold.objects.values_list(
            "job_id", "pool_id", "placement", "expires_at", "victims", "workers"
        )
    )
    waiting = loader.waiting()
    snapshot = Snapshot(
        now=now.timestamp(),
        policy=policy,
        clusters=clusters,
        pools=pools,
        nodes=nodes,
        teams=load_teams(now, usage),
        waiting=waiting,
        running=running,
        holds=holds,
        windows=load_windows(now, policy),
        growable_since=loader.growable,
    )
    return Loaded(snapshot, now, loader.versions, loader.groups, usage, loader.attempt_jobs)


def load_teams(now: datetime, usage: dict[Key, float]) -> tuple[EngineTeam, ...]:
    """The tree with the quotas in force at ``now``."""
    quotas: dict[int, dict[int, EngineQuota]] = {}
    for team, pool, guaranteed, limit, weight in Quota.objects.filter(during__contains=now).values_list(
        "team_id", "pool_id", "guaranteed", "limit", "weight"
    ):
        quotas.setdefault(team, {})[pool] = EngineQuota(
            millionths(guaranteed), None if limit is None else millionths(limit), float(weight)
        )
    used: dict[int, dict[int, float]] = {}
    for (team, pool), hours in usage.items():
        used.setdefault(team, {})[pool] = hours
    return tuple(
        EngineTeam(number, name, parent, quotas.get(number, {}), used.get(number, {}))
        for number, name, parent in Team.objects.values_list("id", "name", "parent_id")
    )


def load_windows(now: datetime, policy: Policy) -> tuple[EngineWindow, ...]:
    """Occurrences of all windows from now on; each is a window of its own for the engine."""
    found: list[EngineWindow] = []
    rows = Window.objects.filter(cancelled_at=None).filter(Q(weekly=True) | Q(ends_at__gt=now))
    for window in rows.prefetch_related("nodes").order_by("id"):
        nodes = tuple(sorted(node.pk for node in window.nodes.all()))
        for begins, ends in occurrences(window, now, now + HORIZON):
            found.append(
                EngineWindow(
                    len(found) + 1,
                    window.name,
                    WindowKind(window.kind),
                    nodes,
                    begins.timestamp(),
                    ends.timestamp(),
                    window.team_id,
                )
            )
    return tuple(found)


_JOB_FIELDS = (
    "id", "name", "team_id", "priority", "submitted_at", "walltime", "held", "not_before", "backoff_until",
    "unmet_dependencies", "avoid_nodes", "unsatisfiable", "version", "reason_group_id",
    "pools", "gpus", "share", "share_memory_bytes", "workers", "min_workers", "interruptible", "checkpoint_every",
    "grace", "topology_level", "topology_required", "workload_class",
)  # fmt: skip
_SHAPE_FROM = _JOB_FIELDS.index("pools")


class _Jobs:
    """Jobs as the engine sees them; equal shapes share one ``Request``."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.requests: dict[tuple[Any, ...], Request] = {}
        self.versions: dict[int, int] = {}
        self.groups: dict[int, int | None] = {}
        self.attempt_jobs: dict[int, int] = {}
        self.growable: dict[int, float] = {}
        self.exhausted = exhausted_teams(now)
        self.priorities = {priority.value: priority for priority in Priority}

    def waiting(self) -> tuple[EngineJob, ...]:
        rows = Job.objects.filter(state="waiting").order_by().values_list(*_JOB_FIELDS)
        unmet = self._unmet()
        jobs = []
        for row in rows.iterator(chunk_size=20_000):
            self.versions[row[0]] = row[12]
            self.groups[row[0]] = row[13]
            jobs.append(self._job(row, unmet.get(row[0], ())))
        return tuple(jobs)

    def running(self) -> tuple[EngineAttempt, ...]:
        fields = (
            "id", "pool_id", "placement", "started_at", "state", "last_checkpoint_at", "filler", "stop_by", "workers",
            "growable_since",
        )  # fmt: skip
        rows = Attempt.objects.exclude(state="ended").values_list(*fields, *(f"job__{name}" for name in _JOB_FIELDS))
        attempts = []
        for row in rows.order_by().iterator(chunk_size=20_000):
            number, pool, placement, started, state, checkpoint, filler, stop_by, workers, growable = row[: len(fields)]
            job = self._job(row[len(fields) :], ())
            self.attempt_jobs[number] = job.id
            if growable is not None:
                self.growable[number] = growable.timestamp()
            attempts.append(
                EngineAttempt(
                    number,
                    job,
                    pool,
                    placement_of(placement),
                    started.timestamp(),
                    AttemptState(state),
                    checkpoint.timestamp() if checkpoint else None,
                    filler,
                    stop_by.timestamp() if stop_by else None,
                    workers,
                )
            )
        return tuple(attempts)

    def _unmet(self) -> dict[int, tuple[str, ...]]:
        """Names of what waiting jobs still depend on, at most ten each."""
        found: dict[int, tuple[str, ...]] = {}
        with connection.cursor() as cursor:
            cursor.execute(
                """
                SELECT d.job_id, (array_agg(o.name ORDER BY o.id))[1:10]
                FROM scheduling_job j JOIN scheduling_jobdependency d ON d.job_id = j.id
                JOIN scheduling_job o ON o.id = d.on_id
                WHERE j.state = 'waiting' AND j.unmet_dependencies > 0 AND o.state <> 'succeeded'
                GROUP BY d.job_id
                """
            )
            for job, names in cursor.fetchall():
                found[job] = tuple(names)
        return found

    def _request(self, shape: tuple[Any, ...]) -> Request:
        key = (tuple(shape[0]), *shape[1:])
        request = self.requests.get(key)
        if request is None:
            pools, gpus, share, memory, workers, least, interruptible, every, grace, level, required, workload = shape
            request = self.requests[key] = Request(
                pools=tuple(pools),
                gpus=gpus,
                share=millionths(share) if share is not None else 0,
                share_memory=memory or 0,
                workers=workers,
                min_workers=least,
                interruptible=interruptible,
                checkpoint_every=every.total_seconds() if every else None,
                grace=grace.total_seconds(),
                level=level or None,
                required=required,
                workload=WorkloadClass(workload),
            )
        return request

    def _job(self, row: tuple[Any, ...], unmet: tuple[str, ...]) -> EngineJob:
        (number, name, team, priority, submitted, walltime, held, not_before, backoff, waits_for, avoid, never) = row[
            :12
        ]
        if waits_for and not unmet:
            unmet = (f"{waits_for} jobs",)
        return EngineJob(
            number,
            name,
            team,
            self._request(row[_SHAPE_FROM:]),
            self.priorities[priority],
            submitted.timestamp(),
            walltime.total_seconds() if walltime else None,
            held,
            unmet if waits_for else (),
            not_before.timestamp() if not_before else 0.0,
            backoff.timestamp() if backoff else 0.0,
            self.exhausted.get(team),
            frozenset(avoid),
            never or None,
        )


assert GPU == 1_000_000
