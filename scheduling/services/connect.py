"""Connecting a cluster: test it, find out what it consists of, show the differences, and only then save."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from django.db import transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.backends.base import BackendError, Description, NodeInfo
from scheduling.models import GPU, Attempt, Cluster, ClusterKind, GPUModel, Node, Pool
from scheduling.services import clock
from scheduling.services.errors import InvalidRequest
from scheduling.services.reconcile import set_node_state
from scheduling.services.registry import build
from scheduling.services.secrets import seal, unseal
from scheduling.services.wakeup import wake_cycle
from teams.actors import Actor
from teams.permissions import Permission, require
from teams.services import audit

#: Memory (GiB), TDP and idle watts, price per hour: where the cluster does not say, a beginning to be corrected.
KNOWN_MODELS: dict[str, tuple[int, int, int, str]] = {
    "p100": (16, 250, 30, "0.60"),
    "v100": (32, 300, 40, "1.20"),
    "t4": (16, 70, 10, "0.35"),
    "a10": (24, 150, 20, "0.75"),
    "a100": (80, 400, 55, "1.80"),
    "l40s": (48, 350, 35, "1.20"),
    "h100": (80, 700, 70, "2.80"),
    "h200": (141, 700, 75, "3.50"),
    "b200": (180, 1000, 100, "5.00"),
}
UNKNOWN_MODEL = (0, 400, 50, "1.00")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(slots=True)
class Difference:
    """One thing that saving would change."""

    what: str  # add, change, retire
    kind: str  # node, pool, gpu model
    name: str
    detail: str


@dataclass(slots=True)
class Discovery:
    """What a cluster is, and what would change here."""

    description: Description
    differences: list[Difference] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.description.nodes)


def check_settings(name: str, kind: str) -> None:
    errors: dict[str, list[str]] = {}
    if not _NAME.fullmatch(name) or len(name) > 64:
        errors["name"] = [f"{name!r}: use lower-case letters, digits, dot, dash and underscore, at most 64."]
    if kind not in ClusterKind.values:
        errors["kind"] = [f"{kind!r} is not one of {', '.join(ClusterKind.values)}."]
    if errors:
        raise InvalidRequest(errors)


def discover(name: str, kind: str, config: dict[str, Any], secret: dict[str, Any]) -> Discovery:
    """Ask the cluster; nothing is saved. An empty ``secret`` means the saved one. Raises ``InvalidRequest`` with the
    cluster's own words when it cannot be reached or refuses."""
    check_settings(name, kind)
    existing = Cluster.objects.filter(name=name).first()
    if existing is not None and existing.kind != kind:
        raise InvalidRequest({"kind": [f"Cluster {name} is of kind {existing.kind}; its kind cannot change."]})
    if not secret and existing is not None:
        secret = unseal(existing)
    try:
        description = build(kind, name, config, secret).describe()
    except BackendError as error:
        raise InvalidRequest({"config": [f"{name} cannot be connected: {error}"]}) from None
    discovery = Discovery(description)
    discovery.differences = list(_differences(existing, description, name))
    return discovery


def pool_name(cluster: str, model: str) -> str:
    """``a100-main`` for model A100 of cluster main."""
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower().replace("nvidia", "")).strip("-") or "gpu"
    return f"{slug}-{cluster}"[:64]


def _differences(existing: Cluster | None, description: Description, name: str) -> list[Difference]:
    found: list[Difference] = []
    known_models = set(GPUModel.objects.values_list("name", flat=True))
    for model in sorted({node.gpu_model for node in description.nodes} - known_models):
        found.append(Difference("add", "gpu model", model, "price and power are a first guess: please check"))
    pools = set(Pool.objects.filter(cluster=existing).values_list("gpu_model__name", flat=True)) if existing else set()
    for model in sorted({node.gpu_model for node in description.nodes} - pools):
        found.append(Difference("add", "pool", pool_name(name, model), model))
    rows = {}
    if existing is not None:
        nodes = Node.objects.filter(cluster=existing, retired_at=None).select_related("pool__gpu_model")
        rows = {node.name: node for node in nodes.prefetch_related("gpus")}
    for info in description.nodes:
        row = rows.pop(info.name, None)
        if row is None:
            found.append(Difference("add", "node", info.name, f"{info.gpus} × {info.gpu_model}"))
        elif changes := _changes(row, info):
            found.append(Difference("change", "node", info.name, "; ".join(changes)))
    for row in rows.values():
        found.append(Difference("retire", "node", row.name, "the cluster lists it no longer"))
    return found


