"""All reports, by the name in their address."""

from __future__ import annotations

from scheduling.reports import pages_jobs, pages_use
from scheduling.reports.page import Report

_ALL = (
    Report("idle", "Idle hardware", "How much hardware sits idle?", pages_use.idle, unit="share"),
    Report("waits", "Waiting", "How long does a new experiment wait?", pages_jobs.waits, unit="seconds"),
    Report("failures", "Failures and restarts", "How often do jobs fail and restart?", pages_jobs.failures, unit="share"),
    Report(
        "cost", "Cost of idle and lost time", "Which part of the budget pays for hardware that produces nothing?",
        pages_use.cost, unit="share",
    ),
    Report("energy", "Energy and carbon", "How much energy does it take, and how much carbon?", pages_use.energy, unit="kWh"),
    Report(
        "fairness", "Fairness", "Does everybody get what they are entitled to?", pages_use.fairness, more_is_better=True,
        unit="index",
    ),
    Report(
        "first-result", "Time to first result", "How long until a job gives its first result?", pages_jobs.first_result,
        unit="seconds",
    ),
    Report("preemption", "Evictions", "Who gained by evictions, and who lost?", pages_jobs.preemption, unit="evictions"),
    Report(
        "estimates", "Start estimates", "How good are the start estimates?", pages_jobs.estimates, more_is_better=True,
        unit="share",
    ),
    Report(
        "capacity", "Hardware or scheduling", "Is it hardware or scheduling that is short?", pages_use.capacity,
        whole_only=True, unit="share",
    ),
)  # fmt: skip

REPORTS: dict[str, Report] = {report.slug: report for report in _ALL}
#: The four questions of the index page.
FOUR = ("idle", "waits", "failures", "cost")
