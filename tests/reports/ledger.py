"""A small ledger by hand: hardware, teams, attempts, written straight into the tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.models import (
    GPU,
    Allocation,
    Attempt,
    AttemptState,
    Cluster,
    GPUModel,
    GPUSample,
    Job,
    JobState,
    Node,
    NodeInterval,
    Pool,
    PoolState,
)
from teams.models import Team, User


def at(text: str) -> datetime:
    """``"03-03 06:00"`` in 2025, or a whole ISO date; UTC."""
    if text[2] == "-":
        text = f"2025-{text}"
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


class Ledger:
    """Makes rows; every method returns what it made."""

    def __init__(self) -> None:
        self.cluster = Cluster.objects.create(name="main", kind="simulated")
        self.owner = User.objects.create(username="ledger-owner")

    def pool(self, name: str = "a100", gpus: int = 8, nodes: int = 1, since: str = "2025-01-01 00:00", **model) -> Pool:
        model = {"memory_bytes": 80 << 30, "tdp_watts": 400, "idle_watts": 50, "price_per_hour": Decimal(2), **model}
        gpu_model, _ = GPUModel.objects.get_or_create(name=name.upper(), defaults=model)
        pool = Pool.objects.create(name=name, cluster=self.cluster, gpu_model=gpu_model)
        for number in range(nodes):
            node = Node.objects.create(cluster=self.cluster, pool=pool, name=f"{name}-{number}")
            GPU.objects.bulk_create(
                GPU(node=node, pool=pool, index=index, exists=DateTimeTZRange(at(since), None)) for index in range(gpus)
            )
        return pool

    def team(self, name: str, parent: Team | None = None) -> Team:
        return Team.objects.create(name=name, parent=parent)

    def job(self, team: Team, pool: Pool, submitted: str, *, gpus: int = 1, state: str = "waiting", **more) -> Job:
        when = at(submitted)
        return Job.objects.create(
            **{
                "name": f"job-{Job.objects.count()}",
                "team": team,
                "owner": self.owner,
                "gpus": gpus,
                "pools": [pool.pk],
                "submitted_at": when,
                "eligible_at": when,
                "state": state,
                **more,
            }
        )

    def run(
        self,
        team: Team,
        pool: Pool,
        start: str,
        end: str | None,
        *,
        gpus: int = 1,
        first: int = 0,
        node: int = 0,
        outcome: str = "succeeded",
        share: Decimal = Decimal(1),
        running: str | None = None,
        stop: str | None = None,
        checkpoint: str | None = None,
        job: Job | None = None,
        submitted: str | None = None,
        **more,
    ) -> Attempt:
        """An attempt on devices ``first`` … of the ``node``-th node, running at once unless told otherwise."""
        begun, ended = at(start), at(end) if end else None
        final = {"succeeded": "succeeded", "failed": "failed", "timed_out": "timed_out", "cancelled": "cancelled"}
        state = final.get(outcome, "waiting") if end else "running"
        if job is None:
            job = self.job(
                team,
                pool,
                submitted or start,
                gpus=gpus,
                state=state,
                first_started_at=begun,
                finished_at=ended if state in JobState.values and state not in ("waiting", "running") else None,
                workload_class=more.pop("workload_class", "training"),
            )
        devices = list(GPU.objects.filter(node__name=f"{pool.name}-{node}").order_by("index")[first : first + gpus])
        attempt = Attempt.objects.create(
            **{
                "job": job,
                "team": team,
                "pool": pool,
                "number": job.attempts.count() + 1,
                "state": AttemptState.ENDED if end else AttemptState.RUNNING,
                "outcome": outcome if end else "",
                "workers": 1,
                "gpus": share * len(devices),
                "placement": [],
                "started_at": begun,
                "running_at": at(running) if running else begun,
                "ended_at": ended,
                "eligible_at": at(submitted) if submitted else begun,
                "last_checkpoint_at": at(checkpoint) if checkpoint else None,
                "stop_requested_at": at(stop) if stop else None,
                **more,
            }
        )
        Allocation.objects.bulk_create(
            Allocation(
                attempt=attempt, gpu=device, team=team, pool=pool, share=share, during=DateTimeTZRange(begun, ended)
            )
            for device in devices
        )
        return attempt

    def node_state(self, pool: Pool, state: str, start: str, end: str | None, node: int = 0) -> NodeInterval:
        return NodeInterval.objects.create(
            node=Node.objects.get(name=f"{pool.name}-{node}"),
            state=state,
            during=DateTimeTZRange(at(start), at(end) if end else None),
        )

    def pool_state(self, pool: Pool, when: str, *, free: int, reserved: int = 0, stranded: int = 0) -> PoolState:
        return PoolState.objects.create(
            pool=pool, at=at(when), free=free, reserved=reserved, stranded=stranded, demand=stranded
        )

    def samples(
        self, attempt: Attempt, start: str, end: str, activity: float | None, seconds: int = 60, **more
    ) -> None:
        when, rows = at(start) + timedelta(seconds=seconds), []
        devices = list(attempt.allocations.values_list("gpu_id", flat=True))
        while when <= at(end):
            rows += [
                GPUSample(
                    gpu_id=device,
                    attempt=attempt,
                    at=when,
                    seconds=seconds,
                    activity=activity,
                    metric="sm_active",
                    **more,
                )
                for device in devices
            ]
            when += timedelta(seconds=seconds)
        GPUSample.objects.bulk_create(rows)
