"""Pages about the hardware: idle time, cost, energy, fairness, shortage."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from scheduling.reports.capacity import shortage
from scheduling.reports.energy import energy as energy_of
from scheduling.reports.fairness import fairness as fairness_of
from scheduling.reports.figures import STATE_STYLE, Figure, Series, local_times
from scheduling.reports.hours import STATE_LABELS, Use, gpu_hours, ratio
from scheduling.reports.page import Names, Number, Page, Table, definition, percent, rule
from scheduling.reports.scope import Scope
from scheduling.reports.spend import spend as spend_of
from scheduling.reports.utilization import Utilization, utilization

WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
STATES = (
    "productive",
    "unknown",
    "no_activity",
    "startup",
    "lost",
    "reserved",
    "stranded",
    "free",
    "maintenance",
    "down",
)

STATES_FORMULA = (
    "Every GPU-second of the inventory is in exactly one state; the states add up to the capacity. idle = capacity − "
    "down − allocated = free + stranded + reserved and unused. Share idle = idle / (capacity − down − maintenance). "
    "Not producing = all states but productive and unknown."
)


def idle(scope: Scope) -> Page:
    report = utilization(scope)
    names = Names()
    total = report.total
    hardware = scope.whole and scope.teams is None and scope.classes is None
    if hardware:
        answer, value = percent(report.idle_share), report.idle_share
        sentence = "of the usable GPU time was given to nobody."
    else:
        value = ratio(total.no_activity + total.startup + total.lost, total.allocated)
        answer, sentence = percent(value), "of the GPU time you were given produced nothing."
    return Page(
        question="How much hardware sits idle?",
        answer=answer,
        sentence=sentence,
        numbers=[
            Number("Capacity", f"{gpu_hours(total.capacity):,.0f}", gpu_hours(total.capacity), "GPU-hours"),
            Number("Allocated", f"{gpu_hours(total.allocated):,.0f}", gpu_hours(total.allocated), "GPU-hours"),
            Number("Activity where measured", percent(report.busy_share), report.busy_share),
            Number("Not producing", percent(ratio(total.not_producing, total.states)), hint="of all GPU time"),
        ],
        figures=_idle_figures(scope, report, hardware),
        tables=_idle_tables(report, names),
        definition=definition(
            scope,
            STATES_FORMULA,
            coverage=report.coverage,
            notes=(
                "A node that is down counts as down even while a run holds it; a run on a draining node or in a maintenance"
                " window counts as allocated.",
                "Stranded: free, yet no job that waited and could start fitted (shape, topology, quota), as recorded by"
                " each scheduling cycle.",
            ),
        ),
        value=value,
        warnings=_reconciliation(total),
    )


def _reconciliation(total: Use) -> list[str]:
    """Differences are shown, never clipped (7.1)."""
    found = []
    if total.capacity and total.difference:
        found.append(
            f"Reconciliation error: {gpu_hours(total.difference):,.3f} GPU-hours are in no state. Run check_ledger."
        )
    if total.free < 0:
        found.append(f"Reconciliation error: {-gpu_hours(total.free):,.3f} GPU-hours more were held than existed.")
    if total.overlap:
        found.append(
            f"{gpu_hours(total.overlap):,.2f} GPU-hours were held on nodes that were down; they count as down."
        )
    return found


def state_series(series: Sequence[Use], states: Sequence[str] = STATES) -> list[Series]:
    """One series a state, without those that never occur."""
    rows = [
        Series(STATE_LABELS[state], [gpu_hours(use.of(state)) for use in series], *STATE_STYLE[state])
        for state in states
    ]
    return [row for row in rows if any(row.values)]


def _idle_figures(scope: Scope, report: Utilization, hardware: bool) -> list[Figure]:
    zone = definition(scope, "").zone
    largest = max(STATES, key=lambda state: report.total.of(state))
    figures = [
        Figure(
            "stacked",
            f"GPU-hours by state and {scope.step.value}",
            f"Stacked bars by {scope.step.value}: the largest state over the whole range is"
            f" {STATE_LABELS[largest].lower()} with {gpu_hours(report.total.of(largest)):,.0f} GPU-hours.",
            local_times(report.buckets, scope.zone),
            state_series(report.series),
            x_title=f"beginning of the {scope.step.value}, {zone}",
            y_title="GPU-hours",
            unit="GPU-hours",
        )
    ]
    if hardware and report.week:
        figures.append(_week_figure(report, zone))
    return figures


def _week_figure(report: Utilization, zone: str) -> Figure:
    def share(use: Use) -> float | None:
        return ratio(use.idle, use.capacity - use.out_of_service)

    rows = [[share(report.week.get((day, hour), Use())) for hour in range(24)] for day in range(7)]
    flat = [(value, day, hour) for day, row in enumerate(rows) for hour, value in enumerate(row) if value is not None]
    most, least = max(flat, default=(0, 0, 0)), min(flat, default=(0, 0, 0))
    return Figure(
        "heatmap",
        "A typical week: share idle by weekday and hour",
        f"Most is idle on {WEEKDAYS[most[1]]} at {most[2]:02d}:00 ({percent(most[0])}), least on {WEEKDAYS[least[1]]} at"
        f" {least[2]:02d}:00 ({percent(least[0])}).",
        [f"{hour:02d}:00" for hour in range(24)],
        [Series(WEEKDAYS[day], rows[day]) for day in range(7)],
        x_title=f"hour of the day, {zone}",
        rows=WEEKDAYS,
        percent=True,
    )


def _idle_tables(report: Utilization, names: Names) -> list[Table]:
    def row(name: str, use: Use) -> list[object]:
        return [name, *(gpu_hours(use.of(state)) for state in STATES), gpu_hours(use.states)]

    columns = ["", *(STATE_LABELS[state] for state in STATES), "All"]
    tables = [
        Table(
            "GPU-hours by state and pool",
            ["Pool", *columns[1:]],
            [*(row(names.pool(pool), use) for pool, use in sorted(report.by_pool.items())), row("All", report.total)],
        ),
        Table(
            "What each team was given, GPU-hours",
            ["Team", "Allocated", *(STATE_LABELS[state] for state in STATES[:5]), "Activity where measured"],
            [
                [
                    names.team(team), gpu_hours(use.allocated), *(gpu_hours(use.of(state)) for state in STATES[:5]),
                    percent(ratio(use.busy, use.measured)),
                ]
                for team, use in sorted(report.by_team.items(), key=lambda item: -item[1].allocated)
            ],
        ),
    ]  # fmt: skip
    if report.pieces:
        sizes = sorted({size for pieces in report.pieces for size in pieces.by_size})
        tables.append(
            Table(
                "Free pieces: mean number of nodes with exactly so many whole GPUs free",
                ["Pool", *(f"{size} GPU{'s' if size > 1 else ''}" for size in sizes)],
                [[names.pool(p.pool), *(p.by_size.get(size, 0.0) for size in sizes)] for p in report.pieces],
                decimals=2,
            )
        )
    return tables


def cost(scope: Scope) -> Page:
    report = spend_of(scope)
    names = Names()
    whole = scope.whole and scope.teams is None and scope.classes is None
    return Page(
        question="Which part of the budget pays for hardware that produces nothing?",
        answer=f"{report.wasted_percent} %",
        sentence=f"that is {report.wasted:,.2f} of {report.total:,.2f} {report.currency}.",
        numbers=[
            Number(row.label, f"{row.percent} %", float(row.percent), f"{row.money:,.2f} {report.currency}")
            for row in report.split
            if row.money
        ],
        figures=[
            Figure(
                "share",
                "The budget, split",
                "; ".join(f"{row.label.lower()} {row.percent} %" for row in report.split if row.money) or "nothing spent",
                [""],
                [Series(row.label, [float(row.percent)], *STATE_STYLE[row.part]) for row in report.split if row.money],
                x_title=f"per cent of {report.total:,.2f} {report.currency}",
            )
        ],
        tables=[
            Table(
                "Budget by part",
                ["Part", "GPU-hours", f"Cost, {report.currency}", "%"],
                [
                    *([row.label, row.gpu_hours, row.money, row.percent] for row in report.split),
                    [
                        "All", sum((row.gpu_hours for row in report.split), Decimal(0)), report.total,
                        sum((row.percent for row in report.split), Decimal(0)),
                    ],
                ],
                decimals=2,
            ),
            Table(
                "Showback: what each team used",
                ["Team", "Pool", "GPU-hours", f"Price per GPU-hour, {report.currency}", f"Cost, {report.currency}",
                 f"Of that without result, {report.currency}"],
                [[names.team(b.team), names.pool(b.pool), b.gpu_hours, b.price, b.money, b.wasted] for b in report.bills],
                decimals=2,
            ),
        ],
        definition=definition(
            scope,
            "GPU-hours of each state × the pool's price per GPU-hour"
            + ("" if whole else "; without the hardware's idle time, which belongs to no team")
            + ". Shares by the largest remainder, so that they add up to exactly 100 %. Showback: allocated GPU-hours × price.",
            notes=("The price is the one in force now; earlier prices are kept by frozen reports.",),
        ),
        value=float(report.wasted_percent) / 100,
    )  # fmt: skip


def energy(scope: Scope) -> Page:
    report = energy_of(scope)
    names = Names()
    now = rule()
    series: dict[str, float] = {}
    for begins, kwh, _ in report.hours:
        label = begins.astimezone(scope.zone).strftime("%Y-%m-%d %H:00" if scope.step.value == "hour" else "%Y-%m-%d")
        series[label] = series.get(label, 0.0) + kwh
    return Page(
        question="How much energy does it take, and how much carbon?",
        answer=f"{report.facility_kwh:,.0f} kWh",
        sentence=f"with the building's share (PUE {report.pue:g}); {report.kg:,.0f} kg CO₂e.",
        numbers=[
            Number("At the devices", f"{report.kwh:,.0f} kWh", report.kwh),
            Number("Measured", percent(report.measured_share), report.measured_share, "the rest by the model's power"),
            Number("By idle devices", f"{report.idle_kwh:,.0f} kWh", report.idle_kwh),
            Number("Carbon", f"{report.kg:,.1f} kg", report.kg),
        ],
        figures=[
            Figure(
                "stacked",
                "Energy at the devices",
                f"Bars over time; {report.kwh:,.0f} kWh in all, {report.idle_kwh:,.0f} of it by idle devices.",
                list(series),
                [Series("kWh", list(series.values()), "#1b9e77")],
                x_title=definition(scope, "").zone,
                y_title="kWh",
                unit="kWh",
            )
        ],
        tables=[
            Table(
                "By pool",
                ["Pool", "kWh at the devices"],
                [[names.pool(p), v] for p, v in sorted(report.by_pool.items())],
            ),
        ],
        definition=definition(
            scope,
            "Measured: difference of the energy counter, else integral of the power; what was not measured: the model's TDP"
            " while allocated, its idle watts while free, nothing while down. × PUE × carbon intensity, multiplied hour by"
            " hour, then summed.",
            notes=(f"PUE {now.pue:g}; {now.grams_per_kwh:g} g CO₂e per kWh where no hourly value is known.",),
        ),
        value=report.facility_kwh,
    )


def fairness(scope: Scope) -> Page:
    report = fairness_of(scope)
    names = Names()
    index = report.index
    rows = sorted(report.teams, key=lambda row: names.team(row.team))
    entitled = [row for row in rows if row.ratio is not None]
    return Page(
        question="Does everybody get what they are entitled to?",
        answer="–" if index is None else f"{index:.3f}",
        sentence="Jain's index over delivered / entitled: 1 = all alike.",
        numbers=[
            Number("Teams with a guarantee", str(len(entitled))),
            Number("Borrowed", f"{gpu_hours(sum((r.borrowed for r in rows), Decimal(0))):,.0f} GPU-hours"),
            Number("Lent", f"{gpu_hours(sum((r.lent for r in rows), Decimal(0))):,.0f} GPU-hours"),
        ],
        figures=[
            Figure(
                "bars",
                "Delivered beside entitled",
                "; ".join(f"{names.team(r.team)} {percent(r.ratio, 0)}" for r in entitled) or "no team has a guarantee",
                [names.team(row.team) for row in rows],
                [
                    Series("Delivered", [gpu_hours(row.delivered) for row in rows], "#1b9e77"),
                    Series("Entitled", [gpu_hours(row.entitled) for row in rows], "#8da0cb", "/"),
                ],
                y_title="GPU-hours",
                unit="GPU-hours",
            )
        ],
        tables=[
            Table(
                "Delivered, entitled, borrowed, lent: GPU-hours",
                ["Team", "Delivered", "Entitled", "Delivered / entitled", "Borrowed", "Lent or unused"],
                [
                    [
                        names.team(row.team), gpu_hours(row.delivered), gpu_hours(row.entitled), percent(row.ratio),
                        gpu_hours(row.borrowed), gpu_hours(row.lent),
                    ]
                    for row in rows
                ],
            )
        ],
        definition=definition(
            scope,
            "Delivered = allocated GPU-hours; entitled = guarantee × time, from the history of the quotas. Borrowed and lent"
            " hour by hour: what was above and below the guarantee. Jain = (Σ r)² / (n Σ r²) over r = delivered / entitled.",
            notes=("A team that asked for less than its guarantee lowers the index without having been treated unfairly.",),
        ),
        value=index,
    )  # fmt: skip


def capacity(scope: Scope) -> Page:
    rows = shortage(scope)
    names = Names()
    demand, stranded = sum(row.demand for row in rows), sum(row.stranded for row in rows)
    verdict = "Neither" if demand <= 0 else "Hardware" if stranded < demand / 2 else "Scheduling"
    return Page(
        question="Is it hardware or scheduling that is short?",
        answer=verdict,
        sentence="Nothing waited that could have started."
        if demand <= 0
        else f"{percent(1 - stranded / demand)} of what waited found no free GPU at all.",
        numbers=[
            Number("Waited", f"{demand:,.0f} GPU-hours", demand),
            Number("While GPUs were free", f"{stranded:,.0f} GPU-hours", stranded, "fragmentation, topology, quota"),
            Number("For want of hardware", f"{demand - stranded:,.0f} GPU-hours", demand - stranded),
        ],
        figures=[
            Figure(
                "stacked",
                "What waited, by what was missing",
                "; ".join(f"{names.pool(r.pool)}: {r.demand:,.0f} GPU-hours waited" for r in rows) or "nothing recorded",
                [names.pool(row.pool) for row in rows],
                [
                    Series("No free GPU", [row.hardware for row in rows], "#d1495b"),
                    Series("GPUs free, but none that fitted", [row.stranded for row in rows], *STATE_STYLE["stranded"]),
                ],
                y_title="GPU-hours of waiting",
                unit="GPU-hours",
            )
        ],
        tables=[
            Table(
                "By pool",
                ["Pool", "Short of", "Waited, GPU-hours", "Free but fitting nothing", "Reserved", "Free and wanted by nobody",
                 "Hours with somebody waiting", "Hours recorded"],
                [
                    [names.pool(r.pool), r.verdict, r.demand, r.stranded, r.reserved, r.free, r.waiting_hours, r.recorded_hours]
                    for r in rows
                ],
            )
        ],
        definition=definition(
            scope,
            "From the state that each cycle records: demand = GPUs asked for by jobs that could start (not held, no"
            " dependency, not-before or back-off); stranded = free GPUs that none of them fits, at most the demand."
            " A job that accepts several pools counts in each.",
        ),
        value=1 - stranded / demand if demand else None,
    )  # fmt: skip
