"""Clusters, pools, nodes, GPUs, windows, and what is kept for whom."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers as s
from rest_framework.request import Request
from rest_framework.response import Response

from gpuportal.api import not_found
from scheduling.api import schema
from scheduling.api.base import ApiView, page
from scheduling.models import GPU, Cluster, Hold, Node, Pool, Reservation, Window
from teams.permissions import Permission, require, visible_team_ids


class ClusterOut(s.Serializer):
    id = s.IntegerField()
    name = s.CharField()
    kind = s.CharField()
    levels = s.ListField(child=s.CharField())
    enabled = s.BooleanField()
    reachable = s.BooleanField()
    last_seen_at = s.DateTimeField(allow_null=True)
    unreachable_since = s.DateTimeField(allow_null=True)


class PoolOut(s.Serializer):
    id = s.IntegerField()
    name = s.CharField()
    cluster = s.CharField(source="cluster.name")
    gpu_model = s.CharField(source="gpu_model.name")
    memory_bytes = s.IntegerField(source="gpu_model.memory_bytes")
    price_per_hour = s.CharField(source="price")


class NodeOut(s.Serializer):
    id = s.IntegerField()
    name = s.CharField()
    cluster = s.CharField(source="cluster.name")
    pool = s.CharField(source="pool.name")
    state = s.CharField()
    state_reason = s.CharField()
    state_seen_at = s.DateTimeField(allow_null=True)
    domains = s.DictField()
    shareable = s.BooleanField()


class GPUOut(s.Serializer):
    id = s.IntegerField()
    node = s.CharField(source="node.name")
    pool = s.CharField(source="pool.name")
    index = s.IntegerField()
    uuid = s.CharField()
    broken = s.BooleanField()


class WindowOut(s.Serializer):
    id = s.IntegerField()
    name = s.CharField()
    kind = s.CharField()
    team = s.CharField(source="team.name", default=None, allow_null=True)
    begins_at = s.DateTimeField()
    ends_at = s.DateTimeField()
    time_zone = s.CharField()
    weekly = s.BooleanField()
    repeat_until = s.DateField(allow_null=True)
    reason = s.CharField()
    cancelled_at = s.DateTimeField(allow_null=True)


class HoldOut(s.Serializer):
    id = s.IntegerField()
    job = s.IntegerField(source="job_id")
    pool = s.CharField(source="pool.name")
    made_at = s.DateTimeField()
    expires_at = s.DateTimeField()


class ReservationOut(s.Serializer):
    id = s.IntegerField()
    job = s.IntegerField(source="job_id")
    pool = s.CharField(source="pool.name")
    starts_at = s.DateTimeField()


class _Kind(ApiView):
    """A list and a fetch of one kind of object that everybody who is signed in may see."""

    kind: type[s.Serializer]  # type: ignore[type-arg]
    word = ""

    def rows(self) -> QuerySet[Any]:
        raise NotImplementedError

    def _list(self, request: Request) -> Response:
        require(self.actor, Permission.VIEW_CLUSTERS)
        return page(request, self.rows(), lambda found: list(self.kind(found, many=True).data))

    def _one(self, pk: int) -> Response:
        require(self.actor, Permission.VIEW_CLUSTERS)
        row = self.rows().filter(pk=pk).first()
        if row is None:
            raise not_found(self.word, pk)
        return Response(self.kind(row).data)

    def scoped(self, rows: QuerySet[Any], path: str) -> QuerySet[Any]:
        teams = visible_team_ids(self.actor, Permission.VIEW_JOBS)
        return rows if teams is None else rows.filter(**{f"{path}__in": teams})


class ClusterKind(_Kind):
    kind, word = ClusterOut, "cluster"

    def rows(self) -> QuerySet[Any]:
        return Cluster.objects.all()


class PoolKind(_Kind):
    kind, word = PoolOut, "pool"

    def rows(self) -> QuerySet[Any]:
        return Pool.objects.select_related("cluster", "gpu_model")


class NodeKind(_Kind):
    kind, word = NodeOut, "node"

    def rows(self) -> QuerySet[Any]:
        return Node.objects.filter(retired_at=None).select_related("cluster", "pool")


class GPUKind(_Kind):
    kind, word = GPUOut, "GPU"

    def rows(self) -> QuerySet[Any]:
        return GPU.objects.filter(exists__contains=timezone.now()).select_related("node", "pool")


class WindowKind(_Kind):
    kind, word = WindowOut, "window"

    def rows(self) -> QuerySet[Any]:
        rows = Window.objects.select_related("team")
        teams = visible_team_ids(self.actor, Permission.VIEW_TEAM)
        return rows if teams is None else rows.filter(team=None) | rows.filter(team_id__in=teams)


class HoldKind(_Kind):
    kind, word = HoldOut, "hold"

    def rows(self) -> QuerySet[Any]:
        return self.scoped(Hold.objects.select_related("pool"), "job__team_id")


class ReservationKind(_Kind):
    kind, word = ReservationOut, "reservation"

    def rows(self) -> QuerySet[Any]:
        return self.scoped(Reservation.objects.select_related("pool"), "job__team_id")


def _views(base: type[_Kind], name: str) -> tuple[type[ApiView], type[ApiView]]:
    """The list view and the fetch view of a kind, described for the OpenAPI document."""

    class Many(base):  # type: ignore[misc, valid-type]
        @extend_schema(
            operation_id=f"{name}_list", tags=[name], parameters=schema.CURSOR, summary=f"All {name}, newest first",
            responses=schema.answers(schema.paged(base.kind), 400),
        )  # fmt: skip
        def get(self, request: Request) -> Response:
            return self._list(request)

    class One(base):  # type: ignore[misc, valid-type]
        @extend_schema(
            operation_id=f"{name}_get", tags=[name], summary=f"One {base.word}",
            responses=schema.answers(base.kind, 404),
        )  # fmt: skip
        def get(self, request: Request, pk: int) -> Response:
            return self._one(pk)

    return Many, One


KINDS = {
    "clusters": _views(ClusterKind, "clusters"),
    "pools": _views(PoolKind, "pools"),
    "nodes": _views(NodeKind, "nodes"),
    "gpus": _views(GPUKind, "gpus"),
    "windows": _views(WindowKind, "windows"),
    "holds": _views(HoldKind, "holds"),
    "reservations": _views(ReservationKind, "reservations"),
}
