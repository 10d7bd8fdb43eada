"""The fair share against the reference and the numbers of the design."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.engine.fairshare import Claims, at_most, decayed_capacity, fair_shares
from tests.engine.reference import Node, share_out


def test_the_decayed_capacity_is_that_of_the_design() -> None:
    assert decayed_capacity(8, 168 * 3600) == pytest.approx(1938.99, abs=0.01)


def test_comparisons_forgive_float_noise_and_nothing_more() -> None:
    assert at_most(3, 0.1 * 30)
    assert not at_most(2_666_667, 2_666_666.0)


def test_guarantees_beyond_the_hardware_shrink_by_one_factor() -> None:
    claims = Claims([0, 1], [[], []], [12, 4], [None, None], [1, 1], [12, 4], [0, 0])
    assert fair_shares(claims, 8, 1.0) == pytest.approx([6, 2])


small = st.integers(0, 20)
usage = st.integers(0, 100).map(lambda n: Fraction(n, 100))


@st.composite
def trees(draw: st.DrawFn) -> list[Node]:
    def node(depth: int) -> Node:
        below = [node(depth - 1) for _ in range(draw(st.integers(0, 3)))] if depth else []
        if below:
            guaranteed = sum((c.guaranteed for c in below), Fraction(0)) + draw(small)
        else:
            guaranteed = Fraction(draw(small))
        limit = None if draw(st.booleans()) else guaranteed + draw(small)
        want = Fraction(draw(small))
        return Node(
            guaranteed,
            limit,
            Fraction(draw(st.integers(0, 4))),
            draw(usage),
            want if limit is None else min(want, limit),
            below,
        )

    return [node(2) for _ in range(draw(st.integers(1, 4)))]


@given(trees(), st.integers(0, 200), st.sampled_from([Fraction(0), Fraction(1), Fraction(3)]))
@settings(max_examples=200, deadline=None)
def test_shares_equal_the_slow_reference_and_stay_within_the_capacity(
    roots: list[Node], total: int, k: Fraction
) -> None:
    flat: list[Node] = []
    children: list[list[int]] = []

    def add(node: Node) -> int:
        at = len(flat)
        flat.append(node)
        children.append([])
        children[at] = [add(child) for child in node.children]
        return at

    tops = [add(node) for node in roots]
    claims = Claims(
        tops,
        children,
        [int(n.guaranteed) for n in flat],
        [None if n.limit is None else int(n.limit) for n in flat],
        [float(n.weight) for n in flat],
        [0 if n.children else int(n.want) for n in flat],
        [float(n.usage) for n in flat],
    )
    share_out(roots, Fraction(total), k)
    shares = fair_shares(claims, total, float(k))
    assert shares == pytest.approx([float(node.share) for node in flat], rel=1e-6, abs=1e-6)
    assert sum(shares[top] for top in tops) <= total + 1e-6
