"""Pages about jobs: waits, failures, first results, evictions, estimates."""

from __future__ import annotations

import numpy as np

from scheduling.reports import journeys
from scheduling.reports.estimators import Curve
from scheduling.reports.failures import RULE
from scheduling.reports.failures import failures as failures_of
from scheduling.reports.figures import PLAIN, STATE_STYLE, Figure, Series
from scheduling.reports.hours import ratio
from scheduling.reports.page import (
    Names,
    Number,
    Page,
    Table,
    count_text,
    definition,
    duration,
    percent,
    percentile_number,
    percentile_text,
)
from scheduling.reports.scope import Scope
from scheduling.reports.waits import Waits, size_label
from scheduling.reports.waits import waits as waits_of

CAUSES = {
    "user": "User code",
    "oom": "Out of memory",
    "node": "Node",
    "xid": "GPU error (XID)",
    "network": "Network",
    "preemption": "Preemption",
    "walltime": "Walltime",
    "rejected": "Rejected by the cluster",
    "": "None",
}
#: Points drawn of a curve: more do not show.
POINTS = 400


def curve_series(name: str, curve: Curve, color: str) -> tuple[list[float], Series]:
    """A Kaplan-Meier curve as share started over minutes, thinned to ``POINTS``."""
    times, started = curve.times / 60, 1 - curve.waiting
    if times.size > POINTS:
        places = np.unique(np.linspace(0, times.size - 1, POINTS).astype(int))
        times, started = times[places], started[places]
    x = [0.0, *map(float, times)]
    y = [0.0, *map(float, started)]
    return x, Series(name, y, color)


def waits(scope: Scope) -> Page:
    report = waits_of(scope)
    names = Names()
    first = report.first
    median = first.percentile(0.5)
    again = duration(report.requeued.percentile(0.5).value) if report.requeued.n else "–"
    curves = [curve_series("All", first.curve, PLAIN[0])]
    busiest = sorted(report.groups["workload_class"], key=lambda row: -row.n)[:4]
    curves += [
        curve_series(str(row.key), row.curve, PLAIN[1 + place % 5])
        for place, row in enumerate(busiest)
        if len(busiest) > 1
    ]
    labels = {
        "team": ("Team", names.team),
        "pool": ("Pool", names.pool),
        "workload_class": ("Class", str),
        "size": ("Size", lambda key: size_label(int(key))),
        "hour": ("Hour of the day", lambda key: f"{key:02d}:00"),
    }
    return Page(
        question="How long does a new experiment wait?",
        answer=duration(median.value) if median.n else "–",
        sentence=f"is the median of {first.n:,} first starts, with those still waiting counted in.",
        numbers=[
            *(percentile_number(first.percentile(share)) for share in (0.5, 0.9, 0.95)),
            Number("Still waiting", f"{first.still_waiting:,}", first.still_waiting),
            Number("Cancelled while waiting", f"{first.cancelled:,}", first.cancelled, "counted apart"),
            Number("Re-queued: median", again, hint=f"n = {report.requeued.n:,}, kept apart"),
        ],
        figures=[
            Figure(
                "steps",
                "Share started after so many minutes",
                f"Half have started after {duration(median.value)}, nine in ten after"
                f" {duration(first.percentile(0.9).value)}.",
                [],
                [series for _, series in curves],
                xs=[x for x, _ in curves],
                x_title="minutes since it could have started",
                y_title="started",
                percent=True,
            )
        ],
        tables=[
            *(
                _wait_table(*labels[name], report.groups[name])
                for name in ("team", "size", "pool", "workload_class", "hour")
            ),
            Table(
                "Why they wait now",
                ["First reason", "Jobs", "GPUs asked for"],
                [[row.code, row.jobs, row.gpus] for row in report.blocked],
                empty="Nothing waits now.",
            ),
        ],
        definition=definition(
            scope,
            "Wait = start − max(submit, not-before, dependencies met), of first attempts that could start in the range."
            " Jobs still waiting at the cut-off are censored (Kaplan–Meier). Intervals: 95 %, Brookmeyer–Crowley, from"
            " n = 6 (p50), 29 (p90), 59 (p95) on.",
            notes=(
                "Jobs cancelled while waiting are counted apart; re-queues after an eviction or failure are kept apart.",
            ),
        ),
        value=median.value,
    )


