"""Charts as data: one description, drawn by Plotly in the browser and as SVG on paper.

Plotly knows no time zones: instants are shifted to the viewer's clock here, as text without offset, and the offset is
printed on the axis. Colours never stand alone: every series has its own pattern too, and every chart a text and a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from zoneinfo import ZoneInfo

from scheduling.reports.intervals import Interval, offset_label

#: (colour, pattern) of each state of 7.1; the colours keep apart in both schemes and for the colour-blind.
STATE_STYLE: dict[str, tuple[str, str]] = {
    "productive": ("#1b9e77", ""),
    "unknown": ("#8da0cb", "."),
    "no_activity": ("#e6a117", "/"),
    "startup": ("#b59a6d", "|"),
    "lost": ("#d1495b", "x"),
    "lost_failed": ("#d1495b", "x"),
    "lost_preempted": ("#c77dba", "+"),
    "reserved": ("#5b8fd6", "-"),
    "stranded": ("#b07cd8", "\\"),
    "free": ("#9aa5b1", ""),
    "idle": ("#9aa5b1", ""),
    "maintenance": ("#6c757d", "/"),
    "down": ("#4a4e57", "x"),
}
PLAIN = ("#1b9e77", "#5b8fd6", "#e6a117", "#d1495b", "#b07cd8", "#8da0cb")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")

Kind = Literal["stacked", "bars", "steps", "lines", "heatmap", "share"]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    values: Sequence[float | None]
    color: str = PLAIN[0]
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """``x``: categories or local times as text; ``steps`` and ``lines`` may give each series its own ``xs``."""

    kind: Kind
    title: str
    #: Says in words what the chart shows: read by screen readers and printed below it.
    alt: str
    x: Sequence[Any]
    series: Sequence[Series]
    x_title: str = ""
    y_title: str = ""
    xs: Sequence[Sequence[float]] = ()
    #: Heatmap: labels of the rows; values then by row.
    rows: Sequence[str] = ()
    #: Axis of logarithmic time.
    log_x: bool = False
    unit: str = ""
    percent: bool = False
    notes: tuple[str, ...] = field(default=())


def local_times(buckets: Sequence[Interval], zone: ZoneInfo) -> list[str]:
    """Starts on the viewer's clock, without offset: Plotly shows them as they are."""
    return [bucket.start.astimezone(zone).strftime("%Y-%m-%d %H:%M") for bucket in buckets]


def zone_note(since: datetime, until: datetime, zone: ZoneInfo) -> str:
    """``Europe/Berlin (UTC+01:00, then UTC+02:00)``."""
    first, last = offset_label(since, zone), offset_label(until, zone)
    return f"{zone.key} ({first})" if first == last else f"{zone.key} ({first}, then {last})"


def plotly(figure: Figure) -> dict[str, Any]:
    """``{"data": …, "layout": …}`` without colours of text and ground: the page sets them by the scheme."""
    layout: dict[str, Any] = {
        "margin": {"l": 64, "r": 16, "t": 16, "b": 56},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": -0.3, "traceorder": "normal"},
        "xaxis": {"title": {"text": figure.x_title}, "automargin": True},
        "yaxis": {
            "title": {"text": figure.y_title},
            "rangemode": "tozero",
            "automargin": True,
            **({"tickformat": ".0%", "range": [0, 1]} if figure.percent else {}),
        },
        "hovermode": "closest",
    }
    if figure.log_x:
        layout["xaxis"]["type"] = "log"
    elif figure.xs == () and figure.kind in ("stacked", "bars") and figure.x and str(figure.x[0])[:2] != "20":
        layout["xaxis"]["type"] = "category"
    return {"data": _traces(figure, layout), "layout": layout}


def _traces(figure: Figure, layout: dict[str, Any]) -> list[dict[str, Any]]:
    if figure.kind == "heatmap":
        layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
        layout["xaxis"] |= {"type": "category", "dtick": 3}
        top = max((value for series in figure.series for value in series.values if value is not None), default=1.0)
        return [
            {
                "type": "heatmap",
                "x": list(figure.x),
                "y": list(figure.rows),
                "z": [list(series.values) for series in figure.series],
                "colorscale": [[0, "#f2f4f7"], [0.5, "#e6a117"], [1, "#a3263c"]],
                "zmin": 0,
                # The scale ends at the next tenth, so that a quiet week shows its shape too.
                "zmax": min(1.0, math.ceil(top * 10 + 1e-9) / 10) or 1.0,
                "xgap": 1,
                "ygap": 1,
                "colorbar": {"tickformat": ".0%", "thickness": 12},
                "hovertemplate": "%{y} %{x}: %{z:.1%}<extra></extra>",
            }
        ]
    if figure.kind in ("steps", "lines"):
        return [
            {
                "type": "scatter",
                "mode": "lines",
                "name": series.name,
                "x": list(figure.xs[place] if figure.xs else figure.x),
                "y": list(series.values),
                "line": {
                    "color": series.color,
                    "dash": DASHES[place % len(DASHES)],
                    "width": 2,
                    **({"shape": "hv"} if figure.kind == "steps" else {}),
                },
            }
            for place, series in enumerate(figure.series)
        ]
    across = figure.kind == "share"
    if figure.kind in ("stacked", "share"):
        layout["barmode"] = "stack"
    if across:
        layout |= {"xaxis": {"ticksuffix": " %", "range": [0, 100]}, "yaxis": {"visible": False}}
        layout["legend"]["y"] = -0.4
    return [
        {
            "type": "bar",
            "name": series.name,
            "x": list(series.values) if across else list(figure.x),
            "y": [""] if across else list(series.values),
            **({"orientation": "h"} if across else {}),
            "marker": {
                "color": series.color,
                "pattern": {
                    "shape": series.pattern,
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.6)",
                    "size": 7,
                    "solidity": 0.2,
                },
            },
            "hovertemplate": "%{x:.1f} %" if across else f"%{{x}}: %{{y:,.1f}} {figure.unit}",
        }
        for series in figure.series
    ]
