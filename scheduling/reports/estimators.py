"""Statistics of design.md 7.2: percentiles that say how sure they are, Kaplan-Meier, Jain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: From this n on a percentile is printed with its 95 % interval; below, the points are shown.
ENOUGH = {0.5: 6, 0.9: 29, 0.95: 59, 0.99: 299}
#: Fewer samples than this are marked in every table.
FEW = 20


@dataclass(frozen=True, slots=True)
class Percentile:
    """``value`` ``None`` = not reached (too many are still waiting). The interval only from ``ENOUGH`` on."""

    share: float
    n: int
    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def enough(self) -> bool:
        return self.n >= ENOUGH[self.share]


@dataclass(frozen=True, slots=True)
class Curve:
    """Kaplan-Meier: share still waiting after each time at which something started."""

    times: NDArray[np.float64]
    waiting: NDArray[np.float64]
    n: int
    events: int
    censored: int
    #: Greenwood's sum at each time, for the intervals.
    spread: NDArray[np.float64]

    def percentile(self, share: float) -> Percentile:
        """Smallest time by which at least ``share`` have started; its 95 % interval is Brookmeyer and Crowley's,
        on the log-log scale (Klein and Moeschberger, Survival Analysis, 4.5)."""
        value = _reached(self.times, self.waiting, 1 - share)
        if self.n < ENOUGH[share]:
            return Percentile(share, self.n, value)
        low, high = self._interval(1 - share)
        return Percentile(share, self.n, value, low, high)

    def _interval(self, level: float) -> tuple[float | None, float | None]:
        inner = (self.waiting > 0) & (self.waiting < 1) & (self.spread > 0)
        if not inner.any():
            return None, None
        survival, times = self.waiting[inner], self.times[inner]
        log_survival = np.log(survival)
        z = (np.log(-log_survival) - math.log(-math.log(level))) * log_survival / np.sqrt(self.spread[inner])
        inside = np.abs(z) <= 1.959964
        if not inside.any():
            return None, None
        last = times[inside][-1]
        later = self.times[self.times > last]
        return float(times[inside][0]), float(later[0]) if later.size else None


def _reached(times: NDArray[np.float64], waiting: NDArray[np.float64], level: float) -> float | None:
    # A hair of tolerance: (n - k) / n and 1 - share are different floats of the same number.
    below = np.nonzero(waiting <= level + 1e-12)[0]
    return float(times[below[0]]) if below.size else None


def kaplan_meier(
    started: Sequence[float] | NDArray[np.float64], waiting: Sequence[float] | NDArray[np.float64]
) -> Curve:
    """Product-limit estimate from the waits of those that started and of those that still wait (censored)."""
    events = np.sort(np.asarray(started, dtype=np.float64))
    censored = np.sort(np.asarray(waiting, dtype=np.float64))
    n = events.size + censored.size
    times, deaths = np.unique(events, return_counts=True)
    # At risk just before t: everybody who neither started nor stopped being watched before t.
    before = np.searchsorted(events, times, side="left") + np.searchsorted(censored, times, side="left")
    risk = n - before
    survival = np.cumprod(1 - deaths / np.maximum(risk, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(risk > deaths, deaths / (risk * np.maximum(risk - deaths, 1)), 0.0)
    return Curve(times, survival, int(n), int(events.size), int(censored.size), np.cumsum(terms))


def percentile(values: Sequence[float] | NDArray[np.float64], share: float) -> Percentile:
    """Of complete samples: the smallest value with at least ``share`` of them at or below it; interval by order
    statistics (binomial, Hahn and Meeker, Statistical Intervals, 5.2)."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = int(ordered.size)
    if n == 0:
        return Percentile(share, 0, None)
    value = float(ordered[max(0, math.ceil(share * n - 1e-9) - 1)])
    if n < ENOUGH[share]:
        return Percentile(share, n, value)
    low, high = _ranks(n, share)
    return Percentile(share, n, value, float(ordered[low - 1]), float(ordered[high - 1]))


def _ranks(n: int, share: float) -> tuple[int, int]:
    """1-based ranks between which the percentile lies with at least 95 % (normal approximation, widened)."""
    middle, spread = n * share, 1.959964 * math.sqrt(n * share * (1 - share))
    return max(1, math.floor(middle - spread)), min(n, math.ceil(middle + spread) + 1)


def jain(ratios: Sequence[float]) -> float | None:
    """Jain's index: 1 = all alike, 1/n = one has everything (Jain, Chiu, Hawe 1984)."""
    if not ratios or not any(ratios):
        return None
    return sum(ratios) ** 2 / (len(ratios) * sum(value * value for value in ratios))
