"""Shapes of requests and answers: what the OpenAPI document is made from."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework import serializers as s

from scheduling.api.base import LARGEST_PAGE, StrictSerializer
from scheduling.models import JobState, Priority, WorkloadClass

BIG = 2**63 - 1
PRIORITIES = [priority.name.lower() for priority in Priority]


class ProblemError(s.Serializer):
    field = s.CharField()
    message = s.CharField()
    value = s.JSONField(required=False)
    allowed = s.JSONField(required=False)


class Problem(s.Serializer):
    """RFC 9457."""

    type = s.CharField()
    title = s.CharField()
    status = s.IntegerField()
    detail = s.CharField()
    errors = ProblemError(many=True, required=False)


def answers(good: Any, *codes: int, ok: int = 200) -> dict[Any, Any]:
    """The good answer and the problems that can come instead of it."""
    found: dict[Any, Any] = {ok: good}
    for code in sorted({401, 403, 429, *codes}):
        found[(code, "application/problem+json")] = OpenApiResponse(Problem)
    return found


CURSOR = [
    OpenApiParameter("limit", {"type": "integer", "minimum": 1, "maximum": LARGEST_PAGE}, description="Rows a page."),
    OpenApiParameter(
        "cursor", {"type": "string", "pattern": "^[0-9]{1,18}$"}, description="`next_cursor` of the page before."
    ),
]
KEY = OpenApiParameter(
    "Idempotency-Key", {"type": "string", "pattern": "^[!-~]{1,255}$"}, OpenApiParameter.HEADER,
    description="The same key with the same body gives the same answer and does the work once.",
)  # fmt: skip
MATCH = OpenApiParameter(
    "If-Match", OpenApiTypes.STR, OpenApiParameter.HEADER, description='ETag that was read, such as `"3"`; `*` = any.'
)
SCHEMA_PAGE = {"next_cursor": s.CharField(allow_null=True, help_text="For the next page; null at the end.")}


def paged(kind: type[s.Serializer]) -> type[s.Serializer]:  # type: ignore[type-arg]
    """The answer of a list: ``results`` and ``next_cursor``."""
    return type(f"{kind.__name__}Page", (s.Serializer,), {"results": kind(many=True), **SCHEMA_PAGE})


class Simulated(StrictSerializer):
    runs = s.FloatField(min_value=0, max_value=1e8, required=False, help_text="Seconds of work.")


class JobIn(StrictSerializer):
    """A request for GPUs. Durations are seconds."""

    name = s.CharField(max_length=200)
    team = s.CharField(max_length=64)
    command = s.CharField(max_length=100_000, required=False, allow_blank=True, trim_whitespace=False)
    pools = s.ListField(child=s.CharField(max_length=64), required=False, max_length=100)
    gpus = s.IntegerField(min_value=0, max_value=62, required=False, help_text="Whole devices for each worker.")
    share = s.DecimalField(max_digits=7, decimal_places=6, min_value=0, max_value=1, required=False, allow_null=True)
    share_memory_bytes = s.IntegerField(min_value=1 << 20, max_value=1 << 50, required=False, allow_null=True)
    workers = s.IntegerField(min_value=1, max_value=10_000, required=False)
    min_workers = s.IntegerField(min_value=1, max_value=10_000, required=False, allow_null=True)
    walltime = s.IntegerField(min_value=60, max_value=365 * 86_400, required=False, allow_null=True)
    workload_class = s.ChoiceField(WorkloadClass.values, required=False)
    priority = s.ChoiceField(PRIORITIES, required=False)
    interruptible = s.BooleanField(required=False)
    checkpoint_every = s.IntegerField(min_value=10, max_value=30 * 86_400, required=False, allow_null=True)
    grace = s.IntegerField(min_value=0, max_value=3600, required=False)
    topology_level = s.CharField(max_length=64, required=False, allow_blank=True)
    topology_required = s.BooleanField(required=False)
    retries = s.IntegerField(min_value=0, max_value=100, required=False)
    not_before = s.DateTimeField(required=False, allow_null=True)
    after = s.ListField(child=s.IntegerField(min_value=1, max_value=BIG), required=False, max_length=1000)
    image = s.CharField(max_length=300, required=False, allow_blank=True)
    environment = s.DictField(
        child=s.CharField(max_length=10_000, allow_blank=True, trim_whitespace=False), required=False
    )
    working_directory = s.CharField(max_length=500, required=False, allow_blank=True)
    held = s.BooleanField(required=False)
    count = s.IntegerField(min_value=1, max_value=10_000, required=False, help_text="More than one: an array.")
    simulation = Simulated(required=False, help_text="For simulated clusters only.")


class JobOut(s.Serializer):
    id = s.IntegerField()
    name = s.CharField()
    team = s.CharField()
    owner = s.CharField()
    state = s.ChoiceField(JobState.values)
    reason = s.CharField(help_text="First blocker of a waiting job; empty = not judged yet, or not waiting.")
    workload_class = s.ChoiceField(WorkloadClass.values)
    priority = s.ChoiceField(PRIORITIES)
    gpus = s.IntegerField()
    share = s.CharField(allow_null=True)
    share_memory_bytes = s.IntegerField(allow_null=True)
    workers = s.IntegerField()
    min_workers = s.IntegerField()
    pools = s.ListField(child=s.CharField())
    walltime = s.FloatField(allow_null=True)
    interruptible = s.BooleanField()
    checkpoint_every = s.FloatField(allow_null=True)
    grace = s.FloatField()
    topology_level = s.CharField()
    topology_required = s.BooleanField()
    retries = s.IntegerField()
    not_before = s.DateTimeField(allow_null=True)
    command = s.CharField()
    image = s.CharField()
    environment = s.DictField(child=s.CharField())
    working_directory = s.CharField()
    held = s.BooleanField()
    array_id = s.CharField()
    submitted_at = s.DateTimeField()
    first_started_at = s.DateTimeField(allow_null=True)
    first_result_at = s.DateTimeField(allow_null=True)
    finished_at = s.DateTimeField(allow_null=True)
    version = s.IntegerField(help_text="The ETag without its quotes.")


class Submitted(s.Serializer):
    jobs = JobOut(many=True)


class Reason(StrictSerializer):
    reason = s.CharField(max_length=500, required=False, allow_blank=True)


class PriorityIn(StrictSerializer):
    priority = s.ChoiceField(PRIORITIES)


class CloneIn(StrictSerializer):
    name = s.CharField(max_length=200, required=False)


class BulkIn(StrictSerializer):
    jobs = s.ListField(child=s.IntegerField(min_value=1, max_value=BIG), min_length=1, max_length=500)
    action = s.ChoiceField(["cancel", "hold", "release", "priority"])
    priority = s.ChoiceField(PRIORITIES, required=False)
    reason = s.CharField(max_length=500, required=False, allow_blank=True)


class BulkRow(s.Serializer):
    job_id = s.IntegerField()
    done = s.BooleanField()
    message = s.CharField()


class BulkOut(s.Serializer):
    results = BulkRow(many=True)


class LogOut(s.Serializer):
    attempt = s.IntegerField()
    text = s.CharField()
    end = s.IntegerField()
    finished = s.BooleanField()


class EventOut(s.Serializer):
    id = s.IntegerField()
    at = s.DateTimeField()
    kind = s.CharField()
    attempt = s.IntegerField(allow_null=True)
    from_state = s.CharField()
    to_state = s.CharField()
    actor_label = s.CharField()
    reason = s.CharField()
    data = s.JSONField()


class BlockersOut(s.Serializer):
    job = s.IntegerField()
    position = s.IntegerField(allow_null=True)
    worked_out_at = s.DateTimeField(allow_null=True)
    blockers = s.ListField(child=s.DictField())


class EstimateOut(s.Serializer):
    job = s.IntegerField()
    made_at = s.DateTimeField(allow_null=True)
    p50_at = s.DateTimeField(allow_null=True)
    p90_at = s.DateTimeField(allow_null=True)
    basis = s.CharField()


class AttemptOut(s.Serializer):
    id = s.IntegerField()
    uuid = s.UUIDField()
    job = s.IntegerField()
    number = s.IntegerField()
    pool = s.CharField()
    state = s.CharField()
    outcome = s.CharField()
    cause = s.CharField()
    detail = s.CharField()
    exit_code = s.IntegerField(allow_null=True)
    workers = s.IntegerField()
    gpus = s.CharField()
    started_at = s.DateTimeField()
    running_at = s.DateTimeField(allow_null=True)
    ended_at = s.DateTimeField(allow_null=True)
    last_checkpoint_at = s.DateTimeField(allow_null=True)
    lost_gpu_seconds = s.CharField()


class MarkIn(StrictSerializer):
    token = s.CharField(max_length=200)
    kind = s.ChoiceField(["checkpoint", "first-result"])
    detail = s.CharField(max_length=300, required=False, allow_blank=True)


class MarkOut(s.Serializer):
    kind = s.CharField()
    at = s.DateTimeField()


class Scenario(StrictSerializer):
    scenario = s.CharField(max_length=256 << 10, trim_whitespace=False, help_text="YAML of the scenario format.")
