"""Energy and carbon: measured power where there is any, else the model's; carbon hour by hour, then summed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.db.models import Sum

from scheduling.models import CarbonIntensity, HourlyEnergy, Pool, ReportingRule
from scheduling.reports.hours import read
from scheduling.reports.intervals import HOUR_US, Bucket
from scheduling.reports.scope import Scope

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Energy:
    """``kwh`` is at the devices; ``facility_kwh`` and ``kg`` include the PUE."""

    kwh: float
    measured_kwh: float
    modelled_kwh: float
    idle_kwh: float
    pue: float
    facility_kwh: float
    kg: float
    by_pool: dict[int, float]
    #: (start of hour, kWh at the devices, g/kWh): summed by the charts.
    hours: list[tuple[datetime, float, float]]

    @property
    def measured_share(self) -> float | None:
        return self.measured_kwh / self.kwh if self.kwh else None


def energy(scope: Scope) -> Energy:
    """Device time that was not measured counts at the model's TDP while held, at its idle draw while not, and at
    nothing while the node is down."""
    rule = ReportingRule.objects.order_by("-id").first() or ReportingRule()
    pools = {pool.pk: pool for pool in Pool.objects.select_related("gpu_model")}
    table = read(scope, Bucket.HOUR, by=("pool",))
    measured = _measured(scope)
    intensities = _Intensities(float(rule.grams_per_kwh))
    idle_kwh = measured_kwh = modelled_kwh = kg = 0.0
    by_pool: dict[int, float] = {}
    by_hour: dict[datetime, tuple[float, float]] = {}
    for (position, pool_id), use in table.by("bucket", "pool").items():
        pool = pools[pool_id]  # type: ignore[index]
        begins = table.buckets[position].start  # type: ignore[call-overload]
        held, free = (
            measured.get((begins, pool.pk, True), (0.0, 0.0)),
            measured.get((begins, pool.pk, False), (0.0, 0.0)),
        )
        busy_model = _model(_left(use.allocated, held[1]), pool.gpu_model.tdp_watts)
        idle_model = _model(_left(use.idle + use.unknown_idle, free[1]), pool.gpu_model.idle_watts)
        kwh = (held[0] + free[0]) / JOULES_PER_KWH + busy_model + idle_model
        idle_kwh += free[0] / JOULES_PER_KWH + idle_model
        measured_kwh += (held[0] + free[0]) / JOULES_PER_KWH
        modelled_kwh += busy_model + idle_model
        by_pool[pool.pk] = by_pool.get(pool.pk, 0.0) + kwh
        grams = intensities.at(begins, pool.cluster_id)
        kg += carbon([(kwh * float(rule.pue), grams)])
        before, _ = by_hour.get(begins, (0.0, grams))
        by_hour[begins] = (before + kwh, grams)
    kwh = measured_kwh + modelled_kwh
    hours = [(begins, *by_hour[begins]) for begins in sorted(by_hour)]
    return Energy(kwh, measured_kwh, modelled_kwh, idle_kwh, float(rule.pue), kwh * float(rule.pue), kg, by_pool, hours)


def carbon(hours: Iterable[tuple[float, float]]) -> float:
    """Kilograms from (kWh, g/kWh) of each hour: multiplied hour by hour, then summed."""
    return sum(kwh * grams for kwh, grams in hours) / 1000


def _left(amount: Decimal, measured_us: float) -> float:
    return max(0.0, float(amount) - measured_us)


def _model(gpu_us: float, watts: int) -> float:
    return gpu_us / HOUR_US * watts / 1000


def _measured(scope: Scope) -> dict[tuple[datetime, int, bool], tuple[float, float]]:
    """(joules, GPU-microseconds measured) by hour, pool and whether somebody held the devices."""
    rows = HourlyEnergy.objects.filter(hour__gte=scope.since, hour__lt=scope.end)
    if scope.pools is not None:
        rows = rows.filter(pool_id__in=scope.pools)
    if scope.teams is not None:
        rows = rows.filter(team_id__in=scope.teams)
    sums: dict[tuple[datetime, int, bool], tuple[float, float]] = {}
    for hour, pool, team, joules, measured in rows.values_list("hour", "pool_id", "team_id").annotate(
        j=Sum("joules"), m=Sum("measured")
    ):
        key = (hour, pool, team is not None)
        before = sums.get(key, (0.0, 0.0))
        sums[key] = (before[0] + joules, before[1] + float(measured))
    return sums


class _Intensities:
    """Grams per kWh in force at an hour: the cluster's own row, else the general one, else the rule's."""

    def __init__(self, default: float) -> None:
        self.default = default
        self.rows: dict[int | None, list[tuple[datetime, float]]] = {}
        for cluster, since, grams in CarbonIntensity.objects.order_by("since").values_list(
            "cluster_id", "since", "grams_per_kwh"
        ):
            self.rows.setdefault(cluster, []).append((since, float(grams)))

    def at(self, hour: datetime, cluster: int) -> float:
        for rows in (self.rows.get(cluster, []), self.rows.get(None, [])):
            place = _last_before(rows, hour)
            if place is not None:
                return rows[place][1]
        return self.default


def _last_before(rows: list[tuple[datetime, float]], hour: datetime) -> int | None:
    place = bisect_right(rows, hour, key=lambda row: row[0]) - 1
    return place if place >= 0 else None
