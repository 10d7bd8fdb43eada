"""What a report page is: one question, one number, charts, the tables behind them, the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from scheduling.models import Pool, ReportingRule
from scheduling.reports.estimators import FEW, Percentile
from scheduling.reports.figures import Figure, zone_note
from scheduling.reports.scope import Definition, Scope
from teams.models import Team

#: What a cell may hold; exports keep numbers as numbers.
Cell = str | int | float | Decimal | datetime | None


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    #: Said instead of an empty table.
    empty: str = "Nothing in this range."
    #: Decimals of the numbers.
    decimals: int = 1


@dataclass(frozen=True, slots=True)
class Number:
    """A figure beside the answer; ``value`` is also compared with the period before."""

    label: str
    text: str
    value: float | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    question: str
    #: The one number, with its unit.
    answer: str
    #: One sentence that says what the number is.
    sentence: str
    numbers: Sequence[Number]
    figures: Sequence[Figure]
    tables: Sequence[Table]
    definition: Definition
    #: The one number as a number, for the comparison with the period before.
    value: float | None = None
    warnings: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True)
class Report:
    slug: str
    title: str
    question: str
    make: Callable[[Scope], Page]
    #: Only for those who see all teams: it is about the hardware as a whole.
    whole_only: bool = False
    #: For the comparison: whether a larger number is better.
    more_is_better: bool = False
    unit: str = ""


class Names:
    """Names of teams and pools, read once."""

    def __init__(self) -> None:
        self.teams: dict[int, str] = dict(Team.objects.values_list("id", "name"))
        self.pools: dict[int, str] = dict(Pool.objects.values_list("id", "name"))

    def team(self, number: object) -> str:
        return self.teams.get(number, f"team {number}")  # type: ignore[call-overload]

    def pool(self, number: object) -> str:
        return self.pools.get(number, "unknown pool")  # type: ignore[call-overload]


def definition(scope: Scope, formula: str, *, coverage: float | None = None, notes: Sequence[str] = ()) -> Definition:
    return Definition(
        formula, idle_rule(), zone_note(scope.since, scope.end, scope.zone), scope.end, coverage, tuple(notes)
    )


def rule() -> ReportingRule:
    """The rule in force; the defaults where nobody set one."""
    return ReportingRule.objects.order_by("-id").first() or ReportingRule()


def idle_rule() -> str:
    now = rule()
    return (
        f"without activity = SM_ACTIVE (else GR_ENGINE_ACTIVE, else GPU_UTIL) below {now.idle_threshold * 100:.4g} %"
        f" for at least {now.idle_window_seconds / 60:g} min; what was not measured is unknown"
    )


def percent(value: float | Decimal | None, digits: int = 1) -> str:
    return "–" if value is None else f"{float(value) * 100:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """``2 h 5 min``: two units at most."""
    if seconds is None:
        return "not reached"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 2880:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"


def percentile_number(value: Percentile, hint: str = "") -> Number:
    """A card: the value large, its interval below."""
    if value.n and value.low is not None and value.value is not None:
        high = "open" if value.high is None else duration(value.high)
        hint = f"95 %: {duration(value.low)} to {high}"
    elif value.n and not value.enough:
        hint = f"n = {value.n}: too few for an interval"
    return Number(f"p{value.share * 100:.0f}", duration(value.value) if value.n else "–", value.value, hint)


def percentile_text(value: Percentile) -> str:
    """With its interval where there are enough samples; few samples are marked."""
    if value.n == 0:
        return "–"
    text = duration(value.value)
    if value.low is not None and value.value is not None:
        text += f" ({duration(value.low)} to {duration(value.high) if value.high is not None else 'open'})"
    elif not value.enough:
        text += " (too few for an interval)"
    return text


def count_text(n: int) -> str:
    return f"{n:,} ⚠ few" if n < FEW else f"{n:,}"


def payload(page: Page) -> dict[str, Any]:
    """All numbers of a page as plain JSON: what a frozen report keeps and the API gives."""

    def cell(value: Cell) -> Any:
        if isinstance(value, Decimal):
            return str(value)
        return value.isoformat() if isinstance(value, datetime) else value

    return {
        "question": page.question,
        "answer": page.answer,
        "sentence": page.sentence,
        "numbers": [{"label": row.label, "text": row.text, "value": row.value} for row in page.numbers],
        "tables": [
            {
                "title": t.title,
                "columns": list(t.columns),
                "decimals": t.decimals,
                "empty": t.empty,
                "rows": [[cell(c) for c in row] for row in t.rows],
            }
            for t in page.tables
        ],
        "warnings": list(page.warnings),
        "definition": {
            "formula": page.definition.formula,
            "idle_rule": page.definition.idle_rule,
            "zone": page.definition.zone,
            "cut_off": page.definition.cut_off.isoformat(),
            "coverage": page.definition.coverage,
            "notes": list(page.definition.notes),
            "version": page.definition.version,
        },
    }
