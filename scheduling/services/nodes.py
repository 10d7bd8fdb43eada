"""Taking nodes out and back: draining now, and maintenance windows ahead."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.db import transaction
from django.utils import timezone

from scheduling.models import Node, Window
from scheduling.services.errors import Conflict, InvalidRequest
from scheduling.services.reconcile import set_node_state
from scheduling.services.wakeup import wake_cycle
from teams.actors import Actor
from teams.permissions import Permission, require
from teams.services import audit


@transaction.atomic
def drain_node(*, actor: Actor, node_id: int, reason: str) -> Node:
    """Nothing new starts on the node; what runs there goes on. Raises ``Conflict``, ``InvalidRequest``."""
    require(actor, Permission.MANAGE_CLUSTERS)
    reason = reason.strip()
    if not reason:
        raise InvalidRequest({"reason": ["Say why the node is drained: others will read it."]})
    node = Node.objects.select_for_update().get(pk=node_id)
    if node.state != "up":
        raise Conflict(f"Node {node.name} is {node.state}: only a node that is up can be drained.")
    set_node_state(node, "drained", timezone.now(), reason=reason, actor_label=actor.label)
    Node.objects.filter(pk=node.pk).update(drained_by_portal=True)
    audit.record(actor, "node.drain", node, before={"state": "up"}, after={"state": "drained"}, reason=reason)
    return node


@transaction.atomic
def resume_node(*, actor: Actor, node_id: int, reason: str = "") -> Node:
    """Take back a drain that was made here. Raises ``Conflict`` where the cluster itself drained the node."""
    require(actor, Permission.MANAGE_CLUSTERS)
    node = Node.objects.select_for_update().get(pk=node_id)
    if not node.drained_by_portal:
        raise Conflict(f"Node {node.name} was not drained here; its cluster says {node.state}.")
    Node.objects.filter(pk=node.pk).update(drained_by_portal=False)
    if node.state == "drained":
        set_node_state(node, "up", timezone.now(), reason="", actor_label=actor.label)
    audit.record(actor, "node.resume", node, before={"state": "drained"}, after={"state": node.state}, reason=reason)
    wake_cycle()
    return node


@transaction.atomic
def plan_maintenance(
    *, actor: Actor, nodes: Sequence[Node], name: str, begins_at: datetime, ends_at: datetime,
    weekly: bool = False, time_zone: str = "UTC", reason: str = "",
) -> Window:  # fmt: skip
    """A maintenance window: running jobs are planned around it. Raises ``InvalidRequest`` naming the field."""
    require(actor, Permission.MANAGE_CLUSTERS)
    errors: dict[str, list[str]] = {}
    if not nodes:
        errors["nodes"] = ["Give at least one node."]
    if ends_at <= begins_at:
        errors["ends_at"] = [f"{ends_at:%Y-%m-%d %H:%M} is not after the begin, {begins_at:%Y-%m-%d %H:%M}."]
    elif not weekly and ends_at <= timezone.now():
        errors["ends_at"] = [f"{ends_at:%Y-%m-%d %H:%M} is already past."]
    try:
        ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError):
        errors["time_zone"] = [f"{time_zone!r} is not a time zone; an example is Europe/Berlin."]
    if errors:
        raise InvalidRequest(errors)
    window = Window.objects.create(
        name=name[:100], kind=Window.Kind.MAINTENANCE, begins_at=begins_at, ends_at=ends_at, weekly=weekly,
        time_zone=time_zone, reason=reason[:300], created_by=actor.user,
    )  # fmt: skip
    window.nodes.set(nodes)
    after = {"begins_at": begins_at.isoformat(), "ends_at": ends_at.isoformat(), "nodes": [n.name for n in nodes]}
    audit.record(actor, "window.create", window, after=after, reason=reason)
    wake_cycle()
    return window


@transaction.atomic
def cancel_window(*, actor: Actor, window_id: int, reason: str = "") -> Window:
    """The window takes no more effect. Raises ``Conflict`` when it was cancelled before."""
    require(actor, Permission.MANAGE_CLUSTERS)
    window = Window.objects.select_for_update().get(pk=window_id)
    if window.cancelled_at is not None:
        raise Conflict(f"Window {window.name} was cancelled before.")
    window.cancelled_at = timezone.now()
    window.save(update_fields=["cancelled_at"])
    audit.record(actor, "window.cancel", window, after={"cancelled_at": window.cancelled_at.isoformat()}, reason=reason)
    wake_cycle()
    return window
