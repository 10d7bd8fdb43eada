"""Reading hardware: the map of all GPUs, and one node with its history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Q
from django.http import Http404
from django.utils import timezone

from scheduling.models import GPU, Allocation, GPUSample, Node, NodeInterval, Window
from teams.actors import Actor
from teams.permissions import Permission, visible_team_ids

#: What nodes are called on the map, by index.
STATES = ("up", "down", "drained")
#: A measurement older than this is unknown.
FRESH = timedelta(minutes=15)

_NODES = """
SELECT n.id, n.name, c.name, p.name, n.state, n.domains, c.levels,
       coalesce(array_agg(g.id ORDER BY g.index) FILTER (WHERE g.id IS NOT NULL), '{}'),
       coalesce(array_agg(g.broken ORDER BY g.index) FILTER (WHERE g.id IS NOT NULL), '{}')
FROM scheduling_node n
JOIN scheduling_cluster c ON c.id = n.cluster_id
JOIN scheduling_pool p ON p.id = n.pool_id
LEFT JOIN scheduling_gpu g ON g.node_id = n.id AND upper_inf(g.exists)
WHERE n.retired_at IS NULL
GROUP BY n.id, c.id, p.id ORDER BY c.name, n.domains::text, n.name
"""

_HELD = """
SELECT a.gpu_id, a.team_id, t.name, sum(a.share)::float
FROM scheduling_allocation a JOIN teams_team t ON t.id = a.team_id
WHERE upper_inf(a.during) GROUP BY a.gpu_id, a.team_id, t.name
"""

_MEASURED = """
SELECT DISTINCT ON (gpu_id) gpu_id, activity FROM scheduling_gpusample
WHERE at > %s AND gpu_id = ANY(%s) ORDER BY gpu_id, at DESC
"""


def cluster_map(actor: Actor) -> dict[str, Any]:
    """All GPUs in a compact form for the drawing: three queries, whatever the size.

    ``nodes``: [id, name, place, pool, state, GPUs]; a GPU is [team index or -1, share held, activity or null], or 0
    when the device is broken. Teams that the viewer may not see in a private queue are one: "another team".
    """
    visible = visible_team_ids(actor, Permission.VIEW_JOBS) if settings.GPUPORTAL_QUEUE == "private" else None
    teams: dict[str, int] = {}
    held: dict[int, tuple[int, float]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_NODES)
        nodes = cursor.fetchall()
        cursor.execute(_HELD)
        for gpu, team_id, name, share in cursor.fetchall():
            shown = name if visible is None or team_id in visible else "another team"
            index = teams.setdefault(shown, len(teams))
            held[gpu] = (index, round(min(1.0, share + held.get(gpu, (0, 0.0))[1]), 2))
        cursor.execute(_MEASURED, [timezone.now() - FRESH, list(held)])
        measured = dict(cursor.fetchall())
    return {
        "teams": list(teams),
        "states": STATES,
        "nodes": [_node(row, held, measured) for row in nodes],
    }


def _node(row: Sequence[Any], held: dict[int, tuple[int, float]], measured: dict[int, float | None]) -> list[Any]:
    number, name, cluster, pool, state, domains, levels, gpus, broken = row
    if isinstance(domains, str):  # raw cursors give JSON as text
        domains, levels = _parsed(domains), _parsed(levels)
    place = " / ".join([cluster, *(str(domains[level]) for level in levels if level in domains)])
    cells: list[Any] = []
    for gpu, is_broken in zip(gpus, broken, strict=True):
        if is_broken:
            cells.append(0)
            continue
        team, share = held.get(gpu, (-1, 0))
        activity = measured.get(gpu)
        cells.append([team, share, None if activity is None else round(activity, 2)])
    return [number, name, place, pool, STATES.index(state), cells]


def _parsed(text: str) -> Any:
    return json.loads(text)


def get_node(number: int) -> Node:
    node = Node.objects.select_related("cluster", "pool__gpu_model").filter(pk=number).first()
    if node is None:
        raise Http404(f"There is no node {number}.")
    return node


def gpus_of(node: Node, actor: Actor) -> list[dict[str, Any]]:
    """Each living device with who holds it now and its latest measurement."""
    visible = visible_team_ids(actor, Permission.VIEW_JOBS)
    gpus = list(GPU.objects.filter(node=node, exists__endswith=None).order_by("index"))
    held: dict[int, list[Allocation]] = {}
    for row in Allocation.objects.filter(gpu__in=gpus, during__endswith=None).select_related("team", "attempt"):
        held.setdefault(row.gpu_id, []).append(row)
    samples = {
        row.gpu_id: row
        for row in GPUSample.objects.filter(gpu__in=gpus, at__gt=timezone.now() - FRESH)
        .order_by("gpu_id", "-at")
        .distinct("gpu_id")
    }
    return [
        {
            "gpu": gpu,
            "held": [(row, visible is None or row.team_id in visible) for row in held.get(gpu.pk, [])],
            "sample": samples.get(gpu.pk),
        }
        for gpu in gpus
    ]


def history_of(node: Node, limit: int = 50) -> list[NodeInterval]:
    return list(node.intervals.order_by("-during")[:limit])


def windows_of(node: Node) -> list[Window]:
    """Windows of the node that are running or still to come."""
    living = Q(weekly=True) | Q(ends_at__gt=timezone.now())
    return list(node.windows.filter(living, cancelled_at=None).select_related("team").order_by("begins_at")[:50])
