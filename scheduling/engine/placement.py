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

from scheduling.engine.pool import PoolState, lowest, lowest_bits
from scheduling.engine.snapshot import GPU, Placement, Request, Slot

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


def workers_that_fit(view: View, gpus: int, nodes: int) -> int:
    """Workers of ``gpus`` devices that fit on a set of nodes."""
    fit = 0
    for free in range(gpus, len(view.buckets)):
        at = view.buckets[free] & nodes
        if at:
            fit += free // gpus * at.bit_count()
    return fit


def scopes(pool: PoolState, request: Request) -> Iterator[Iterable[int]]:
    """Sets of nodes to try, narrowest level first: each step the domains of one level, at last the whole pool."""
    top = 0
    if request.required and request.level is not None:
        if request.level not in pool.levels:  # "node": handled by the one-node case alone
            return
        top = pool.levels.index(request.level)
    for level in range(len(pool.levels) - 1, top - 1, -1):
        yield pool.domains[level].values()
    if not request.required or request.level is None:
        yield ((1 << len(pool.nodes)) - 1,)


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
    for domains in scopes(view.pool, request):
        best: tuple[int, int, int] | None = None
        for domain in domains:
            nodes = domain & allowed
            if nodes and workers_that_fit(view, request.gpus, nodes) >= workers:
                free = sum(k * (view.buckets[k] & nodes).bit_count() for k in range(1, len(view.buckets)))
                key = (free, lowest(nodes), nodes)
                if best is None or key < best:
                    best = key
        if best is not None:
            return _slots(view, request.gpus, _fewest_nodes(view, request.gpus, workers, gradient, best[2]))
    return None


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
