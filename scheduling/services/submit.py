"""Submitting a job: validation against hardware and quota, the row, and the wake-up after commit."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import transaction

from scheduling.engine.explain import never
from scheduling.engine.pool import PoolState
from scheduling.engine.snapshot import GPU, Request, WorkloadClass
from scheduling.models import Job, JobDependency, JobEvent, JobState, Node, Pool, Priority
from scheduling.services import clock, states
from scheduling.services.errors import InvalidRequest
from scheduling.services.snapshot import engine_hardware
from scheduling.services.wakeup import wake_cycle
from teams.actors import Actor
from teams.models import Team, User
from teams.permissions import Permission, allowed, require

MAX_WORKERS = 10_000
MAX_ARRAY = 10_000
MAX_WALLTIME = timedelta(days=365)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(slots=True)
class JobSpec:
    """What a person asks for. Names, not ids; the service resolves and validates them."""

    name: str
    team: str
    command: str = ""
    pools: list[str] = field(default_factory=list)
    gpus: int = 1
    share: Decimal | None = None
    share_memory_bytes: int | None = None
    workers: int = 1
    min_workers: int | None = None
    walltime: timedelta | None = None
    workload_class: str = "training"
    priority: str = "normal"
    interruptible: bool = False
    checkpoint_every: timedelta | None = None
    grace: timedelta = timedelta(0)
    topology_level: str = ""
    topology_required: bool = False
    retries: int = 0
    not_before: datetime | None = None
    after: list[int] = field(default_factory=list)
    image: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    working_directory: str = ""
    held: bool = False
    simulation: dict[str, Any] | None = None
    #: More than one: an array of that many jobs.
    count: int = 1


class _Errors:
    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def add(self, field_name: str, message: str) -> None:
        self.found.setdefault(field_name, []).append(message)

    def check(self) -> None:
        if self.found:
            raise InvalidRequest(self.found)


def submit_job(*, actor: Actor, spec: JobSpec, owner: User | None = None) -> Job:
    """Submit one job. Raises ``InvalidRequest``, or ``PermissionDenied`` when not a member of the team."""
    return submit_jobs(actor=actor, spec=spec, owner=owner)[0]


@transaction.atomic
def submit_jobs(*, actor: Actor, spec: JobSpec, owner: User | None = None) -> list[Job]:
    """Submit ``spec.count`` jobs at once; all or none."""
    checked = validate(actor=actor, spec=spec)
    person = owner or actor.user or (actor.token.created_by if actor.token else None)
    if person is None:
        raise InvalidRequest({"owner": ["A job needs a person as owner; the token's creator no longer exists."]})
    at = clock.now()
    array_id = uuid.uuid4().hex[:12] if spec.count > 1 else ""
    rows = [_row(checked, spec, person, at, array_id, index) for index in range(spec.count)]
    jobs = Job.objects.bulk_create(rows, batch_size=1000)
    JobDependency.objects.bulk_create(
        [JobDependency(job=job, on_id=number) for job in jobs for number in sorted(set(spec.after))], batch_size=1000
    )
    states.save_all(
        [
            JobEvent(
                job=job,
                at=at,
                kind="submitted",
                to_state=JobState.WAITING,
                actor=actor.user,
                actor_label=actor.label,
                data={"via": actor.via},
            )
            for job in jobs
        ]
    )
    wake_cycle()
    return jobs


@dataclass(slots=True)
class Checked:
    """A spec whose names are resolved."""

    team: Team
    pools: list[Pool]
    priority: int
    request: Request
    unmet: int


def validate(*, actor: Actor, spec: JobSpec) -> Checked:
    """All errors at once, by field. Raises ``InvalidRequest`` and ``PermissionDenied``."""
    errors = _Errors()
    team = _team(actor, spec, errors)
    pools = _pools(spec, errors)
    _texts(spec, errors)
    _amounts(spec, errors)
    _times(spec, errors)
    priority = _priority(actor, spec, team, errors)
    unmet = _dependencies(actor, spec, errors)
    errors.check()
    assert team is not None
    request = engine_request(spec, [pool.pk for pool in pools])
    reason = _impossible(request, pools)
    if reason is not None:
        errors.add("pools" if "pool" in reason else "gpus", f"No hardware here could ever run this: {reason}.")
        errors.check()
    return Checked(team, pools, priority, request, unmet)


def _team(actor: Actor, spec: JobSpec, errors: _Errors) -> Team | None:
    team = Team.objects.filter(name=spec.team, archived_at=None).select_related("parent__parent").first()
    if team is None or not allowed(actor, Permission.VIEW_TEAM, team):
        errors.add("team", f"There is no team {spec.team!r} that you belong to.")
        return None
    if team.children.filter(archived_at=None).exists():
        errors.add("team", f"Team {spec.team!r} has teams below it; only leaf teams own jobs.")
        return None
    require(actor, Permission.SUBMIT_JOBS, team)
    return team


def _pools(spec: JobSpec, errors: _Errors) -> list[Pool]:
    known = {pool.name: pool for pool in Pool.objects.select_related("cluster").order_by("id")}
    if not spec.pools:
        found = [pool for pool in known.values() if pool.cluster.enabled]
        if not found:
            errors.add("pools", "No cluster is connected yet; an administrator connects one first.")
        return found
    for name in spec.pools:
        if name not in known:
            errors.add("pools", f"Unknown pool {name!r}; there are {', '.join(known) or 'none'}.")
    if len(set(spec.pools)) != len(spec.pools):
        errors.add("pools", "A pool is named twice.")
    return [known[name] for name in spec.pools if name in known]


def _texts(spec: JobSpec, errors: _Errors) -> None:
    for name, longest in (("name", 200), ("image", 300), ("working_directory", 500)):
        value = getattr(spec, name)
        if len(value) > longest:
            errors.add(name, f"{len(value)} characters are too many; at most {longest} are allowed.")
        if _CONTROL.search(value) or "\n" in value:
            errors.add(name, "Control characters and line breaks are not allowed.")
    if not spec.name.strip():
        errors.add("name", "A name is needed.")
    if "\x00" in spec.command or len(spec.command) > 100_000:
        errors.add("command", "At most 100,000 characters, and no NUL, are allowed.")
    if len(spec.environment) > 200:
        errors.add("environment", f"{len(spec.environment)} variables are too many; at most 200 are allowed.")
    for key, value in spec.environment.items():
        if not _ENVIRONMENT_NAME.fullmatch(key):
            errors.add("environment", f"{key!r} is not a name of letters, digits and underscores.")
        elif key.startswith("GPUPORTAL_"):
            errors.add("environment", f"{key!r}: names beginning with GPUPORTAL_ are set by the portal.")
        elif not isinstance(value, str) or "\x00" in value or len(value) > 10_000:
            errors.add("environment", f"The value of {key!r} must be a text of at most 10,000 characters.")


def _number(errors: _Errors, name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        errors.add(name, f"{value!r} is not a whole number from {low} to {high:,}.")


def _amounts(spec: JobSpec, errors: _Errors) -> None:
    _number(errors, "workers", spec.workers, 1, MAX_WORKERS)
    _number(errors, "retries", spec.retries, 0, 100)
    _number(errors, "count", spec.count, 1, MAX_ARRAY)
    if spec.min_workers is not None:
        _number(errors, "min_workers", spec.min_workers, 1, max(1, spec.workers))
    shares = [spec.share is not None, spec.share_memory_bytes is not None]
    if any(shares):
        if spec.gpus:
            errors.add("gpus", "Leave out 'gpus' when a share of one GPU is asked for.")
        if all(shares):
            errors.add("share", "Give the share as a fraction or as memory, not both.")
        if spec.workers != 1:
            errors.add("workers", f"{spec.workers} workers are not possible with a share; it is exactly one.")
        if spec.share is not None and not Decimal("0.01") <= spec.share <= 1:
            errors.add("share", f"{spec.share} is not a fraction from 0.01 to 1.")
        if spec.share_memory_bytes is not None and not 1 << 20 <= spec.share_memory_bytes <= 1 << 50:
            errors.add("share_memory_bytes", f"{spec.share_memory_bytes} is not an amount of at least 1 MiB.")
    else:
        _number(errors, "gpus", spec.gpus, 1, 62)


def _times(spec: JobSpec, errors: _Errors) -> None:
    spans = {
        "walltime": (spec.walltime, timedelta(minutes=1), MAX_WALLTIME),
        "checkpoint_every": (spec.checkpoint_every, timedelta(seconds=10), timedelta(days=30)),
        "grace": (spec.grace, timedelta(0), timedelta(hours=1)),
    }
    for name, (value, low, high) in spans.items():
        if value is not None and not low <= value <= high:
            errors.add(name, f"{value} is not between {low} and {high}.")
    if spec.workload_class not in [choice.value for choice in WorkloadClass]:
        allowed_names = ", ".join(choice.value for choice in WorkloadClass)
        errors.add("workload_class", f"{spec.workload_class!r} is not one of {allowed_names}.")
    if spec.checkpoint_every is not None and not spec.interruptible:
        errors.add("checkpoint_every", "Checkpoints matter to interruptible jobs only; set 'interruptible'.")
    if spec.not_before is not None and spec.not_before.tzinfo is None:
        errors.add("not_before", f"{spec.not_before} has no time zone.")
    if spec.topology_required and not spec.topology_level:
        errors.add("topology_level", "Name the level that is required.")
    if spec.topology_level:
        known = {"node"}
        for levels in Pool.objects.values_list("cluster__levels", flat=True).distinct():
            known.update(levels)
        if spec.topology_level not in known:
            errors.add("topology_level", f"{spec.topology_level!r} is not one of {', '.join(sorted(known))}.")


def _priority(actor: Actor, spec: JobSpec, team: Team | None, errors: _Errors) -> int:
    names = {label.name.lower(): label.value for label in Priority}
    if spec.priority not in names:
        errors.add("priority", f"{spec.priority!r} is not one of {', '.join(names)}.")
        return int(Priority.NORMAL)
    if spec.priority == "urgent" and team is not None and not allowed(actor, Permission.SET_URGENT, team):
        errors.add("priority", "Only leads of the team may submit urgent jobs.")
    return int(names[spec.priority])


def _dependencies(actor: Actor, spec: JobSpec, errors: _Errors) -> int:
    wanted = set(spec.after)
    if len(wanted) > 1000:
        errors.add("after", f"{len(wanted)} dependencies are too many; at most 1,000 are allowed.")
        return 0
    unmet = 0
    found = {job.pk: job for job in Job.objects.filter(pk__in=wanted).select_related("team__parent__parent")}
    for number in sorted(wanted):
        job = found.get(number)
        if job is None or not allowed(actor, Permission.VIEW_JOBS, job.team):
            errors.add("after", f"There is no job {number}.")
        elif job.state in (JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT):
            errors.add("after", f"Job {number} has ended as {job.state}; what comes after it could never start.")
        elif job.state != JobState.SUCCEEDED:
            unmet += 1
    return unmet


def engine_request(spec: JobSpec, pool_ids: list[int]) -> Request:
    """The engine's shape of a spec."""
    return Request(
        pools=tuple(pool_ids),
        gpus=spec.gpus if spec.share is None and spec.share_memory_bytes is None else 0,
        share=int(spec.share * GPU) if spec.share is not None else 0,
        share_memory=spec.share_memory_bytes or 0,
        workers=spec.workers,
        min_workers=spec.min_workers or spec.workers,
        interruptible=spec.interruptible,
        checkpoint_every=spec.checkpoint_every.total_seconds() if spec.checkpoint_every else None,
        grace=spec.grace.total_seconds(),
        level=spec.topology_level or None,
        required=spec.topology_required,
        workload=WorkloadClass(spec.workload_class),
    )


