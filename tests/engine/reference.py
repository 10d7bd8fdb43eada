"""An independent, slow and exact reference of the fair share (4.1), in fractions."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class Node:
    """A team: claims as numbers, children below. ``want`` is given for leaves only."""

    guaranteed: Fraction
    limit: Fraction | None
    weight: Fraction
    usage: Fraction
    want: Fraction = Fraction(0)
    children: list[Node] = field(default_factory=list)
    share: Fraction = Fraction(0)

    def wants(self) -> Fraction:
        if self.children:
            total = sum((child.wants() for child in self.children), Fraction(0))
            self.want = total if self.limit is None else min(self.limit, total)
        return self.want


def share_out(siblings: list[Node], total: Fraction, k: Fraction) -> None:
    for node in siblings:
        node.wants()
    _give(siblings, total, k)


def _give(siblings: list[Node], total: Fraction, k: Fraction) -> None:
    first = {id(node): min(node.guaranteed, node.want) for node in siblings}
    promised = sum(first.values(), Fraction(0))
    if promised > total:
        first = {key: amount * total / promised for key, amount in first.items()}
        rest = Fraction(0)
    else:
        rest = total - promised
    while rest > 0:
        hungry = [node for node in siblings if first[id(node)] < node.want]
        weights = sum((node.weight for node in hungry), Fraction(0))
        if not hungry or weights == 0:
            break
        normal = {id(node): node.weight / weights for node in hungry}
        claim = {id(n): max(Fraction(0), normal[id(n)] + k * (normal[id(n)] - n.usage)) for n in hungry}
        if sum(claim.values()) == 0:
            claim = normal
        whole = sum(claim.values(), Fraction(0))
        left = Fraction(0)
        for node in hungry:
            offered = rest * claim[id(node)] / whole
            taken = min(offered, node.want - first[id(node)])
            first[id(node)] += taken
            left += offered - taken
        rest = left
    for node in siblings:
        if node.children:
            _give(node.children, first[id(node)], k)
            node.share = sum((child.share for child in node.children), Fraction(0))
        else:
            node.share = first[id(node)]
