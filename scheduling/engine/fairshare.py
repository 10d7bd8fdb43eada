"""Fair share of one pool over the team tree (4.1).

Amounts are millionths of a GPU; shares are real numbers. Comparisons elsewhere go through ``at_most``, which forgives
the last bits of float arithmetic and nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Relative error that float sums of a few hundred shares can gather, with room to spare.
TOLERANCE = 1e-9


def at_most(amount: float, share: float) -> bool:
    """Exact comparison of an amount with a real share (no rounding to whole GPUs)."""
    return amount <= share + TOLERANCE * max(1.0, abs(share))


def decayed_capacity(total: float, half_life: float) -> float:
    """GPU-hours that a pool of ``total`` GPUs, always full, would show after decay: capacity × half-life / ln 2.

    ``half_life`` in seconds, ``total`` in any unit of GPUs; the result is in that unit × hours.
    """
    return total * (half_life / 3600.0) / math.log(2)


@dataclass(slots=True)
class Claims:
    """One pool's claims by team position. ``children[i]`` lists the teams below i; ``roots`` those on top.

    ``want`` of leaves = min(limit, allocated + pending demand); of inner teams it is worked out here.
    """

    roots: Sequence[int]
    children: Sequence[Sequence[int]]
    guaranteed: Sequence[int]
    limit: Sequence[int | None]
    weight: Sequence[float]
    want: list[int]
    usage: Sequence[float]


def fair_shares(claims: Claims, total: int, history_weight: float) -> list[float]:
    """Share of each team, in the order of the claims; a parent's is its children's total.

    ``claims.want`` of inner teams is filled in.
    """
    shares = [0.0] * len(claims.want)
    for root in claims.roots:
        _sum_wants(claims, root)
    _divide(claims, claims.roots, float(total), history_weight, shares)
    return shares


def _sum_wants(claims: Claims, team: int) -> int:
    below = claims.children[team]
    if below:
        want = sum(_sum_wants(claims, child) for child in below)
        limit = claims.limit[team]
        claims.want[team] = want if limit is None else min(limit, want)
    return claims.want[team]


def _divide(claims: Claims, siblings: Sequence[int], total: float, k: float, shares: list[float]) -> float:
    """Divide ``total`` among siblings and below them; returns what was given out."""
    wanting = [team for team in siblings if claims.want[team] > 0]
    if not wanting:
        return 0.0
    given = {team: float(min(claims.guaranteed[team], claims.want[team])) for team in wanting}
    promised = sum(given.values())
    if promised > total:
        factor = total / promised
        given = {team: amount * factor for team, amount in given.items()}
    else:
        _fill(claims, wanting, given, total - promised, k)
    handed_out = 0.0
    for team, amount in given.items():
        below = claims.children[team]
        shares[team] = _divide(claims, below, amount, k, shares) if below else amount
        handed_out += shares[team]
    return handed_out


def _fill(claims: Claims, wanting: Sequence[int], given: dict[int, float], rest: float, k: float) -> None:
    """Rule 3: like water, in proportion to weight and to how little was used lately; nobody above its want."""
    want, usage = claims.want, claims.usage
    open_to_more = [team for team in wanting if given[team] < want[team]]
    while open_to_more and rest > 0:
        weights = sum(claims.weight[team] for team in open_to_more)
        if weights <= 0:
            return
        normal = {team: claims.weight[team] / weights for team in open_to_more}
        claim = {team: max(0.0, w + k * (w - usage[team])) for team, w in normal.items()}
        whole = sum(claim.values())
        if whole <= 0:
            claim, whole = normal, 1.0
        level = rest / whole
        rest = 0.0
        still_open = []
        for team in open_to_more:
            more = claim[team] * level
            missing = want[team] - given[team]
            if more >= missing:
                given[team] = float(want[team])
                rest += more - missing
            else:
                given[team] += more
                still_open.append(team)
        if len(still_open) == len(open_to_more):
            return
        open_to_more = still_open
