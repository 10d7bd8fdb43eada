"""The policy lab: a past period run again by the engine, as it was and with a change, beside what happened.

The recorded submissions keep their order, shape and length; what ran is taken as the work that each job needed (the
length of its successful run, and what earlier runs had saved in checkpoints). Jobs that ran or waited when the period
began are submitted at its first moment with the work they had left. Jobs that never ran are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import structlog
from celery import current_app
from django.db import connection, transaction
from django.db.models import Q

from scheduling.engine.scenario import Failure, JobSpec, Scenario
from scheduling.engine.scenario_result import result
from scheduling.engine.simulation import simulate
from scheduling.engine.snapshot import GPU, NO_QUOTA, Node, Policy, Priority, Request, Team, WorkloadClass
from scheduling.models import Attempt, Job, LabRun
from scheduling.reports.estimators import kaplan_meier
from scheduling.services import clock
from scheduling.services.errors import InvalidRequest
from scheduling.services.policy import BOUNDS, current_policy
from scheduling.services.snapshot import engine_hardware, load_teams
from teams.actors import Actor
from teams.permissions import Permission, require
from teams.services import audit

log = structlog.get_logger(__name__)

MOST_JOBS = 100_000
LONGEST = timedelta(days=92)
KINDS = ("quota", "hardware", "policy", "interruptible")


class LabError(ValueError):
    """The question cannot be simulated: the reason in words."""


def ask(*, actor: Actor, name: str, since: datetime, until: datetime, changes: list[dict[str, Any]]) -> LabRun:
    """Check the question, keep it and have it run. Raises ``InvalidRequest``."""
    require(actor, Permission.USE_LAB)
    errors: dict[str, list[str]] = {}
    if since >= until:
        errors["until"] = [f"{until:%Y-%m-%d} is not after {since:%Y-%m-%d}."]
    elif until - since > LONGEST:
        errors["since"] = [f"The period of {(until - since).days} days is too long; at most {LONGEST.days} days."]
    if until > clock.now():
        errors["until"] = [f"{until:%Y-%m-%d} lies in the future; give a past day."]
    if not changes:
        errors["changes"] = ["Give at least one change."]
    teams = {team.name: team for team in load_teams(since, {})}
    _, pools, _ = engine_hardware()
    for number, change in enumerate(changes, 1):
        try:
            _checked(change, teams, {pool.name for pool in pools})
        except LabError as error:
            errors.setdefault("changes", []).append(f"Change {number}: {error}")
    if errors:
        raise InvalidRequest(errors)
    row = LabRun.objects.create(
        name=(name.strip().replace("\x00", "") or "Unnamed")[:200],
        since=since,
        until=until,
        changes=changes,
        created_by=actor.user,
    )
    audit.record(actor, "lab.ask", row, after={"changes": changes})
    enqueue(row)
    return row


def enqueue(row: LabRun) -> None:
    transaction.on_commit(
        lambda: current_app.send_task("scheduling.tasks.run_lab", args=[row.pk], retry=False), robust=True
    )


def run(number: int) -> None:
    """Work out one question; twice changes nothing. Progress goes into the row; an error of the question too."""
    taken = LabRun.objects.filter(pk=number, state=LabRun.State.QUEUED).update(state=LabRun.State.RUNNING)
    if not taken:
        return
    row = LabRun.objects.get(pk=number)
    try:
        row.result = answer(row.since, row.until, row.changes, progress=lambda share: _progress(number, share))
        row.state, row.progress = LabRun.State.DONE, 1.0
    except (LabError, RuntimeError) as error:
        row.state, row.error = LabRun.State.FAILED, str(error)[:1000]
    row.finished_at = clock.now()
    row.save()


def _progress(number: int, share: float) -> None:
    LabRun.objects.filter(pk=number).update(progress=round(share, 3))


def answer(
    since: datetime, until: datetime, changes: list[dict[str, Any]], progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Simulate the period as it was and with the changes. Raises ``LabError``."""
    base, left_out = recorded(since, until)
    changed = change_all(base, changes)
    tell = progress or _silent
    length = (until - since).total_seconds()
    before = result(simulate(base, until=length, progress=lambda share: tell(share / 2)))
    after = result(simulate(changed, until=length, progress=lambda share: tell(0.5 + share / 2)))
    return {
        "happened": happened(since, until),
        "before": _numbers(before),
        "after": _numbers(after),
        "teams": _by_team(before, after, base),
        "jobs": len(base.jobs),
        "left_out": left_out,
    }


def _silent(_: float) -> None:
    pass


def _numbers(outcome: dict[str, Any]) -> dict[str, Any]:
    return dict(outcome["totals"])


