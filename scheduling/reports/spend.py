"""What does the idle and lost part cost? The price of all capacity, split so that it adds up to 100 %."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from scheduling.models import Pool, ReportingRule
from scheduling.reports.hours import Use, read
from scheduling.reports.intervals import HOUR_US
from scheduling.reports.intervals import hours as exact_hours
from scheduling.reports.scope import Scope

CENT = Decimal("0.01")

#: Parts of the budget: their words, and the states of 7.1 that they are made of.
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "productive": ("Productive", ("productive",)),
    "unknown": ("Allocated, not measured", ("unknown",)),
    "no_activity": ("Allocated without activity", ("no_activity",)),
    "startup": ("Start-up and grace", ("startup",)),
    "lost_failed": ("Lost to failures", ("lost_failed",)),
    "lost_preempted": ("Lost to preemption", ("lost_preempted",)),
    "idle": ("Idle", ("free", "stranded", "reserved")),
    "down": ("Down and maintenance", ("down", "maintenance")),
}
#: Parts that pay for hardware that produces nothing (7: waste).
WASTE = ("no_activity", "startup", "lost_failed", "lost_preempted", "idle", "down")


@dataclass(frozen=True, slots=True)
class Share:
    part: str
    label: str
    money: Decimal
    gpu_hours: Decimal
    #: Per cent with one decimal; the shares of a split add up to exactly 100.
    percent: Decimal


@dataclass(frozen=True, slots=True)
class TeamBill:
    """Showback of one team in one pool: allocated GPU-hours at the pool's price."""

    team: int
    pool: int
    gpu_hours: Decimal
    price: Decimal
    money: Decimal
    wasted: Decimal


@dataclass(frozen=True, slots=True)
class Spend:
    currency: str
    total: Decimal
    split: list[Share]
    bills: list[TeamBill]
    #: Money by part and bucket position, for the chart.
    prices: dict[int, Decimal]

    @property
    def wasted(self) -> Decimal:
        return sum((row.money for row in self.split if row.part in WASTE), Decimal(0))

    @property
    def wasted_percent(self) -> Decimal:
        return sum((row.percent for row in self.split if row.part in WASTE), Decimal(0))


def prices(scope: Scope) -> dict[int, Decimal]:
    pools = Pool.objects.select_related("gpu_model")
    if scope.pools is not None:
        pools = pools.filter(pk__in=scope.pools)
    return {pool.pk: pool.price for pool in pools}


def spend(scope: Scope) -> Spend:
    table = read(scope, by=("pool", "team"))
    price = prices(scope)
    by_pool = {pool: use for (pool,), use in table.by("pool").items()}
    rule = ReportingRule.objects.order_by("-id").first() or ReportingRule()
    split = split_of({pool: use for pool, use in by_pool.items()}, price)  # type: ignore[misc]
    bills = [
        bill(team, pool, use, price[pool])  # type: ignore[arg-type,index]
        for (pool, team), use in sorted(table.by("pool", "team").items(), key=str)
        if team is not None and use.allocated
    ]
    return Spend(rule.currency, sum((row.money for row in split), Decimal(0)), split, bills, price)


def bill(team: int, pool: int, use: Use, price: Decimal) -> TeamBill:
    hours = use.allocated / HOUR_US
    wasted = (use.no_activity + use.startup + use.lost) / HOUR_US * price
    return TeamBill(team, pool, exact_hours(use.allocated), price, cents(hours * price), cents(wasted))


def split_of(by_pool: dict[int, Use], price: dict[int, Decimal]) -> list[Share]:
    """Money by part over all pools; per cents by the largest remainder, so that they add up to 100.0."""
    money = {part: Decimal(0) for part in PARTS}
    hours = {part: Decimal(0) for part in PARTS}
    for pool, use in by_pool.items():
        for part, (_, states) in PARTS.items():
            amount = sum((use.of(state) for state in states), Decimal(0)) / HOUR_US
            hours[part] += amount
            money[part] += amount * price[pool]
    percents = hundred_percent(list(money.values()))
    return [
        Share(part, PARTS[part][0], cents(money[part]), hours[part].quantize(Decimal("0.000001")), percent)
        for part, percent in zip(PARTS, percents, strict=True)
    ]


def hundred_percent(amounts: list[Decimal]) -> list[Decimal]:
    """Shares in tenths of a per cent by the largest remainder; all zero where there is nothing to share."""
    whole = sum(amounts, Decimal(0))
    if whole <= 0:
        return [Decimal("0.0")] * len(amounts)
    exact = [amount / whole * 1000 for amount in amounts]
    tenths = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: (tenths[place] - exact[place], place))
    for place in by_remainder[: 1000 - sum(tenths)]:
        tenths[place] += 1
    return [Decimal(value) / 10 for value in tenths]


def cents(amount: Decimal) -> Decimal:
    return amount.quantize(CENT, ROUND_HALF_UP)
