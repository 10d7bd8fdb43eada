"""From a start command to what is submitted: which nodes, how many workers on each, which resources."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta

from scheduling.backends.base import Rejected, StartCommand
from scheduling.backends.slurm.config import SlurmConfig
from scheduling.backends.slurm.records import Tag
from scheduling.backends.slurm.script import output_path
from scheduling.backends.slurm.transport import Group, Submission

_LONGEST_NAME = 200


def build_submission(config: SlurmConfig, command: StartCommand, shards: Callable[[str], int]) -> Submission:
    """Everything but the script. ``shards`` tells into how many parts Slurm divides each GPU of a node.

    Raises ``Rejected`` for what Slurm cannot do.
    """
    if not command.slots:
        raise Rejected("the attempt has no workers")
    parts = max(command.gpus_per_worker, 1)
    return Submission(
        attempt=command.attempt,
        account=command.account if config.personal else "",
        name=_name(command.job_name) or str(command.attempt),
        comment=Tag(config.instance, command.attempt).text(),
        groups=_groups(config, command, shards),
        script="",
        output=output_path(config, command.attempt),
        directory=config.output_directory,
        time_limit=_minutes(command.walltime),
        signal_before=min(math.ceil(command.grace.total_seconds()), 65535),
        cpus_per_worker=config.cpus_per_gpu * parts if config.cpus_per_gpu else None,
        memory_per_worker=config.memory_per_gpu * parts if config.memory_per_gpu else None,
        partition=config.partition,
        qos=config.qos,
        reservation=config.reservation,
        charge=command.team if config.charge_account == "team" else "",
    )


def _groups(config: SlurmConfig, command: StartCommand, shards: Callable[[str], int]) -> tuple[Group, ...]:
    """Slurm's resources per node are the same on all nodes of a job (component), so nodes with the same number of
    workers go together, biggest first: the batch script then runs where most workers are."""
    share = command.slots[0].share
    if share < 1:
        return (_shared(command, shards),)
    if command.gpus_per_worker < 1:
        raise Rejected(f"{command.gpus_per_worker} GPUs per worker: at least 1 is needed")
    workers = Counter(slot.node for slot in command.slots)
    by_count: dict[int, list[str]] = defaultdict(list)
    for node, count in workers.items():
        by_count[count].append(node)
    kind = config.type_of(command.gpu_model)
    prefix = f"gpu:{kind}" if kind else "gpu"
    return tuple(
        Group(tuple(sorted(by_count[count])), count, f"{prefix}:{count * command.gpus_per_worker}")
        for count in sorted(by_count, reverse=True)
    )


def _shared(command: StartCommand, shards: Callable[[str], int]) -> Group:
    if len(command.slots) != 1:
        raise Rejected("a share of a GPU can have one worker only")
    slot = command.slots[0]
    per_gpu = shards(slot.node)
    wanted = slot.share * per_gpu
    if per_gpu < 2:
        raise Rejected(f"Slurm does not divide the GPUs of node {slot.node} (no gres/shard there)")
    if abs(wanted - round(wanted)) > 1e-4 or round(wanted) < 1:
        raise Rejected(
            f"a share of {slot.share:g} is no multiple of 1/{per_gpu}, the parts of a GPU on node {slot.node}"
        )
    return Group((slot.node,), 1, f"shard:{round(wanted)}")


def _minutes(walltime: timedelta | None) -> int | None:
    """Slurm counts whole minutes; rounded up, so that no job ends early."""
    return None if walltime is None else max(1, math.ceil(walltime.total_seconds() / 60))


def _name(name: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())[:_LONGEST_NAME]
