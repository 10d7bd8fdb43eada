"""What a simulation came to: the JSON of the scenario format, totals per team, and the check of ``expect``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduling.engine.scenario import Expectation
from scheduling.engine.simulation import Moment, Run, SimJob
from scheduling.engine.snapshot import GPU, HOUR
from scheduling.engine.work import placement_amount

#: Differences below this are rounding of the expected value (GPUs, GPU-hours).
AMOUNT_TOLERANCE = 0.001
#: Seconds.
TIME_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """One expectation that was not met."""

    path: str
    line: int
    expected: Any
    got: Any

    def __str__(self) -> str:
        return f"line {self.line}: {self.path}: expected {self.expected!r}, got {self.got!r}"


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile of unsorted values; ``None`` of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def jain(ratios: Sequence[float]) -> float | None:
    """Jain's fairness index (Σx)² / (n Σx²); 1 = all alike. Jain, Chiu, Hawe, DEC-TR-301, 1984."""
    squares = sum(ratio * ratio for ratio in ratios)
    return sum(ratios) ** 2 / (len(ratios) * squares) if squares else None


def first_wait(job: SimJob, run: Run) -> float | None:
    """First start − max(submit, not-before, dependencies met); ``None`` before the first start."""
    if not job.attempts:
        return None
    ready = max(job.spec.at, job.spec.not_before)
    for name in job.spec.after:
        ready = max(ready, run.jobs[name].end or 0.0)
    return job.attempts[0].start - ready


def result(run: Run, differences: Iterable[Difference] = ()) -> dict[str, Any]:
    """The JSON object of the scenario format."""
    pools = {pool.id: pool.name for pool in run.scenario.pools}
    nodes = {node.id: node.name for node in run.scenario.nodes}
    return {
        "scenario": run.scenario.name,
        "jobs": {name: _job(job, run, nodes) for name, job in run.jobs.items()},
        "teams": _teams(run, pools),
        "totals": totals(run),
        "cycles": _cycles(run.cycle_seconds),
        "differences": [{"path": d.path, "line": d.line, "expected": d.expected, "got": d.got} for d in differences],
    }


def _job(job: SimJob, run: Run, nodes: dict[int, str]) -> dict[str, Any]:
    return {
        "state": job.state,
        "first_start": job.attempts[0].start if job.attempts else None,
        "end": job.end,
        "attempts": [
            {
                "start": ran.start,
                "end": ran.end,
                "outcome": ran.outcome.value if ran.outcome else None,
                "nodes": sorted({nodes[slot.node] for slot in ran.placement}),
                "gpus": ran.gpus,
                "filler": ran.filler,
            }
            for ran in job.attempts
        ],
        "wait": first_wait(job, run),
        "lost_gpu_hours": job.lost_gpu_hours,
        "blockers": [blocker.code.value for blocker in job.blockers],
    }