def _by_team(before: dict[str, Any], after: dict[str, Any], base: Scenario) -> list[dict[str, Any]]:
    names = {team.name for team in base.leaf_teams()}
    rows = []
    for name in sorted(names):
        old, new = (found["teams"].get(name, {}).get("totals", {}) for found in (before, after))
        if not old.get("jobs"):
            continue
        old_wait, new_wait = old.get("mean_wait"), new.get("mean_wait")
        verdict = "same"
        if old_wait is not None and new_wait is not None and abs(new_wait - old_wait) > max(60.0, 0.02 * old_wait):
            verdict = "wins" if new_wait < old_wait else "loses"
        rows.append({"team": name, "before": old, "after": new, "verdict": verdict})
    return rows


# -- what was recorded -------------------------------------------------------------------------------------------


def recorded(since: datetime, until: datetime) -> tuple[Scenario, int]:
    """The period as a scenario, and how many jobs are left out because they never ran."""
    clusters, pools, nodes = engine_hardware()
    if not nodes:
        raise LabError("There is no hardware to simulate.")
    rows = list(
        Job.objects.filter(submitted_at__lt=until)
        .filter(Q(finished_at__isnull=True) | Q(finished_at__gt=since))
        .order_by("submitted_at", "id")[: MOST_JOBS + 1]
    )
    if len(rows) > MOST_JOBS:
        raise LabError(f"The period holds more than {MOST_JOBS:,} jobs; choose a shorter one.")
    attempts: dict[int, list[Attempt]] = {}
    for attempt in Attempt.objects.filter(job_id__in=[row.pk for row in rows]).order_by("job_id", "number"):
        attempts.setdefault(attempt.job_id, []).append(attempt)
    known = {pool.id for pool in pools}
    specs = [spec for row in rows if (spec := _spec(row, attempts.get(row.pk, []), since, until, known)) is not None]
    if not specs:
        raise LabError("No job ran in this period.")
    scenario = Scenario(
        name="recorded",
        file="",
        start=since,
        tick=60.0,
        policy=current_policy(),
        clusters=tuple(replace(cluster, reachable=True) for cluster in clusters),
        pools=pools,
        nodes=nodes,
        teams=load_teams(since, {}),
        jobs=tuple(specs),
    )
    return scenario, len(rows) - len(specs)


def _spec(row: Job, runs: list[Attempt], since: datetime, until: datetime, pools: set[int]) -> JobSpec | None:
    accepted = tuple(pool for pool in row.pools if pool in pools)
    work, fails = _work(runs, since, until)
    if not accepted or work <= 0:
        return None
    return JobSpec(
        id=row.pk,
        name=f"{row.pk}",
        team=row.team_id,
        request=Request(
            pools=accepted,
            gpus=row.gpus,
            share=int((row.share or 0) * GPU),
            share_memory=row.share_memory_bytes or 0,
            workers=row.workers,
            min_workers=row.min_workers,
            interruptible=row.interruptible,
            checkpoint_every=row.checkpoint_every.total_seconds() if row.checkpoint_every else None,
            grace=row.grace.total_seconds(),
            level=row.topology_level or None,
            required=row.topology_required,
            workload=WorkloadClass(row.workload_class),
        ),
        runs=work,
        at=max(0.0, (row.submitted_at - since).total_seconds()),
        walltime=row.walltime.total_seconds() if row.walltime else None,
        priority=Priority(row.priority),
        retries=row.retries,
        not_before=max(0.0, (row.not_before - since).total_seconds()) if row.not_before else 0.0,
        fails=tuple(fails),
    )


def _work(runs: list[Attempt], since: datetime, until: datetime) -> tuple[float, list[Failure]]:
    """Seconds of work that the job needed from ``since`` on, and the failures of its own making."""
    work, fails, number = 0.0, [], 0
    for run in runs:
        end = min(run.ended_at or until, until)
        start = max(run.running_at or run.started_at, since)
        if end <= start:
            continue
        if run.outcome == "preempted":
            work += max(0.0, ((run.last_checkpoint_at or start) - start).total_seconds())
            continue
        number += 1
        if run.outcome == "failed":
            fails.append(Failure(number, (end - start).total_seconds(), run.exit_code or 1, run.cause or "user"))
            work = max(work, (end - start).total_seconds() + 1)
        elif run.outcome not in ("node_failed", "lost"):
            work += (end - start).total_seconds()
    return work, fails