def _changes(row: Node, info: NodeInfo) -> list[str]:
    changes = []
    size = sum(1 for gpu in row.gpus.all() if gpu.exists.upper is None)
    if size != info.gpus:
        changes.append(f"{size} → {info.gpus} GPUs")
    if row.pool.gpu_model.name != info.gpu_model:
        changes.append(f"{row.pool.gpu_model.name} → {info.gpu_model}")
    if row.domains != dict(info.domains):
        changes.append(f"place {row.domains} → {dict(info.domains)}")
    if row.shareable != info.shareable:
        changes.append("GPUs may be shared" if info.shareable else "GPUs are not shared any more")
    return changes


@transaction.atomic
def save_cluster(
    *,
    actor: Actor,
    name: str,
    kind: str,
    config: dict[str, Any],
    secret: dict[str, Any],
    description: Description,
    prices: dict[str, Decimal] | None = None,
) -> Cluster:
    """Save what ``discover`` found. Devices that vanish end their life in the inventory; those that run something stay
    until it has ended."""
    require(actor, Permission.MANAGE_CLUSTERS)
    check_settings(name, kind)
    now = clock.now()
    cluster, created = Cluster.objects.select_for_update().get_or_create(name=name, defaults={"kind": kind})
    before = None if created else {"config": cluster.config, "levels": cluster.levels}
    cluster.config, cluster.levels = config, list(description.levels)
    if secret:
        cluster.secret = seal(secret)
    cluster.reachable, cluster.last_seen_at, cluster.unreachable_since, cluster.last_error = True, now, None, ""
    cluster.save()
    pools = {model: _pool(cluster, model, description, prices or {}) for model in _models(description)}
    rows = {node.name: node for node in Node.objects.filter(cluster=cluster, retired_at=None)}
    for info in description.nodes:
        _save_node(cluster, pools[info.gpu_model], info, rows.pop(info.name, None), now, actor)
    for row in rows.values():
        _retire(row, now)
    audit.record(
        actor,
        "cluster.connect" if created else "cluster.update",
        cluster,
        before=before,
        after={"config": config, "levels": cluster.levels, "nodes": len(description.nodes)},
    )
    wake_cycle()
    return cluster


def _models(description: Description) -> list[str]:
    return sorted({node.gpu_model for node in description.nodes})


def _pool(cluster: Cluster, model: str, description: Description, prices: dict[str, Decimal]) -> Pool:
    guess = next((v for k, v in KNOWN_MODELS.items() if k in model.lower()), UNKNOWN_MODEL)
    memory = max((node.gpu_memory for node in description.nodes if node.gpu_model == model), default=0)
    gpu_model, _ = GPUModel.objects.get_or_create(
        name=model,
        defaults={
            "memory_bytes": memory or guess[0] << 30,
            "tdp_watts": guess[1],
            "idle_watts": guess[2],
            "price_per_hour": prices.get(model, Decimal(guess[3])),
        },
    )
    pool, _ = Pool.objects.get_or_create(
        cluster=cluster, gpu_model=gpu_model, defaults={"name": pool_name(cluster.name, model)}
    )
    return pool


def _save_node(cluster: Cluster, pool: Pool, info: NodeInfo, row: Node | None, now: Any, actor: Actor) -> None:
    if row is not None and row.pool_id != pool.pk:
        _retire(row, now)
        row = None
    if row is None:
        row = Node.objects.create(cluster=cluster, pool=pool, name=info.name, state_seen_at=now)
    row.domains, row.shareable = dict(info.domains), info.shareable
    row.save(update_fields=["domains", "shareable"])
    living = {gpu.index: gpu for gpu in GPU.objects.filter(node=row, exists__endswith=None)}
    for index, gpu in living.items():
        if index >= info.gpus:
            _end_of_life(gpu, now)
    GPU.objects.bulk_create(
        GPU(
            node=row,
            pool=pool,
            index=index,
            uuid=info.uuids[index] if index < len(info.uuids) else "",
            exists=DateTimeTZRange(now, None, "[)"),
        )
        for index in range(info.gpus)
        if index not in living
    )
    if row.state != info.condition.value and not (row.drained_by_portal and info.condition.value == "up"):
        set_node_state(row, info.condition.value, now, reason=info.reason, actor_label=actor.label)


def _retire(row: Node, now: Any) -> None:
    """Out of the inventory, unless something still runs there: then it takes nothing new and goes later."""
    if Attempt.objects.filter(allocations__gpu__node=row).exclude(state="ended").exists():
        set_node_state(row, "drained", now, reason="the cluster lists it no longer", actor_label="discovery")
        return
    for gpu in GPU.objects.filter(node=row, exists__endswith=None):
        _end_of_life(gpu, now)
    row.retired_at = now
    row.save(update_fields=["retired_at"])


def _end_of_life(gpu: GPU, now: Any) -> None:
    gpu.exists = DateTimeTZRange(gpu.exists.lower, now, "[)")
    gpu.save(update_fields=["exists"])
