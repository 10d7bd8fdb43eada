"""Where a gang goes (4.4): the whole gang or nothing.

The smallest domain that fits, inside it the fewest nodes, and among equals the node whose remaining free devices
lose least value for what is waiting. The value lost is the fragmentation gradient of Weng et al., "Beware of
Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC 2023: the devices
left on a node that a random waiting request could not use there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduling.engine.pool import PoolState, lowest, lowest_bits, positions
from scheduling.engine.snapshot import GPU, Placement, Request, Slot

#: Changed nodes from which on a view counts its domains anew.
RECOUNT = 1000

#: Name of the level below all levels of a cluster.
NODE_LEVEL = "node"


class Gradient:
    """Expected number of free devices on a node that a waiting request cannot use, by free devices."""

    __slots__ = ("_left",)

    def __init__(self, largest: int, demand: Mapping[int, float]) -> None:
        """``demand``: how many waiting workers ask for so many whole devices each (a share counts as 1)."""
        total = sum(demand.values())
        self._left = [0.0] * (largest + 1)
        if total:
            for free in range(largest + 1):
                self._left[free] = free * sum(n for size, n in demand.items() if size > free) / total

    def rise(self, free: int, taken: int) -> float:
        """Growth of fragmentation when ``taken`` of ``free`` devices of a node go away."""
        return self._left[free - taken] - self._left[free]


@dataclass(slots=True)
class View:
    """The devices one candidate may use: a pool less what is promised to others while it would run."""

    pool: PoolState
    #: Nodes by number of free devices, promises taken off.
    buckets: list[int]
    #: Nodes that may be used at all.
    allowed: int
    #: Devices taken off, by node position.
    removed: Mapping[int, int] = field(default_factory=dict)
    #: Devices that will have been freed by then (views of a later instant), by node position.
    added: Mapping[int, int] = field(default_factory=dict)

    def mask(self, position: int) -> int:
        """Free devices of one node."""
        mask = self.pool.free[position]
        if self.added:
            mask |= self.added.get(position, 0)
        if self.removed:
            mask &= ~self.removed.get(position, 0)
        return mask

    def free_devices(self) -> int:
        """Whole free devices in all."""
        allowed = self.allowed
        return sum(k * (nodes & allowed).bit_count() for k, nodes in enumerate(self.buckets) if k and nodes)

    def domain_counts(self, level: int, allowed: int) -> npt.NDArray[np.int32] | None:
        """Nodes of ``allowed`` by domain and number of free devices; ``None`` when counting them anew costs less."""
        moved = [
            (free, here & allowed, there)
            for free, (here, there) in enumerate(zip(self.buckets, self.pool.buckets, strict=True))
        ]
        changes = sum((here ^ there).bit_count() for _, here, there in moved)
        if changes > RECOUNT:
            return None
        counts = self.pool.domain_counts(level)
        if not changes:
            return counts
        counts = counts.copy()
        of = self.pool.domain_of[level]
        for free, here, there in moved:
            for position in positions(here & ~there):
                if of[position] >= 0:
                    counts[of[position], free] += 1
            for position in positions(there & ~here):
                if of[position] >= 0:
                    counts[of[position], free] -= 1
        return counts

    def largest_block(self) -> int:
        """Most whole free devices on one node."""
        for k in range(len(self.buckets) - 1, 0, -1):
            if self.buckets[k] & self.allowed:
                return k
        return 0


def whole_view(pool: PoolState) -> View:
    return View(pool, pool.buckets, pool.usable)


def reduced_view(pool: PoolState, removed: Mapping[int, int], closed: int, *, base: View | None = None) -> View:
    """``base`` (default: all free devices now) without some devices and without the nodes in ``closed``."""
    base = base or whole_view(pool)
    buckets = base.buckets
    view = View(pool, buckets, base.allowed & ~closed, dict(removed), base.added)
    changed = False
    for position in removed:
        bit = 1 << position
        if not base.allowed & bit:
            continue
        old, new = base.mask(position).bit_count(), view.mask(position).bit_count()
        if old != new:
            if not changed:
                buckets = view.buckets = buckets.copy()
                changed = True
            buckets[old] &= ~bit
            buckets[new] |= bit
    return view


class Reduction:
    """The view of a pool less fixed devices and nodes, kept up to date while the pool changes."""

    __slots__ = ("_closed", "_moved", "_pool", "_removed", "_seen", "_touched", "_view")

    def __init__(self, pool: PoolState, removed: dict[int, int], closed: int) -> None:
        self._pool, self._removed, self._closed = pool, removed, closed
        self._touched = sum(1 << position for position in removed)
        #: By number of devices left: those of the touched nodes that have so many.
        self._moved = [0] * len(pool.buckets)
        for position, devices in removed.items():
            self._moved[(pool.free[position] & ~devices).bit_count()] |= 1 << position
        self._seen = len(pool.changed)
        self._view: View | None = None

    def view(self) -> View:
        pool = self._pool
        if self._view is not None and self._seen == len(pool.changed):
            return self._view
        for position in pool.changed[self._seen :]:
            devices = self._removed.get(position)
            if devices is not None:
                bit = 1 << position
                self._moved = [nodes & ~bit for nodes in self._moved]
                self._moved[(pool.free[position] & ~devices).bit_count()] |= bit
        self._seen = len(pool.changed)
        keep, usable = ~self._touched, pool.usable
        buckets = [here & keep | moved & usable for here, moved in zip(pool.buckets, self._moved, strict=True)]
        self._view = View(pool, buckets, usable & ~self._closed, self._removed)
        return self._view


def workers_that_fit(view: View, gpus: int, nodes: int) -> int:
    """Workers of ``gpus`` devices that fit on a set of nodes."""
    fit = 0
    for free in range(gpus, len(view.buckets)):
        at = view.buckets[free] & nodes
        if at:
            fit += free // gpus * at.bit_count()
    return fit


def levels_to_try(pool: PoolState, request: Request) -> Iterator[int | None]:
    """Levels by number, narrowest first, at last the whole pool (``None``)."""
    top = 0
    if request.required and request.level is not None:
        if request.level not in pool.levels:  # "node": handled by the one-node case alone
            return
        top = pool.levels.index(request.level)
    yield from range(len(pool.levels) - 1, top - 1, -1)
    if not request.required or request.level is None:
        yield None


def scopes(pool: PoolState, request: Request) -> Iterator[Iterable[int]]:
    """Sets of nodes to try, narrowest level first: each step the domains of one level, at last the whole pool."""
    for level in levels_to_try(pool, request):
        yield (pool.every,) if level is None else pool.domains[level].values()


def place(
    view: View, request: Request, workers: int, gradient: Gradient, *, avoid: int = 0, within: int | None = None
) -> Placement | None:
    """A placement of ``workers`` workers, or ``None``. ``avoid`` (nodes that failed it) come last;
    ``within`` limits it to a set of nodes."""
    allowed = view.allowed if within is None else view.allowed & within
    if avoid & allowed and allowed & ~avoid:
        found = _place(view, request, workers, gradient, allowed & ~avoid)
        if found is not None:
            return found
    return _place(view, request, workers, gradient, allowed)


def _place(view: View, request: Request, workers: int, gradient: Gradient, allowed: int) -> Placement | None:
    if not request.gpus:
        return _place_share(view, request, gradient, allowed)
    one = _best_node(view, request.gpus * workers, gradient, allowed)
    if one is not None:
        return _slots(view, request.gpus, [(one, workers)])
    if workers == 1:
        return None
    for level in levels_to_try(view.pool, request):
        nodes = _smallest_domain(view, request.gpus, workers, level, allowed)
        if nodes is not None:
            return _slots(view, request.gpus, _fewest_nodes(view, request.gpus, workers, gradient, nodes))
    return None


def _smallest_domain(view: View, gpus: int, workers: int, level: int | None, allowed: int) -> int | None:
    """The usable nodes of the domain that fits with the fewest free devices; ties: the smallest id."""
    if level is None:
        return allowed if allowed and workers_that_fit(view, gpus, allowed) >= workers else None
    domains = tuple(view.pool.domains[level].values())
    counts = view.domain_counts(level, allowed)
    if counts is None:
        of_buckets = [nodes & allowed for nodes in view.buckets]
        counts = np.array([[(nodes & domain).bit_count() for nodes in of_buckets] for domain in domains], np.int32)
    if not len(counts):
        return None
    devices = np.arange(counts.shape[1], dtype=np.int32)
    fits = np.flatnonzero(counts @ (devices // gpus) >= workers)
    if not len(fits):
        return None
    free = counts[fits] @ devices
    smallest = fits[free == free.min()]
    return min([domains[int(number)] & allowed for number in smallest], key=lowest)


def _best_node(view: View, devices: int, gradient: Gradient, nodes: int) -> int | None:
    """The node that loses least by giving ``devices`` devices; ties: fewest free devices, smallest id."""
    best: tuple[float, int] | None = None
    for free in range(devices, len(view.buckets)):
        if view.buckets[free] & nodes:
            key = (gradient.rise(free, devices), free)
            if best is None or key < best:
                best = key
    return None if best is None else lowest(view.buckets[best[1]] & nodes)


def _fewest_nodes(view: View, gpus: int, workers: int, gradient: Gradient, nodes: int) -> list[tuple[int, int]]:
    """[(node position, workers there)]: the largest blocks first, the rest on the node it suits best."""
    chosen: list[tuple[int, int]] = []
    while workers:
        last = _best_node(view, gpus * workers, gradient, nodes)
        if last is not None:
            chosen.append((last, workers))
            return chosen
        most = max(free // gpus for free in range(len(view.buckets)) if view.buckets[free] & nodes)
        sizes = [free for free in range(most * gpus, len(view.buckets)) if view.buckets[free] & nodes]
        free = min(sizes, key=lambda size: (gradient.rise(size, most * gpus), size))
        position = lowest(view.buckets[free] & nodes)
        chosen.append((position, most))
        nodes &= ~(1 << position)
        workers -= most
    return chosen


def _slots(view: View, gpus: int, chosen: Iterable[tuple[int, int]]) -> Placement:
    slots: list[Slot] = []
    for position, workers in chosen:
        mask = view.mask(position)
        node = view.pool.nodes[position].id
        for _ in range(workers):
            devices = lowest_bits(mask, gpus)
            mask ^= devices
            slots.append(Slot(node, devices))
    return tuple(sorted(slots, key=lambda slot: (slot.node, slot.devices)))


def _place_share(view: View, request: Request, gradient: Gradient, allowed: int) -> Placement | None:
    """The fullest shared device it fits on, else a device of the shareable node that loses least."""
    pool = view.pool
    share = pool.amount(request)
    if share is None:
        return None
    allowed &= pool.shareable
    if share < GPU:
        partial = pool.partial
        for at in range(bisect_left(partial, (share, -1, -1)), len(partial)):
            _, position, device = partial[at]
            blocked = view.removed.get(position, 0) | pool.occupied[position] | pool.held[position]
            if allowed >> position & 1 and not blocked >> device & 1 and pool.whole[position] >> device & 1:
                return (Slot(pool.nodes[position].id, 1 << device, share),)
    fresh = _best_node(view, 1, gradient, allowed)
    if fresh is None:
        return None
    return (Slot(pool.nodes[fresh].id, lowest_bits(view.mask(fresh), 1), share),)