def _impossible(request: Request, pools: list[Pool]) -> str | None:
    """Why no hardware of the installation could ever run it (4.12)."""
    clusters, engine_pools, nodes = engine_hardware(
        Node.objects.filter(pool__in=[pool.pk for pool in pools], retired_at=None)
    )
    levels = {cluster.id: cluster.levels for cluster in clusters}
    by_pool: dict[int, list[Any]] = {}
    for node in nodes:
        by_pool.setdefault(node.pool, []).append(node)
    states_of = {
        pool.id: PoolState(pool, by_pool.get(pool.id, ()), levels[pool.cluster], reachable=True)
        for pool in engine_pools
        if pool.id in request.pools
    }
    return never(states_of, request)


def _row(checked: Checked, spec: JobSpec, owner: User, at: datetime, array_id: str, index: int) -> Job:
    eligible = max(at, spec.not_before) if spec.not_before else at
    share = spec.share is not None or spec.share_memory_bytes is not None
    return Job(
        name=spec.name.strip() if not array_id else f"{spec.name.strip()}-{index + 1}"[:200],
        team=checked.team,
        owner=owner,
        workload_class=spec.workload_class,
        priority=checked.priority,
        workers=spec.workers,
        min_workers=spec.min_workers or spec.workers,
        gpus=0 if share else spec.gpus,
        share=spec.share,
        share_memory_bytes=spec.share_memory_bytes,
        pools=[pool.pk for pool in checked.pools],
        topology_level=spec.topology_level,
        topology_required=spec.topology_required,
        walltime=spec.walltime,
        interruptible=spec.interruptible,
        checkpoint_every=spec.checkpoint_every,
        grace=spec.grace,
        retries=spec.retries,
        not_before=spec.not_before,
        command=spec.command,
        image=spec.image,
        environment=spec.environment,
        working_directory=spec.working_directory,
        simulation=spec.simulation,
        held=spec.held,
        submitted_at=at,
        eligible_at=eligible,
        unmet_dependencies=checked.unmet,
        array_id=array_id,
        array_index=index if array_id else None,
    )
