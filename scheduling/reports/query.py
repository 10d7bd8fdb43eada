"""The question in an address: range, teams, pools, models, classes, comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Any, Protocol
from zoneinfo import ZoneInfo

from scheduling.models import GPUModel, Pool, WorkloadClass
from scheduling.reports.scope import Scope
from teams.models import Team
from teams.permissions import below

RANGES = {"1d": "Yesterday and today", "7d": "7 days", "28d": "28 days", "91d": "Quarter", "365d": "Year"}
LONGEST = timedelta(days=3 * 366)


class QueryError(ValueError):
    """Names field, value and what is allowed."""

    def __init__(self, field: str, value: str, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}: “{value}” is not allowed; give {allowed}.")


class MultiMapping(Protocol):
    """Django's QueryDict."""

    def get(self, key: str, default: str = ...) -> Any: ...
    def getlist(self, key: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Query:
    scope: Scope
    #: As given: ``28d``, or empty with dates.
    range: str
    team: str
    pool: str
    model: str
    workload_class: str
    compare: bool
    visible: frozenset[int] | None

    @property
    def first_day(self) -> date:
        return self.scope.since.astimezone(self.scope.zone).date()

    @property
    def last_day(self) -> date:
        return (self.scope.until - timedelta(microseconds=1)).astimezone(self.scope.zone).date()

    @property
    def period(self) -> str:
        return f"{self.first_day:%Y-%m-%d} to {self.last_day:%Y-%m-%d}"

    def parameters(self, *, fixed: bool = False) -> dict[str, str]:
        """For addresses; ``fixed`` names the days, so that the link shows the same range for ever."""
        pairs = {"team": self.team, "pool": self.pool, "model": self.model, "class": self.workload_class}
        if self.range and not fixed:
            pairs["range"] = self.range
        else:
            pairs |= {"since": f"{self.first_day}", "until": f"{self.last_day}"}
        if self.compare:
            pairs["compare"] = "1"
        return {key: value for key, value in pairs.items() if value}


def parse(given: MultiMapping, *, now: datetime, zone: tzinfo, visible: set[int] | None, default: str = "28d") -> Query:
    """``visible``: teams the viewer may see, ``None`` = all. Raises ``QueryError``; a team that is not visible is
    unknown to the viewer."""
    own = zone if isinstance(zone, ZoneInfo) else ZoneInfo("UTC")
    chosen = _text(given, "range")
    since, until = _text(given, "since"), _text(given, "until")
    if since or until:
        chosen = ""
        first, last = _day("since", since), _day("until", until)
    else:
        chosen = chosen or default
        first, last = _preset(chosen, now.astimezone(own).date())
    if first > last:
        raise QueryError("until", f"{last}", f"a day not before {first}")
    begins, ends = _midnight(first, own), _midnight(last + timedelta(days=1), own)
    if ends - begins > LONGEST:
        raise QueryError("since", f"{first}", "at most three years")
    if begins >= now:
        raise QueryError("since", f"{first}", "a day that has begun")
    team, pool = _text(given, "team"), _text(given, "pool")
    model, workload = _text(given, "model"), _text(given, "class")
    scope = Scope(
        since=begins,
        until=ends,
        now=now,
        zone=own,
        teams=_teams(team, visible),
        pools=_pools(pool, model),
        classes=_class(workload),
        whole=visible is None,
    )
    return Query(
        scope, chosen, team, pool, model, workload, bool(_text(given, "compare")),
        None if visible is None else frozenset(visible),
    )  # fmt: skip


def _text(given: MultiMapping, name: str) -> str:
    return str(given.get(name, "") or "").strip().replace("\x00", "")[:200]


def _day(field: str, value: str) -> date:
    try:
        day = date.fromisoformat(value)
    except ValueError:
        raise QueryError(field, value, "a day as YYYY-MM-DD") from None
    if not 2000 <= day.year <= 2200:
        raise QueryError(field, value, "a day from 2000 to 2200")
    return day


def _preset(chosen: str, today: date) -> tuple[date, date]:
    """So many days up to today, ``month`` (the running one), ``last-month``."""
    if chosen == "month":
        return today.replace(day=1), today
    if chosen == "last-month":
        last = today.replace(day=1) - timedelta(days=1)
        return last.replace(day=1), last
    match = re.fullmatch(r"([1-9]\d{0,2})d", chosen)
    if match is None:
        raise QueryError("range", chosen, "a number of days such as 28d, month or last-month")
    return today - timedelta(days=int(match[1]) - (0 if chosen == "1d" else 1)), today


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time(0), tzinfo=zone).astimezone(UTC)


def _teams(name: str, visible: set[int] | None) -> frozenset[int] | None:
    if not name:
        return None if visible is None else frozenset(visible)
    number = Team.objects.filter(name=name).values_list("id", flat=True).first()
    if number is None or (visible is not None and number not in visible):
        raise QueryError("team", name, "the name of a team that you may see")
    under = below([number])
    return frozenset(under if visible is None else under & visible)


def _pools(pool: str, model: str) -> frozenset[int] | None:
    if not pool and not model:
        return None
    rows = Pool.objects.all()
    if pool:
        rows = rows.filter(name=pool)
        if not rows.exists():
            raise QueryError("pool", pool, "the name of a pool")
    if model:
        if not GPUModel.objects.filter(name=model).exists():
            raise QueryError("model", model, "the name of a GPU model")
        rows = rows.filter(gpu_model__name=model)
    return frozenset(rows.values_list("id", flat=True))


def _class(name: str) -> frozenset[str] | None:
    if not name:
        return None
    if name not in WorkloadClass.values:
        raise QueryError("class", name, f"one of {', '.join(WorkloadClass.values)}")
    return frozenset({name})


def choices(query: Query) -> Mapping[str, list[str]]:
    """What the pickers offer this viewer."""
    teams = Team.objects.filter(archived_at=None)
    if query.visible is not None:
        teams = teams.filter(pk__in=query.visible)
    return {
        "teams": list(teams.values_list("name", flat=True)[:2000]),
        "pools": list(Pool.objects.values_list("name", flat=True)[:500]),
        "models": list(GPUModel.objects.values_list("name", flat=True)[:500]),
    }
