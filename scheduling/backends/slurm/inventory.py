"""From Slurm's nodes to the portal's: GPUs, topology, condition."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from scheduling.backends.base import NodeInfo
from scheduling.backends.slurm.config import SlurmConfig
from scheduling.backends.slurm.hostlist import expand
from scheduling.backends.slurm.records import SlurmNode
from scheduling.backends.slurm.states import node_condition

_SWITCH = re.compile(r"SwitchName=(?P<name>\S+) Level=(?P<level>\d+) .*?Nodes=(?P<nodes>\S+)")
_BLOCK = re.compile(r"BlockName=(?P<name>\S+) .*?Nodes=(?P<nodes>\S+)")


def gpu_nodes(config: SlurmConfig, nodes: Sequence[SlurmNode]) -> tuple[list[SlurmNode], list[str]]:
    """Nodes the portal can use, and a warning for each GPU node it cannot."""
    usable, warnings = [], []
    for node in nodes:
        if config.partition and config.partition not in node.partitions:
            continue
        gpus = [gres for gres in node.gres if gres.name == "gpu" and gres.count]
        if not gpus:
            continue
        models = {config.model_of(gres.type) for gres in gpus}
        if len(models) > 1:
            warnings.append(f"node {node.name} has GPUs of several models ({', '.join(sorted(models))}): left out")
        elif models == {""}:
            warnings.append(f"node {node.name} has GPUs without a type: left out; name them with =MODEL in GPU names")
        elif sum(gres.count for gres in gpus) > 63:
            warnings.append(f"node {node.name} has more than 63 GPUs: left out")
        else:
            usable.append(node)
    return usable, warnings


def describe_nodes(
    config: SlurmConfig, nodes: Sequence[SlurmNode], topology: str | None
) -> tuple[tuple[str, ...], list[NodeInfo]]:
    """Level names, widest first, and the nodes. Raises ``UnknownState``."""
    if config.levels:
        levels = tuple(level for level, _ in config.levels)
        domains: dict[str, Mapping[str, str]] = {node.name: _from_features(config, node) for node in nodes}
    else:
        levels, domains = read_topology(topology or "")
    infos = []
    for node in nodes:
        gpus = [gres for gres in node.gres if gres.name == "gpu"]
        count = sum(gres.count for gres in gpus)
        infos.append(
            NodeInfo(
                name=node.name,
                gpu_model=config.model_of(gpus[0].type),
                gpus=count,
                domains=domains.get(node.name, {}),
                condition=node_condition(node.states, own_reservation=bool(config.reservation)),
                reason=node.reason,
                shareable=shards_per_gpu(node) > 1,
            )
        )
    return levels, infos


def shards_per_gpu(node: SlurmNode) -> int:
    """Into how many parts Slurm divides each GPU of the node (gres/shard); 0 = not at all."""
    gpus = sum(gres.count for gres in node.gres if gres.name == "gpu")
    shards = sum(gres.count for gres in node.gres if gres.name == "shard")
    return shards // gpus if gpus and shards % gpus == 0 else 0


def read_topology(text: str) -> tuple[tuple[str, ...], dict[str, Mapping[str, str]]]:
    """Levels (widest first) and domains by node from ``scontrol show topology`` (tree or block plugin)."""
    found: dict[str, dict[str, str]] = {}
    ranks: set[int] = set()
    for line in text.splitlines():
        if match := _SWITCH.search(line):
            rank = int(match["level"])
            ranks.add(rank)
            for node in expand(match["nodes"]):
                found.setdefault(node, {})[_level_name(rank)] = match["name"]
        elif match := _BLOCK.search(line):
            for node in expand(match["nodes"]):
                found.setdefault(node, {})["block"] = match["name"]
    levels = [_level_name(rank) for rank in sorted(ranks, reverse=True)]
    if any("block" in domains for domains in found.values()):
        levels.append("block")
    return tuple(levels), dict(found)


def _level_name(rank: int) -> str:
    return "leaf" if rank == 0 else f"switch-{rank}"


def _from_features(config: SlurmConfig, node: SlurmNode) -> dict[str, str]:
    domains = {}
    for level, prefix in config.levels:
        for feature in node.features:
            if feature.startswith(prefix) and len(feature) > len(prefix):
                domains[level] = feature[len(prefix) :]
    return domains
