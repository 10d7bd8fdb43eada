"""The chart of one attempt: activity and power over time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, tzinfo
from typing import Any


def activity_figure(samples: Sequence[tuple[datetime, float | None, float | None]], zone: tzinfo) -> dict[str, Any]:
    """A Plotly figure. Plotly knows no time zones: instants are shifted here, and the offset is printed."""
    local = [at.astimezone(zone) for at, _, _ in samples]
    shown = [at.replace(tzinfo=None).isoformat(timespec="seconds") for at in local]
    offset = f"UTC{local[-1]:%z}" if local else "UTC"
    busy = [None if value is None else round(100 * value, 1) for _, value, _ in samples]
    watts = [None if value is None else round(value) for _, _, value in samples]
    return {
        "data": [
            {"type": "scatter", "mode": "lines+markers", "name": "Activity, %", "x": shown, "y": busy,
             "line": {"color": "#0b7a75"}, "connectgaps": False},
            {"type": "scatter", "mode": "lines", "name": "Power, W", "x": shown, "y": watts, "yaxis": "y2",
             "line": {"color": "#c98a1b", "dash": "dot"}, "connectgaps": False},
        ],
        "layout": {
            "height": 320, "margin": {"l": 50, "r": 50, "t": 20, "b": 50}, "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)", "font": {"color": "#808890"}, "legend": {"orientation": "h"},
            "xaxis": {"title": {"text": f"time ({offset})"}},
            "yaxis": {"title": {"text": "mean activity, %"}, "range": [0, 100]},
            "yaxis2": {"title": {"text": "W, all devices"}, "overlaying": "y", "side": "right", "rangemode": "tozero",
                       "showgrid": False},
        },
    }  # fmt: skip
