"""From Kubernetes nodes to the portal's: GPUs, topology, condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduling.backends.base import NodeCondition, NodeInfo
from scheduling.backends.kubernetes.api import Json, labels_of
from scheduling.backends.kubernetes.config import KubernetesConfig
from scheduling.backends.kubernetes.manifests import MIG_RESOURCE, RESOURCE

#: Labels of GPU feature discovery (github.com/NVIDIA/k8s-device-plugin).
PRODUCT = "nvidia.com/gpu.product"
MEMORY = "nvidia.com/gpu.memory"  # MiB
REPLICAS = "nvidia.com/gpu.replicas"

#: Widest first: well-known labels of Kubernetes, then those of NVIDIA Topograph.
USUAL_LEVELS: tuple[tuple[str, str], ...] = (
    ("zone", "topology.kubernetes.io/zone"),
    ("core", "network.topology.nvidia.com/core"),
    ("spine", "network.topology.nvidia.com/spine"),
    ("leaf", "network.topology.nvidia.com/leaf"),
    ("nvlink", "network.topology.nvidia.com/accelerator"),
)


def selector(config: KubernetesConfig) -> str:
    return ",".join(f"{label}={value}" for label, value in config.node_selector)


def gpu_nodes(config: KubernetesConfig, nodes: Sequence[Json]) -> tuple[list[NodeInfo], list[str]]:
    """Nodes the portal can use (without topology), and a warning for each GPU node it cannot."""
    usable, warnings = [], []
    for node in nodes:
        name = node["metadata"]["name"]
        try:
            info = _info(config, node)
        except ValueError as error:
            warnings.append(f"node {name} is left out: {error}")
            continue
        if info is not None:
            usable.append(info)
    return usable, warnings


def levels_of(config: KubernetesConfig, nodes: Sequence[Json]) -> tuple[tuple[str, str], ...]:
    """(level, label), widest first: as set, else those of the usual ones that some node has."""
    if config.levels:
        return config.levels
    present = {label for node in nodes for label in labels_of(node)}
    return tuple((level, label) for level, label in USUAL_LEVELS if label in present)


def condition_of(config: KubernetesConfig, node: Json) -> tuple[NodeCondition, str]:
    """Condition and the reason for it."""
    ready = next((c for c in (node.get("status") or {}).get("conditions") or [] if c.get("type") == "Ready"), None)
    if ready is None or ready.get("status") != "True":
        said = f"{ready.get('reason', '')}: {ready.get('message', '')}" if ready else "the node reports no condition"
        return NodeCondition.DOWN, said.strip(": ")
    spec = node.get("spec") or {}
    if spec.get("unschedulable"):
        return NodeCondition.DRAINED, "cordoned"
    if (node.get("metadata") or {}).get("deletionTimestamp"):
        return NodeCondition.DRAINED, "being removed from the cluster"
    for taint in spec.get("taints") or []:
        key = taint.get("key", "")
        if taint.get("effect") in ("NoSchedule", "NoExecute") and key not in (RESOURCE, *config.tolerations):
            return NodeCondition.DRAINED, f"taint {key}={taint.get('value', '')}:{taint['effect']}"
    return NodeCondition.UP, ""


def is_gpu_node(node: Json) -> bool:
    return bool(_resources(node))


def _resources(node: Mapping[str, Any]) -> dict[str, int]:
    """GPU resources and how many: the capacity, so that a device declared unhealthy stays in the inventory."""
    capacity = (node.get("status") or {}).get("capacity") or {}
    return {
        name: int(count)
        for name, count in capacity.items()
        if (name == RESOURCE or name.startswith(MIG_RESOURCE)) and int(count) > 0
    }


def _info(config: KubernetesConfig, node: Json) -> NodeInfo | None:
    resources = _resources(node)
    if not resources:
        return None
    if len(resources) > 1:
        raise ValueError(f"it has several kinds of GPU resource ({', '.join(sorted(resources))})")
    labels = labels_of(node)
    if int(labels.get(REPLICAS, "1") or "1") > 1:
        raise ValueError(f"its GPUs are time-sliced ({REPLICAS}={labels[REPLICAS]}): the counts are no devices")
    product = labels.get(PRODUCT, "")
    if not product:
        raise ValueError(f"it has no label {PRODUCT}; GPU feature discovery sets it")
    ((resource, count),) = resources.items()
    if count > 63:
        raise ValueError(f"it has {count} devices; at most 63 are supported")
    model = (config.gpu_models or {}).get(product, product)
    if resource != RESOURCE:
        model = f"{model} MIG {resource.removeprefix(MIG_RESOURCE)}"
    condition, reason = condition_of(config, node)
    memory = labels.get(MEMORY, "")
    return NodeInfo(
        name=node["metadata"]["name"],
        gpu_model=model,
        gpus=count,
        gpu_memory=int(memory) << 20 if memory.isdigit() and resource == RESOURCE else 0,
        condition=condition,
        reason=reason,
    )
