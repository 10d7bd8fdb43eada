"""Reading the hourly roll-up: sums by bucket, pool, team and class, exact at edges inside an hour.

Full hours come from ``HourlyUse``. Pieces of hours (edges of the range, days of zones with half-hour offsets, the
running hour, and hours not rolled up yet) are worked out from the ledger with the same SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal

from django.db import connection

from scheduling.models import RollupState
from scheduling.reports.intervals import HOUR_US, Bucket, Interval, epoch_us, hour_ceil, hour_floor
from scheduling.reports.ledger_sql import RESULT, STATES, parameters
from scheduling.reports.scope import Scope

AMOUNTS = RESULT[4:]

#: States of design.md 7.1 and the words for them, in the order in which charts stack them.
STATE_LABELS = {
    "productive": "Productive",
    "unknown": "Unknown (not measured)",
    "no_activity": "Allocated without activity",
    "startup": "Start-up and grace",
    "lost": "Lost work",
    "reserved": "Reserved and unused",
    "stranded": "Stranded",
    "free": "Free",
    "maintenance": "Maintenance",
    "down": "Down",
}


@dataclass(slots=True)
class Use:
    """GPU-microseconds by state; see ``HourlyUse`` for the names."""

    capacity: Decimal = Decimal(0)
    down: Decimal = Decimal(0)
    maintenance: Decimal = Decimal(0)
    free: Decimal = Decimal(0)
    stranded: Decimal = Decimal(0)
    reserved: Decimal = Decimal(0)
    startup: Decimal = Decimal(0)
    no_activity: Decimal = Decimal(0)
    lost_failed: Decimal = Decimal(0)
    lost_preempted: Decimal = Decimal(0)
    productive: Decimal = Decimal(0)
    unknown: Decimal = Decimal(0)
    busy: Decimal = Decimal(0)
    measured: Decimal = Decimal(0)
    overlap: Decimal = Decimal(0)
    excess: Decimal = Decimal(0)
    #: Of ``unknown``: on nodes of unknown state, held by nobody.
    unknown_idle: Decimal = Decimal(0)

    @property
    def lost(self) -> Decimal:
        return self.lost_failed + self.lost_preempted

    @property
    def allocated(self) -> Decimal:
        return self.startup + self.no_activity + self.lost + self.productive + self.unknown - self.unknown_idle

    @property
    def out_of_service(self) -> Decimal:
        """Down in the wide sense of design.md 7: down, drained, in maintenance."""
        return self.down + self.maintenance

    @property
    def idle(self) -> Decimal:
        """capacity - down - allocated; the unknown state of nodes is not called idle."""
        return self.free + self.stranded + self.reserved

    @property
    def states(self) -> Decimal:
        return self.out_of_service + self.idle + self.allocated + self.unknown_idle

    @property
    def difference(self) -> Decimal:
        """Reconciliation error: never clipped, shown where it is not zero."""
        return self.capacity - self.states

    @property
    def not_producing(self) -> Decimal:
        """All states but productive and unknown (7.1)."""
        return self.states - self.productive - self.unknown

    def of(self, state: str) -> Decimal:
        return getattr(self, state)

    def add(self, values: Iterable[Decimal], *, nobody: bool) -> None:
        for name, value in zip(AMOUNTS, values, strict=True):
            if value:
                before = getattr(self, name)
                setattr(self, name, before + value if before else value)
                if nobody and name == "unknown":
                    self.unknown_idle += value

    def plus(self, other: Use) -> Use:
        return Use(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


def ratio(part: Decimal | float, whole: Decimal | float) -> float | None:
    """``None`` where there is nothing to divide by."""
    return float(Decimal(part) / Decimal(whole)) if whole else None


def gpu_hours(amount: Decimal) -> float:
    """For charts and tables; sums are made before."""
    return float(amount / HOUR_US)


@dataclass(slots=True)
class Table:
    """Sums of one read, by bucket position, pool, team (``None`` = nobody) and class."""

    buckets: list[Interval]
    rows: dict[tuple[int, int, int | None, str], Use] = field(default_factory=dict)

    def by(self, *names: str) -> dict[tuple[object, ...], Use]:
        """Sums by any of ``bucket``, ``pool``, ``team``, ``workload_class``."""
        places = [("bucket", "pool", "team", "workload_class").index(name) for name in names]
        sums: dict[tuple[object, ...], Use] = {}
        for key, use in self.rows.items():
            wanted = tuple(key[place] for place in places)
            sums[wanted] = sums[wanted].plus(use) if wanted in sums else use
        return sums

    @property
    def total(self) -> Use:
        return self.by().get((), Use())


def read(scope: Scope, step: Bucket | None = None, *, by: Sequence[str] = ("pool", "team")) -> Table:
    """Sums over ``scope`` in the buckets of its time axis (``step`` ``None`` = one bucket)."""
    edges = scope.buckets(step) if step is not None else [Interval(scope.since, scope.end)]
    table = Table([edge for edge in edges if edge.start < edge.end])
    if not table.buckets:
        return table
    rolled = RollupState.objects.values_list("rolled_until", flat=True).first() or scope.since
    full_since, full_until = hour_ceil(scope.since), min(hour_floor(scope.end), rolled)
    cut = {hour_floor(edge.end) for edge in table.buckets[:-1] if hour_floor(edge.end) != edge.end}
    if full_since < full_until:
        _from_rollup(scope, table, full_since, full_until, cut, by)
        pieces = [Interval(scope.since, full_since), Interval(full_until, scope.end)]
        pieces += [Interval(hour, hour + timedelta(hours=1)) for hour in cut if full_since <= hour < full_until]
    else:
        pieces = [Interval(scope.since, scope.end)]
    for start, end in pieces:
        for position, bucket in enumerate(table.buckets):
            first, last = max(start, bucket.start), min(end, bucket.end)
            if first < last:
                _from_ledger(scope, table, position, first, last, by)
    return table


def _from_rollup(
    scope: Scope, table: Table, since: datetime, until: datetime, cut: set[datetime], by: Sequence[str]
) -> None:
    conditions, values = _conditions(scope)
    pool = "pool_id" if "pool" in by else "0"
    team = "team_id" if "team" in by else "CASE WHEN team_id IS NULL THEN NULL ELSE 0 END"
    workload = "workload_class" if "workload_class" in by else "''"
    sums = ", ".join(f"sum({name})" for name in AMOUNTS)
    position = "0" if len(table.buckets) == 1 else "width_bucket(hour, %s::timestamptz[]) - 1"
    starts = [] if len(table.buckets) == 1 else [[bucket.start for bucket in table.buckets]]
    with connection.cursor() as cursor:
        cursor.execute("SET jit = off")
        cursor.execute(
            f"SELECT {position}, {pool}, {team}, {workload}, {sums} FROM scheduling_hourlyuse"
            f" WHERE hour >= %s AND hour < %s AND hour <> ALL(%s::timestamptz[]) AND {conditions} GROUP BY 1, 2, 3, 4",
            [*starts, since, until, sorted(cut), *values],
        )
        for position_, pool_, team_, workload_, *amounts in cursor.fetchall():
            key = (position_, pool_, team_, workload_)
            table.rows.setdefault(key, Use()).add(amounts, nobody=team_ is None)


def _from_ledger(
    scope: Scope, table: Table, position: int, since: datetime, until: datetime, by: Sequence[str]
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET jit = off")
        cursor.execute(STATES, parameters(since, until))
        for _, pool, team, workload, *amounts in cursor.fetchall():
            if not _in_scope(scope, pool, team, workload):
                continue
            key = (
                position,
                pool if "pool" in by else 0,
                team if "team" in by or team is None else 0,
                workload if "workload_class" in by else "",
            )
            table.rows.setdefault(key, Use()).add(amounts, nobody=team is None)


def _conditions(scope: Scope) -> tuple[str, list[object]]:
    parts, values = ["TRUE"], []
    if scope.pools is not None:
        parts.append("pool_id = ANY(%s)")
        values.append(sorted(scope.pools))
    owned = ["TRUE"]
    if scope.teams is not None:
        owned.append("team_id = ANY(%s)")
        values.append(sorted(scope.teams))
    if scope.classes is not None:
        owned.append("workload_class = ANY(%s)")
        values.append(sorted(scope.classes))
    mine = f"team_id IS NOT NULL AND {' AND '.join(owned)}"
    parts.append(f"({mine}{' OR team_id IS NULL' if _sees_hardware(scope) else ''})")
    return " AND ".join(parts), values


def _sees_hardware(scope: Scope) -> bool:
    """Idle hardware belongs to no team and no class: it is counted only when nothing of the kind is picked."""
    return scope.whole and scope.teams is None and scope.classes is None


def _in_scope(scope: Scope, pool: int, team: int | None, workload: str) -> bool:
    if scope.pools is not None and pool not in scope.pools:
        return False
    if team is None:
        return _sees_hardware(scope)
    if scope.teams is not None and team not in scope.teams:
        return False
    return scope.classes is None or workload in scope.classes


def typical_week(scope: Scope) -> dict[tuple[int, int], Use]:
    """Sums of the full hours of the range by local weekday (0 = Monday) and hour of the day."""
    conditions, values = _conditions(scope)
    sums = ", ".join(f"sum({name})" for name in AMOUNTS)
    local = "(hour AT TIME ZONE %s)"
    with connection.cursor() as cursor:
        cursor.execute("SET jit = off")
        cursor.execute(
            f"SELECT w, h, nobody, {sums} FROM (SELECT *, extract(isodow FROM {local})::int - 1 AS w,"
            f" extract(hour FROM {local})::int AS h, team_id IS NULL AS nobody FROM scheduling_hourlyuse"
            f" WHERE hour >= %s AND hour < %s AND {conditions}) AS x GROUP BY 1, 2, 3",
            [scope.zone.key, scope.zone.key, hour_ceil(scope.since), hour_floor(scope.end), *values],
        )
        week: dict[tuple[int, int], Use] = {}
        for weekday, hour, nobody, *amounts in cursor.fetchall():
            week.setdefault((weekday, hour), Use()).add(amounts, nobody=nobody)
    return week


def hourly_allocated(scope: Scope) -> dict[tuple[int, int], dict[int, Decimal]]:
    """Allocated GPU-microseconds by (team, pool) and start of the UTC hour, or of the piece of one, in epoch
    microseconds: for rules that compare hour by hour."""
    rolled = RollupState.objects.values_list("rolled_until", flat=True).first() or scope.since
    since, until = hour_ceil(scope.since), min(hour_floor(scope.end), rolled)
    found: dict[tuple[int, int], dict[int, Decimal]] = {}
    conditions, values = _conditions(scope)
    held = "startup + no_activity + lost_failed + lost_preempted + productive + unknown"
    pieces = [(scope.since, scope.end)]
    if since < until:
        pieces = [(scope.since, since), (until, scope.end)]
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT team_id, pool_id, (extract(epoch FROM hour) * 1000000)::bigint, sum({held})"
                f" FROM scheduling_hourlyuse WHERE team_id IS NOT NULL AND hour >= %s AND hour < %s AND {conditions}"
                " GROUP BY 1, 2, 3",
                [since, until, *values],
            )
            for team, pool, hour, amount in cursor.fetchall():
                found.setdefault((team, pool), {})[hour] = amount
    for first, last in pieces:
        start = first
        while start < last:
            stop = min(hour_floor(start) + timedelta(hours=1), last)
            table = Table([Interval(start, stop)])
            _from_ledger(scope, table, 0, start, stop, ("pool", "team"))
            for (_, pool, team, _), use in table.rows.items():
                if team is not None:
                    found.setdefault((team, pool), {})[epoch_us(start)] = use.allocated
            start = stop
    return found
