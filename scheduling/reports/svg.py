"""The same charts without script: for paper and for browsers without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from scheduling.reports.figures import Figure

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 44


def svg(figure: Figure) -> str:
    """A whole ``<svg>`` element; colours of text suit white paper."""
    draw = {"heatmap": _heatmap, "steps": _lines, "lines": _lines, "share": _share}.get(figure.kind, _bars)
    legend = list(_legend(figure))
    height = HEIGHT + 18 * math.ceil(len(legend) / 3) if legend else HEIGHT
    body = "".join([*draw(figure), *legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img"'
        f' aria-label="{escape(figure.alt)}" font-family="sans-serif" font-size="11" fill="#222">{body}</svg>'
    )


def _legend(figure: Figure) -> Iterator[str]:
    if figure.kind == "heatmap" or len(figure.series) < 2:
        return
    for place, series in enumerate(figure.series):
        x, y = LEFT + place % 3 * 225, HEIGHT + 18 * (place // 3) + 8
        yield f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{series.color}"/>'
        yield f'<text x="{x + 16}" y="{y}">{escape(series.name)}</text>'


def _nice(top: float) -> float:
    """A round number not below ``top``."""
    if top <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(top))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= top * 0.999999)


def _frame(figure: Figure, top: float) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    for part in range(5):
        value, y = top * part / 4, bottom - (bottom - TOP) * part / 4
        label = f"{value:.0%}" if figure.percent else f"{value:,.4g}" if top < 100 else f"{value:,.0f}"
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<text x="12" y="{HEIGHT / 2}" transform="rotate(-90 12 {HEIGHT / 2})" text-anchor="middle">{escape(figure.y_title)}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(figure.x_title)}</text>'


def _bars(figure: Figure) -> Iterator[str]:
    columns = len(figure.x)
    if not columns:
        return
    stacked = figure.kind == "stacked"
    sums = [
        sum(series.values[place] or 0 for series in figure.series)
        if stacked
        else max((series.values[place] or 0 for series in figure.series), default=0)
        for place in range(columns)
    ]
    top, bottom = 1.0 if figure.percent else _nice(max(sums)), HEIGHT - BOTTOM
    yield from _frame(figure, top)
    step = (WIDTH - LEFT - RIGHT) / columns
    wide = step * (0.9 if stacked else 0.8 / max(1, len(figure.series)))
    for place in range(columns):
        base = 0.0
        for number, series in enumerate(figure.series):
            value = series.values[place] or 0
            tall = (bottom - TOP) * value / top
            x = LEFT + place * step + step * 0.05 + (0 if stacked else number * wide)
            y = bottom - base - tall
            if tall > 0:
                yield f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{tall:.2f}" fill="{series.color}"/>'
            base += tall if stacked else 0
    for place in range(0, columns, max(1, math.ceil(columns / 8))):
        x = LEFT + (place + 0.5) * step
        yield f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(str(figure.x[place]))}</text>'


def _lines(figure: Figure) -> Iterator[str]:
    points = [
        [
            (x, y)
            for x, y in zip(figure.xs[place] if figure.xs else figure.x, series.values, strict=True)
            if y is not None
        ]
        for place, series in enumerate(figure.series)
    ]
    flat = [point for line in points for point in line if not figure.log_x or point[0] > 0]
    if not flat:
        yield f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing to draw</text>'
        return
    top, bottom = 1.0 if figure.percent else _nice(max(y for _, y in flat)), HEIGHT - BOTTOM
    yield from _frame(figure, top)
    scale = math.log10 if figure.log_x else float
    low, high = scale(min(x for x, _ in flat)), scale(max(x for x, _ in flat))
    width = (WIDTH - LEFT - RIGHT) / ((high - low) or 1)
    for series, line in zip(figure.series, points, strict=True):
        path, last = [], None
        for x, y in line:
            across = LEFT + (scale(max(x, 10**low) if figure.log_x else x) - low) * width
            up = bottom - (bottom - TOP) * y / top
            if last is not None and figure.kind == "steps":
                path.append(f"{across:.1f},{last:.1f}")
            path.append(f"{across:.1f},{up:.1f}")
            last = up
        yield f'<polyline points="{" ".join(path)}" fill="none" stroke="{series.color}" stroke-width="2"/>'
    for part in range(5):
        value = low + (high - low) * part / 4
        shown = 10**value if figure.log_x else value
        yield f'<text x="{LEFT + (value - low) * width:.1f}" y="{bottom + 15}" text-anchor="middle">{shown:,.4g}</text>'


def _heatmap(figure: Figure) -> Iterator[str]:
    step, tall = (WIDTH - LEFT - RIGHT) / max(1, len(figure.x)), (HEIGHT - BOTTOM - TOP) / max(1, len(figure.rows))
    for row, (label, series) in enumerate(zip(figure.rows, figure.series, strict=True)):
        y = TOP + row * tall
        yield f'<text x="{LEFT - 6}" y="{y + tall / 2 + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        for column, value in enumerate(series.values):
            if value is None:
                continue
            x = LEFT + column * step
            yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 1:.1f}" height="{tall - 1:.1f}" fill="{_heat(value)}"/>'
            ink = "#fff" if value > 0.65 else "#222"
            yield (
                f'<text x="{x + step / 2:.1f}" y="{y + tall / 2 + 3:.1f}" text-anchor="middle" font-size="8"'
                f' fill="{ink}">{value * 100:.0f}</text>'
            )
    for column in range(0, len(figure.x), 3):
        yield f'<text x="{LEFT + (column + 0.5) * step:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{figure.x[column]}</text>'


def _heat(value: float) -> str:
    stops = ((0.0, (242, 244, 247)), (0.5, (230, 161, 23)), (1.0, (163, 38, 60)))
    value = min(1.0, max(0.0, value))
    (a, low), (b, high) = (stops[0], stops[1]) if value <= 0.5 else (stops[1], stops[2])
    part = (value - a) / (b - a)
    return "#" + "".join(f"{round(x + (y - x) * part):02x}" for x, y in zip(low, high, strict=True))


def _share(figure: Figure) -> Iterator[str]:
    x, wide = float(LEFT), WIDTH - LEFT - RIGHT
    for series in figure.series:
        value = series.values[0] or 0
        length = wide * value / 100
        yield f'<rect x="{x:.1f}" y="90" width="{length:.1f}" height="90" fill="{series.color}"/>'
        if value >= 4:
            yield f'<text x="{x + length / 2:.1f}" y="140" text-anchor="middle" fill="#fff">{value:g} %</text>'
        x += length
