"""What a cluster is told, as JSON in the outbox, and back into the back ends' terms."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from scheduling.backends.base import StartCommand, StopCommand, WorkerSlot
from scheduling.models import Attempt, Command, Job, Pool
from scheduling.services.amounts import device_indices


def start_payload(attempt: Attempt, job: Job, pool: Pool, nodes: Mapping[int, str]) -> dict[str, Any]:
    """Everything ``start`` needs, fixed at the time of the decision."""
    return {
        "job_id": job.pk,
        "job_name": job.name,
        "team": job.team.name,
        "account": job.owner.cluster_account or job.owner.get_username(),
        "command": job.command,
        "slots": [
            {"node": nodes[node], "devices": list(device_indices(devices)), "share": share / 1_000_000}
            for node, devices, share in attempt.placement
        ],
        "gpu_model": pool.gpu_model.name,
        "gpus_per_worker": job.gpus,
        "image": job.image,
        "environment": job.environment,
        "working_directory": job.working_directory,
        "walltime": job.walltime.total_seconds() if job.walltime else None,
        "grace": job.grace.total_seconds(),
        "number": attempt.number,
        "interruptible": job.interruptible,
        "simulation": job.simulation,
        "workers": [attempt.workers, job.workers],
        "checkpoint_every": job.checkpoint_every.total_seconds() if job.checkpoint_every else None,
    }


def stop_payload(grace: timedelta, reason: str) -> dict[str, Any]:
    return {"grace": grace.total_seconds(), "reason": reason}


def start_command(command: Command, extra_environment: Mapping[str, str]) -> StartCommand:
    """``extra_environment``: the GPUPORTAL_* variables, made when it is sent (they hold a secret)."""
    data = command.payload
    simulation = dict(data["simulation"] or {})
    simulation.setdefault("workers", data["workers"])
    simulation.setdefault("checkpoint_every", data["checkpoint_every"])
    return StartCommand(
        attempt=command.attempt.uuid,
        job_id=data["job_id"],
        job_name=data["job_name"],
        team=data["team"],
        account=data["account"],
        command=data["command"],
        slots=tuple(WorkerSlot(s["node"], tuple(s["devices"]), s["share"]) for s in data["slots"]),
        gpu_model=data["gpu_model"],
        gpus_per_worker=data["gpus_per_worker"],
        image=data["image"],
        environment={**data["environment"], **extra_environment},
        working_directory=data["working_directory"],
        walltime=timedelta(seconds=data["walltime"]) if data["walltime"] is not None else None,
        grace=timedelta(seconds=data["grace"]),
        number=data["number"],
        interruptible=data["interruptible"],
        simulation=simulation,
    )


def stop_command(command: Command) -> StopCommand:
    return StopCommand(
        attempt=command.attempt.uuid,
        grace=timedelta(seconds=command.payload["grace"]),
        reason=command.payload["reason"],
        backend_id=command.attempt.backend_id,
    )