def happened(since: datetime, until: datetime) -> dict[str, Any]:
    """The same figures out of the ledger."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT extract(epoch FROM t.started_at - t.eligible_at)::float FROM scheduling_attempt t
            WHERE t.number = 1 AND t.eligible_at >= %s AND t.eligible_at < %s AND t.started_at < %s
            """,
            [since, until, until],
        )
        waits = [max(0.0, row[0]) for row in cursor.fetchall()]
        cursor.execute(
            """
            SELECT coalesce(sum(a.share * extract(epoch FROM upper(r) - lower(r))), 0)::float / 3600
            FROM scheduling_allocation a CROSS JOIN LATERAL (
                SELECT tstzrange(lower(a.during), coalesce(upper(a.during), %(until)s)) * tstzrange(%(since)s, %(until)s) AS r
            ) AS x WHERE a.during && tstzrange(%(since)s, %(until)s) AND NOT isempty(r)
            """,
            {"since": since, "until": until},
        )
        (allocated,) = cursor.fetchone()
    evictions = Attempt.objects.filter(outcome="preempted", ended_at__gte=since, ended_at__lt=until).count()
    curve = kaplan_meier(waits, [])
    return {
        "gpu_hours_allocated": allocated,
        "evictions": evictions,
        "mean_wait": sum(waits) / len(waits) if waits else None,
        "p50_wait": curve.percentile(0.5).value,
        "p90_wait": curve.percentile(0.9).value,
    }


# -- changes -----------------------------------------------------------------------------------------------------


def _checked(change: dict[str, Any], teams: dict[str, Team], pools: set[str]) -> None:
    kind = change.get("kind")
    if kind not in KINDS:
        raise LabError(f"kind “{kind}” is unknown; allowed are {', '.join(KINDS)}.")
    if kind in ("quota", "hardware") and change.get("pool") not in pools:
        raise LabError(f"pool “{change.get('pool')}” is unknown; allowed are {', '.join(sorted(pools)) or 'none'}.")
    if kind == "quota":
        if change.get("team") not in teams:
            raise LabError(f"team “{change.get('team')}” is unknown.")
        if not any(change.get(name) is not None for name in ("guaranteed", "limit", "weight")):
            raise LabError("give guaranteed, limit or weight.")
        for name in ("guaranteed", "limit", "weight"):
            _number(change, name, 0, 1_000_000, needed=False)
    elif kind == "hardware":
        _number(change, "nodes", -10_000, 10_000)
    elif kind == "policy":
        if change.get("name") not in BOUNDS:
            raise LabError(f"setting “{change.get('name')}” is unknown; allowed are {', '.join(BOUNDS)}.")
        _number(change, "value", *BOUNDS[change["name"]])
    else:
        _number(change, "checkpoint_every", 60, 86_400)


def _number(change: dict[str, Any], name: str, low: float, high: float, *, needed: bool = True) -> None:
    value = change.get(name)
    if value is None and not needed:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise LabError(f"{name} “{value}” is not a number from {low:g} to {high:g}.")


def change_all(base: Scenario, changes: list[dict[str, Any]]) -> Scenario:
    """The scenario with every change made, in order. Raises ``LabError``."""
    teams = {team.name: team for team in base.teams}
    pools = {pool.name: pool.id for pool in base.pools}
    for change in changes:
        _checked(change, teams, set(pools))
        if change["kind"] == "quota":
            base = replace(base, teams=_with_quota(base.teams, change, pools[change["pool"]]))
        elif change["kind"] == "hardware":
            base = replace(base, nodes=_with_nodes(base.nodes, pools[change["pool"]], int(change["nodes"])))
        elif change["kind"] == "policy":
            base = replace(base, policy=_with_setting(base.policy, change["name"], change["value"]))
        else:
            every = float(change["checkpoint_every"])
            base = replace(
                base,
                jobs=tuple(
                    replace(job, request=replace(job.request, interruptible=True,
                                                 checkpoint_every=job.request.checkpoint_every or every))
                    for job in base.jobs
                ),
            )  # fmt: skip
    return base


def _with_quota(teams: tuple[Team, ...], change: dict[str, Any], pool: int) -> tuple[Team, ...]:
    changed = []
    for team in teams:
        if team.name == change["team"]:
            quota = team.quotas.get(pool, NO_QUOTA)
            if change.get("guaranteed") is not None:
                quota = replace(quota, guaranteed=round(change["guaranteed"] * GPU))
            if change.get("limit") is not None:
                quota = replace(quota, limit=round(change["limit"] * GPU))
            if change.get("weight") is not None:
                quota = replace(quota, weight=float(change["weight"]))
            team = replace(team, quotas={**team.quotas, pool: quota})
        changed.append(team)
    return tuple(changed)


def _with_nodes(nodes: tuple[Node, ...], pool: int, more: int) -> tuple[Node, ...]:
    own = [node for node in nodes if node.pool == pool]
    if not own:
        raise LabError("the pool has no node to take as a model.")
    if more < 0:
        gone = {node.id for node in own[more:]} if -more < len(own) else {node.id for node in own}
        return tuple(node for node in nodes if node.id not in gone)
    first = max(node.id for node in nodes) + 1
    return nodes + tuple(replace(own[-1], id=first + i, name=f"lab-{pool}-{i}", broken=0) for i in range(more))


def _with_setting(policy: Policy, name: str, value: float) -> Policy:
    changed: dict[str, Any] = {name: type(getattr(policy, name) or 0.0)(value)}
    return replace(policy, **changed)