def _wait_table(title: str, label: object, rows: list[Waits]) -> Table:
    return Table(
        f"By {title.lower()}",
        [title, "n", "p50", "p90", "p95", "Still waiting", "Cancelled while waiting"],
        [
            [
                label(row.key),  # type: ignore[operator]
                count_text(row.n),
                *(percentile_text(row.percentile(share)) for share in (0.5, 0.9, 0.95)),
                row.still_waiting,
                row.cancelled,
            ]
            for row in rows
        ],
    )


def failures(scope: Scope) -> Page:
    report = failures_of(scope)
    names = Names()
    bad = [row for row in report.ends if row.outcome not in ("succeeded", "cancelled")]
    by_cause: dict[str, tuple[int, float]] = {}
    for row in bad:
        label = CAUSES.get(row.cause, row.cause) if row.cause else row.outcome.replace("_", " ").capitalize()
        count, lost = by_cause.get(label, (0, 0.0))
        by_cause[label] = (count + row.attempts, lost + row.lost_gpu_hours)
    causes = sorted(by_cause, key=lambda name: -by_cause[name][1])
    per_job = report.restarts_per_job
    lost = sum(row.lost_gpu_hours for row in report.ends)
    return Page(
        question="How often do jobs fail and restart?",
        answer=percent(report.failure_share),
        sentence=f"of {report.attempts:,} ended runs failed; {lost:,.0f} GPU-hours of work were lost.",
        numbers=[
            Number("Restarts per job", "–" if per_job is None else f"{per_job:.2f}", per_job),
            Number("Failed runs", f"{report.failed:,}", report.failed),
            Number("GPU-hours lost", f"{lost:,.0f}", lost),
            Number("Goodput", percent(_goodput(report.use)), _goodput(report.use), "kept work / capacity"),
        ],
        figures=[
            Figure(
                "bars",
                "Failures by number",
                "; ".join(f"{name}: {by_cause[name][0]:,}" for name in causes) or "no failures",
                causes,
                [Series("Runs", [by_cause[name][0] for name in causes], PLAIN[1])],
                y_title="runs",
                unit="runs",
            ),
            Figure(
                "bars",
                "Failures by lost GPU-hours",
                "; ".join(f"{name}: {by_cause[name][1]:,.0f}" for name in causes) or "no failures",
                causes,
                [Series("GPU-hours lost", [by_cause[name][1] for name in causes], *STATE_STYLE["lost"])],
                y_title="GPU-hours lost",
                unit="GPU-hours",
            ),
        ],
        tables=[
            Table(
                "How runs ended",
                ["Outcome", "Cause", "Runs", "GPU-hours held", "GPU-hours lost"],
                [
                    [
                        r.outcome.replace("_", " "),
                        CAUSES.get(r.cause, r.cause),
                        r.attempts,
                        r.gpu_hours,
                        r.lost_gpu_hours,
                    ]
                    for r in report.ends
                ],
            ),
            Table(
                "By team",
                ["Team", "Runs ended", "Failed", "Failed, %", "GPU-hours lost"],
                [
                    [names.team(r.team), r.attempts, r.failed, percent(r.failed / r.attempts), r.lost_gpu_hours]
                    for r in sorted(report.by_team, key=lambda r: -r.lost_gpu_hours)
                ],
            ),
            Table(
                "Restarts of finished jobs",
                ["Restarts", "Jobs"],
                [[f"{n} or more" if n >= 10 else n, count] for n, count in sorted(report.restarts.items())],
            ),
            Table(
                "Nodes that fail more than the rest",
                ["Node", "Pool", "Faults", "Expected", "Chance of so many"],
                [[s.node, names.pool(s.pool), s.faults, s.expected, f"{s.chance:.2g}"] for s in report.suspects],
                empty="No node stands out (at the 1 % level).",
            ),
        ],
        definition=definition(scope, RULE, notes=("Goodput = GPU-hours that ended in kept work / capacity.",)),
        value=report.failure_share,
    )


def _goodput(use: object) -> float | None:
    kept = use.productive + use.unknown + use.no_activity - use.unknown_idle  # type: ignore[attr-defined]
    return ratio(kept, use.capacity)  # type: ignore[attr-defined]