def _teams(run: Run, pools: dict[int, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for team in run.scenario.teams:
        rows = {}
        for number, name in pools.items():
            share, allocated = run.last.teams.get((team.id, number), (0.0, 0))
            rows[name] = {
                "gpu_hours": run.held.get((team.id, number), 0.0) / GPU / HOUR,
                "share_now": share / GPU,
                "allocated_now": allocated / GPU,
            }
        found[team.name] = rows
        found[team.name]["totals"] = _numbers([job for job in run.jobs.values() if job.spec.team == team.id], run)
    return found


def _numbers(jobs: list[SimJob], run: Run) -> dict[str, Any]:
    """Waits and completion over some jobs."""
    waits = [wait for job in jobs if (wait := first_wait(job, run)) is not None]
    ends = [job.end - job.spec.at for job in jobs if job.end is not None and job.state == "succeeded"]
    return {
        "jobs": len(jobs),
        "succeeded": len(ends),
        "gpu_hours_lost": sum(job.lost_gpu_hours for job in jobs),
        "evictions": sum(1 for job in jobs for ran in job.attempts if ran.outcome == "preempted"),
        "mean_wait": sum(waits) / len(waits) if waits else None,
        "p50_wait": percentile(waits, 0.5),
        "p90_wait": percentile(waits, 0.9),
        "mean_completion": sum(ends) / len(ends) if ends else None,
    }


def totals(run: Run) -> dict[str, Any]:
    jobs = list(run.jobs.values())
    allocated = sum(run.held.values()) / GPU / HOUR
    capacity = sum(run.capacity.values()) / HOUR
    numbers = _numbers(jobs, run)
    ends = [job.end for job in jobs if job.end is not None]
    return {
        "gpu_hours_capacity": capacity,
        "gpu_hours_allocated": allocated,
        "gpu_hours_lost": numbers["gpu_hours_lost"],
        "evictions": run.evictions,
        "mean_wait": numbers["mean_wait"],
        "p50_wait": numbers["p50_wait"],
        "p90_wait": numbers["p90_wait"],
        "mean_completion": numbers["mean_completion"],
        "makespan": max(ends, default=None),
        "utilisation": allocated / capacity if capacity else None,
        "jain": _jain(run),
    }


def _jain(run: Run) -> float | None:
    """Over delivered / entitled of the leaf teams that asked for anything; entitled = guarantee, else weight."""
    ratios = []
    asked = {job.spec.team for job in run.jobs.values()}
    for team in run.scenario.leaf_teams():
        if team.id not in asked:
            continue
        delivered = sum(held for (owner, _), held in run.held.items() if owner == team.id) / GPU / HOUR
        entitled = sum(quota.guaranteed for quota in team.quotas.values()) / GPU
        if not entitled:
            entitled = sum(quota.weight for quota in team.quotas.values()) or 1.0
        ratios.append(delivered / entitled)
    return jain(ratios)


def _cycles(seconds: list[float]) -> dict[str, Any]:
    return {
        "count": len(seconds),
        "mean_ms": sum(seconds) / len(seconds) * 1000 if seconds else None,
        "p99_ms": (percentile(seconds, 0.99) or 0.0) * 1000 if seconds else None,
        "max_ms": max(seconds) * 1000 if seconds else None,
    }


# -- expectations ----------------------------------------------------------------------------------------------


def check(run: Run) -> list[Difference]:
    """Every ``expect`` row that was not met."""
    return [difference for row in run.scenario.expect for difference in _check_row(run, row)]


def _check_row(run: Run, row: Expectation) -> Iterable[Difference]:
    wanted = row.row
    if "evictions" in wanted and run.evictions != wanted["evictions"]:
        yield Difference(f"{row.path}.evictions", row.line, wanted["evictions"], run.evictions)
    if "never" in wanted:
        yield from _check_never(run, row)
    if "job" in wanted:
        yield from _check_job(run, row)
    if row.at is None:
        return
    moment = run.moments.get(row.at)
    if moment is None:
        yield Difference(f"{row.path}.at", row.line, row.at, f"the simulation ended at {run.end:g}")
        return
    yield from _check_running(run, row, moment)
    for name, codes in wanted.get("waiting", {}).items():
        got = [blocker.code.value for blocker in moment.waiting[name]] if name in moment.waiting else None
        met = got is not None and (not codes or (got[:1] == codes[:1] and set(codes) <= set(got)))
        if not met:
            yield Difference(f"{row.path}.waiting.{name}", row.line, codes, got if got is not None else "not waiting")
    for name, state in wanted.get("finished", {}).items():
        if moment.finished.get(name) != state:
            yield Difference(f"{row.path}.finished.{name}", row.line, state, moment.finished.get(name, "not finished"))
    if "team" in wanted:
        yield from _check_team(run, row, moment)


def _check_running(run: Run, row: Expectation, moment: Moment) -> Iterable[Difference]:
    nodes = {node.id: node.name for node in run.scenario.nodes}
    pools = {pool.id: pool.name for pool in run.scenario.pools}
    for name, wanted in row.row.get("running", {}).items():
        path = f"{row.path}.running.{name}"
        if name not in moment.running:
            state = moment.finished.get(name)
            if state is None:
                state = f"waiting {[b.code.value for b in moment.waiting.get(name, ())]}"
            yield Difference(path, row.line, "running", state)
            continue
        attempt, number = moment.running[name]
        got = {
            "nodes": sorted({nodes[slot.node] for slot in attempt.placement}),
            "gpus": placement_amount(attempt.placement) / GPU,
            "pool": pools[attempt.pool],
            "attempt": number,
            "filler": attempt.filler,
            "workers": attempt.workers,
        }
        for key, value in wanted.items():
            if got[key] != value:
                yield Difference(f"{path}.{key}", row.line, value, got[key])


def _check_job(run: Run, row: Expectation) -> Iterable[Difference]:
    wanted, job = row.row, run.jobs[row.row["job"]]
    got = {
        "starts": job.attempts[0].start if job.attempts else None,
        "ends": job.end,
        "attempts": len(job.attempts),
        "lost_gpu_hours": job.lost_gpu_hours,
        "state": job.state,
    }
    for key, value in got.items():
        if key not in wanted:
            continue
        expected = wanted[key]
        if key == "lost_gpu_hours":
            met = abs(job.lost_gpu_hours - expected) <= AMOUNT_TOLERANCE
        elif key in ("starts", "ends") and expected is not None and value is not None:
            met = abs(float(value) - expected) <= TIME_TOLERANCE
        else:
            met = value == expected
        if not met:
            yield Difference(f"{row.path}.{wanted['job']}.{key}", row.line, expected, value)


def _check_team(run: Run, row: Expectation, moment: Moment) -> Iterable[Difference]:
    team = next(team for team in run.scenario.teams if team.name == row.row["team"])
    pool = next(pool for pool in run.scenario.pools if pool.name == row.row["pool"])
    share, allocated = moment.teams[team.id, pool.id]
    for key, got in (("share", share / GPU), ("allocated", allocated / GPU)):
        if key in row.row and abs(row.row[key] - got) > AMOUNT_TOLERANCE:
            yield Difference(f"{row.path}.{team.name}.{key}", row.line, row.row[key], round(got, 6))


def _check_never(run: Run, row: Expectation) -> Iterable[Difference]:
    names = row.row["never"]["running"]
    spans = [[(ran.start, run.end if ran.end is None else ran.end) for ran in run.jobs[n].attempts] for n in names]
    for at in sorted({start for job in spans for start, _ in job}):
        if all(any(start <= at < end for start, end in job) for job in spans):
            yield Difference(
                f"{row.path}.never", row.line, f"never together: {', '.join(names)}", f"together at {at:g}"
            )
            return
