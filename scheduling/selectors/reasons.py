"""Blockers in words, with their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection
from django.utils import timezone
from django.utils.functional import cached_property

from scheduling.models import Job
from scheduling.templatetags.portal import duration, millions


@dataclass(frozen=True, slots=True)
class Reason:
    """One blocker as a sentence, and what would help."""

    code: str
    text: str
    help: str = ""


class Names:
    """Names of pools and teams for many reasons at once: one query, when the first name is asked for."""

    @cached_property
    def _rows(self) -> list[tuple[str, int, str, bool]]:
        with connection.cursor() as cursor:
            cursor.execute(
                """
                SELECT 'pool', id, name, true FROM scheduling_pool
                UNION ALL
                SELECT 'team', t.id, t.name, t.archived_at IS NULL
                       AND NOT EXISTS (SELECT FROM teams_team below WHERE below.parent_id = t.id) FROM teams_team t
                ORDER BY 3
                """
            )
            return cursor.fetchall()

    @cached_property
    def pools(self) -> Mapping[int, str]:
        return {number: name for kind, number, name, _ in self._rows if kind == "pool"}

    @cached_property
    def teams(self) -> Mapping[int, str]:
        return {number: name for kind, number, name, _ in self._rows if kind == "team"}

    @cached_property
    def leaf_teams(self) -> list[str]:
        """Teams that may own jobs, by name."""
        return [name for kind, _, name, leaf in self._rows if kind == "team" and leaf]

    def pool(self, number: Any) -> str:
        return self.pools.get(number, f"pool {number}")

    def team(self, number: Any) -> str:
        return self.teams.get(number, f"team {number}")


def _when(text: Any) -> str:
    if not text:
        return ""
    at = datetime.fromisoformat(text) if isinstance(text, str) else text
    local = timezone.localtime(at)
    same_day = local.date() == timezone.localdate()
    return f"{local:%H:%M}" if same_day else f"{local:%d %b %H:%M}"


def reasons_of(job: Job, names: Names) -> list[Reason]:
    """All blockers of a waiting job; needs ``reason_group`` loaded. Empty while no cycle has judged it yet."""
    group = job.reason_group
    rows = list(group.blockers) if group is not None else []
    return [Reason(row["code"], _sentence(row, job, names), _help(row, names)) for row in rows]


def _sentence(row: dict[str, Any], job: Job, names: Names) -> str:
    code, pool = row["code"], names.pool(row.get("pool"))
    asked, free = millions(row.get("asked", 0)), millions(row.get("free", 0))
    until = _when(row.get("until"))
    texts = {
        "unsatisfiable": lambda: f"No hardware here could ever run it: {row.get('detail', '')}",
        "held": lambda: "It is held; release it to let it start",
        "dependency": lambda: f"It waits for {row.get('detail') or 'other jobs'}",
        "not-before": lambda: f"It may not start before {_when(job.not_before)}",
        "backoff": lambda: f"After a failure it pauses until {_when(job.backoff_until)}",
        "budget-exhausted": lambda: f"The budget of {row.get('detail', 'the team')} is used up",
        "limit": lambda: (
            f"{names.team(row.get('team'))} uses {millions(row.get('in_use', 0))} of its limit of "
            f"{millions(row.get('limit', 0))} GPUs in {pool}; this job asks for {asked}"
        ),
        "guarantee": lambda: (
            f"It may not be interrupted, and {names.team(row.get('team'))} has {millions(row.get('in_use', 0))} of its "
            f"guaranteed {millions(row.get('limit', 0))} GPUs in {pool} in such use; this job asks for {asked}"
        ),
        "fair-share": lambda: f"{free} GPUs in {pool} were free and went to teams that were owed them first",
        "no-capacity": lambda: f"It asks for {asked} GPUs in {pool}; {free} are free",
        "fragmented": lambda: (
            f"{free} GPUs are free in {pool}, but at most {millions(row.get('largest', 0))} in one piece; it asks for {asked}"
        ),
        "topology": lambda: (
            f"No {row.get('level')} of {pool} has room for all of it: {millions(row.get('largest', 0))} of {asked} GPUs"
        ),
        "reserved": lambda: f"Free GPUs in {pool} are reserved for job {row.get('job')}" + (f" until {until}" if until else ""),
        "awaiting-eviction": lambda: f"GPUs in {pool} are being freed for it" + (f", by {until} at the latest" if until else ""),
        "cluster-unavailable": lambda: f"Cluster {row.get('detail', '')} cannot be reached; {pool} gets no new jobs",
        "maintenance": lambda: f"It would run into {row.get('detail', 'maintenance')} in {pool}" + (f", which ends {until}" if until else ""),
    }  # fmt: skip
    make = texts.get(code)
    return f"{make()}." if make else code


def _help(row: dict[str, Any], names: Names) -> str:
    remedy = row.get("remedy")
    if not remedy:
        return ""
    value = remedy.get("value")
    change = remedy["change"]
    if change == "fewer-gpus":
        return f"With {millions(value)} GPUs it could start now."
    if change == "fewer-workers":
        return f"With {value:.0f} workers it could start now."
    if change == "other-pool":
        return f"In {names.pool(remedy.get('pool'))} it could start now."
    if change == "interruptible":
        return "As an interruptible job it could start now."
    if change == "shorter-walltime":
        return f"With a walltime of at most {duration(value)} it could start now."
    return "Without the topology constraint it could start now."