def first_result(scope: Scope) -> Page:
    rows = journeys.first_result(scope)
    names = Names()
    whole = rows[0]
    median = whole.curve.percentile(0.5)
    x, series = curve_series("All", whole.curve, PLAIN[0])
    return Page(
        question="How long until a job gives its first result?",
        answer=duration(median.value) if median.n else "–",
        sentence=f"is the median from submit to first result of {whole.curve.n:,} jobs.",
        numbers=[
            *(percentile_number(whole.curve.percentile(s)) for s in (0.5, 0.9, 0.95)),
            Number("Without any result yet", f"{whole.curve.censored:,}", whole.curve.censored),
            Number("Ended without result", f"{whole.without:,}", whole.without, "counted apart"),
        ],
        figures=[
            Figure(
                "steps",
                "Share with a first result after so many minutes",
                f"Half have a result after {duration(median.value)}.",
                [],
                [series],
                xs=[x],
                x_title="minutes since submit",
                y_title="with a result",
                percent=True,
            )
        ],
        tables=[
            Table(
                "By team",
                ["Team", "n", "p50", "p90", "p95", "None yet", "Ended without"],
                [
                    [
                        names.team(row.key), count_text(row.curve.n),
                        *(percentile_text(row.curve.percentile(s)) for s in (0.5, 0.9, 0.95)), row.curve.censored, row.without,
                    ]
                    for row in rows[1:]
                ],
            )
        ],
        definition=definition(
            scope,
            "First output mark (API call or first checkpoint) − submit; without a mark, the end of the first success. Jobs"
            " that may still give one are censored at the cut-off (Kaplan–Meier).",
        ),
        value=median.value,
    )  # fmt: skip


def preemption(scope: Scope) -> Page:
    rows = journeys.preemptions(scope)
    names = Names()
    count, lost = sum(row.evictions for row in rows), sum(row.lost_gpu_hours for row in rows)
    teams = sorted(
        {row.victim for row in rows} | {row.gainer for row in rows if row.gainer is not None}, key=names.team
    )
    return Page(
        question="Who gained by evictions, and who lost?",
        answer=f"{count:,}",
        sentence=f"evictions threw away {lost:,.0f} GPU-hours of work.",
        numbers=[
            Number("Lost per eviction", f"{lost / count:,.2f} GPU-hours" if count else "–", lost / count if count else None),
            Number("GPUs given back", f"{sum(row.gpus for row in rows):,.0f}"),
        ],
        figures=[
            Figure(
                "bars",
                "GPUs taken from and given to each team",
                "; ".join(f"{names.team(team)}" for team in teams) or "no evictions",
                [names.team(team) for team in teams],
                [
                    Series("Taken from", [sum(r.gpus for r in rows if r.victim == t) for t in teams], *STATE_STYLE["lost"]),
                    Series("Given to", [sum(r.gpus for r in rows if r.gainer == t) for t in teams], PLAIN[0]),
                ],
                y_title="GPUs",
                unit="GPUs",
            )
        ],
        tables=[
            Table(
                "Ledger of evictions",
                ["From", "For", "Why", "Evictions", "GPUs", "GPU-hours lost"],
                [
                    [
                        names.team(r.victim), "–" if r.gainer is None else names.team(r.gainer), r.reason or "–", r.evictions,
                        r.gpus, r.lost_gpu_hours,
                    ]
                    for r in rows
                ],
                empty="No run was evicted in this range.",
                decimals=2,
            )
        ],
        definition=definition(scope, "Runs that ended as preempted in the range; lost = GPUs × time since the last checkpoint."),
        value=float(count),
    )  # fmt: skip


def estimates(scope: Scope) -> Page:
    report = journeys.estimate_accuracy(scope)
    return Page(
        question="How good are the start estimates?",
        answer=percent(report.within_p90),
        sentence=f"of {report.n:,} first estimates held their p90 time; 90 % would be perfect.",
        numbers=[
            Number("Started by the p50 time", percent(report.within_p50), report.within_p50, "50 % would be perfect"),
            Number("Median error", _signed(report.median_error.value), report.median_error.value, "late is positive"),
            Number("Median size of the error", duration(report.absolute_error.value) if report.n else "–"),
        ],
        figures=[
            Figure(
                "bars",
                "Kept beside promised",
                f"p50: {percent(report.within_p50)} kept of 50 %; p90: {percent(report.within_p90)} kept of 90 %.",
                ["p50", "p90"],
                [
                    Series("Promised", [0.5, 0.9], "#8da0cb", "/"),
                    Series("Kept", [report.within_p50, report.within_p90], PLAIN[0]),
                ],
                y_title="share started in time",
                percent=True,
            )
        ],
        tables=[],
        definition=definition(
            scope,
            "The first estimate of every job that started in the range, against its start. Error = start − p50 time.",
        ),
        value=report.within_p90,
        warnings=["Fewer than 20 estimates: not much can be said."] if 0 < report.n < 20 else [],
    )


def _signed(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{'−' if seconds < 0 else '+'}{duration(abs(seconds))}"
