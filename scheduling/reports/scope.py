"""What a report is about: a range of time, a viewer's clock, and which teams, pools and classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from scheduling.reports.intervals import Bucket, Interval, buckets

UTC_ZONE = ZoneInfo("UTC")

#: Raised with every change of a formula; printed on charts and exports, kept with frozen reports.
DEFINITION_VERSION = "2026.1"


@dataclass(frozen=True, slots=True)
class Scope:
    """``teams``, ``pools``, ``classes``: ids or names that count, ``None`` = all of them.

    ``whole`` is true when the viewer may see every team: only then the hardware's idle time is part of the answer,
    because it belongs to nobody's team. ``now`` is the cut-off: nothing after it counts.
    """

    since: datetime
    until: datetime
    now: datetime
    zone: ZoneInfo = UTC_ZONE
    teams: frozenset[int] | None = None
    pools: frozenset[int] | None = None
    classes: frozenset[str] | None = None
    whole: bool = True

    def __post_init__(self) -> None:
        if self.since >= self.until:
            raise ValueError(f"since {self.since.isoformat()} must be before until {self.until.isoformat()}")

    @property
    def end(self) -> datetime:
        """Where counting stops: the end of the range or the present."""
        return max(self.since, min(self.until, self.now))

    @property
    def step(self) -> Bucket:
        """Width of the bars that suits the range: at most about a hundred of them."""
        length = self.until - self.since
        if length <= timedelta(days=3):
            return Bucket.HOUR
        if length <= timedelta(days=93):
            return Bucket.DAY
        return Bucket.WEEK if length <= timedelta(days=400) else Bucket.MONTH

    def buckets(self, step: Bucket | None = None) -> list[Interval]:
        return buckets(self.since, self.end, step or self.step, self.zone)

    def before(self) -> Scope:
        """The period just before, of the same length on the viewer's clock."""
        length = self.until.astimezone(self.zone).replace(tzinfo=None) - self.since.astimezone(self.zone).replace(
            tzinfo=None
        )
        local = self.since.astimezone(self.zone).replace(tzinfo=None) - length
        return replace(self, since=local.replace(tzinfo=self.zone).astimezone(UTC), until=self.since)

    def where(self, alias: str, *, classes: str | None = None) -> tuple[str, list[object]]:
        """SQL conditions on ``team_id`` and ``pool_id`` of a table (and on a class column), with their values."""
        parts, values = ["TRUE"], []
        if self.teams is not None:
            parts.append(f"{alias}.team_id = ANY(%s)")
            values.append(sorted(self.teams))
        if self.pools is not None:
            parts.append(f"{alias}.pool_id = ANY(%s)")
            values.append(sorted(self.pools))
        if self.classes is not None and classes is not None:
            parts.append(f"{classes} = ANY(%s)")
            values.append(sorted(self.classes))
        return " AND ".join(parts), values


@dataclass(frozen=True, slots=True)
class Definition:
    """What every chart and export carries."""

    formula: str
    idle_rule: str
    zone: str
    cut_off: datetime
    #: Share of the allocated time that was measured, 0 to 1; ``None`` where it does not matter.
    coverage: float | None = None
    notes: tuple[str, ...] = ()
    version: str = DEFINITION_VERSION
