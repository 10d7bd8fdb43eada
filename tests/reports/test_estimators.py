"""Percentiles, Kaplan-Meier and Jain with the worked numbers of design.md 7.3."""

from __future__ import annotations

import numpy as np
import pytest

from scheduling.reports.estimators import jain, kaplan_meier, percentile

STARTED = [0.1, 0.2, 0.5, 1, 2, 10]
STILL = [3, 6, 12, 30]


def test_jobs_that_still_wait_move_the_median_from_45_minutes_to_2_hours() -> None:
    curve = kaplan_meier(STARTED, STILL)
    assert curve.percentile(0.5).value == 2
    assert float(np.median(STARTED)) == 0.75


def test_a_percentile_that_too_few_have_reached_is_not_reached() -> None:
    assert kaplan_meier(STARTED, STILL).percentile(0.9).value is None


def test_the_curve_falls_by_hand() -> None:
    curve = kaplan_meier([1, 2], [1.5])
    assert curve.waiting.tolist() == pytest.approx([2 / 3, 0.0])


def test_without_censoring_it_is_the_plain_percentile() -> None:
    values = list(range(1, 101))
    assert kaplan_meier(values, []).percentile(0.9).value == percentile(values, 0.9).value == 90


def test_no_interval_is_printed_below_the_number_of_samples_it_needs() -> None:
    five, six = percentile([1, 2, 3, 4, 5], 0.5), percentile([1, 2, 3, 4, 5, 6], 0.5)
    assert (five.enough, five.low) == (False, None)
    assert six.enough and six.low is not None and six.low <= 3 <= (six.high or 0)
    assert not percentile(range(58), 0.95).enough and percentile(range(59), 0.95).enough
    assert not percentile(range(28), 0.9).enough and percentile(range(29), 0.9).enough


def test_the_interval_of_the_median_covers_it_in_about_95_of_100_samples() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        sample = rng.exponential(1.0, 60)
        limit = np.full(60, 2.0)  # watched for two units of time only
        seen = kaplan_meier(sample[sample <= limit], limit[sample > limit]).percentile(0.5)
        hits += seen.low is not None and seen.low <= np.log(2) and (seen.high is None or np.log(2) <= seen.high)
    assert 0.92 <= hits / 400 <= 0.995


def test_an_empty_sample_has_no_percentile() -> None:
    assert percentile([], 0.5).value is None
    assert kaplan_meier([], []).percentile(0.5).value is None


def test_use_in_proportion_to_the_entitlement_is_perfectly_fair() -> None:
    assert jain([60 / 60, 30 / 30, 10 / 10]) == 1
    assert jain([60, 30, 10]) == pytest.approx(0.7246, abs=5e-5)


def test_nobody_delivered_anything_is_neither_fair_nor_unfair() -> None:
    assert jain([]) is None and jain([0, 0]) is None
