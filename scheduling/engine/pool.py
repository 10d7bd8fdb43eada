"""One pool's devices while a cycle is at work: which are free, held or partly shared.

Sets of nodes are Python integers used as bit sets (bit i = node at position i, in the order of node ids): they are
immutable, so a copy costs nothing, intersections run at memory speed, and the lowest bit is the smallest id.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from scheduling.engine.snapshot import GPU, Node, NodeState, Placement, Pool, Request


def positions(bits: int) -> Iterator[int]:
    """Positions of the set bits, lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def lowest_bits(mask: int, count: int) -> int:
    """The ``count`` lowest set bits of ``mask``."""
    taken = 0
    for _ in range(count):
        low = mask & -mask
        taken |= low
        mask ^= low
    return taken


def share_amount(request: Request, pool: Pool) -> int | None:
    """Millionths of one device that a fractional request takes in ``pool``; ``None`` when it cannot be told."""
    if request.share:
        return request.share
    if not pool.memory or request.share_memory > pool.memory:
        return None
    return -(-request.share_memory * GPU // pool.memory)


class PoolState:
    """Free devices of one pool. Mutated in place; ``copy`` is cheap enough for one cycle."""

    __slots__ = (
        "_counted",
        "_counts",
        "_synced",
        "buckets",
        "changed",
        "domain_of",
        "domains",
        "down",
        "every",
        "free",
        "held",
        "held_shares",
        "index",
        "largest",
        "levels",
        "nodes",
        "occupied",
        "partial",
        "pool",
        "reachable",
        "shareable",
        "shares",
        "usable",
        "whole",
    )

    def __init__(self, pool: Pool, nodes: Iterable[Node], levels: tuple[str, ...], *, reachable: bool) -> None:
        self.pool = pool
        self.levels = levels
        self.reachable = reachable
        self.nodes = sorted(nodes, key=lambda node: node.id)
        self.index = {node.id: position for position, node in enumerate(self.nodes)}
        self.whole = [((1 << node.gpus) - 1) & ~node.broken for node in self.nodes]
        self.largest = max((node.gpus for node in self.nodes), default=0)
        self.occupied = [0] * len(self.nodes)
        self.held = [0] * len(self.nodes)
        #: Shares in use and shares held, by (node position, device).
        self.shares: dict[tuple[int, int], int] = {}
        self.held_shares: dict[tuple[int, int], int] = {}
        #: Devices with some share taken and some left: (left, node position, device), fullest first.
        self.partial: list[tuple[int, int, int]] = []
        self.free = list(self.whole)
        self.buckets = [0] * (self.largest + 1)
        #: All nodes.
        self.every = (1 << len(self.nodes)) - 1
        self.usable = 0
        self.down = 0
        self.shareable = 0
        self.domains: list[dict[str, int]] = [{} for _ in levels]
        #: Positions whose free devices have changed, in order: what keeps derived views up to date.
        self.changed: list[int] = []
        for position, node in enumerate(self.nodes):
            bit = 1 << position
            if node.shareable:
                self.shareable |= bit
            if node.state is NodeState.DOWN:
                self.down |= bit
            for level, name in enumerate(node.domains[: len(levels)]):
                if name:
                    self.domains[level][name] = self.domains[level].get(name, 0) | bit
            if reachable and node.state is NodeState.UP:
                self.usable |= bit
                self.buckets[self.free[position].bit_count()] |= bit
        #: By level and node position: which domain (in the order of ``domains``), -1 = none.
        self.domain_of = [self._domain_of(level) for level in range(len(levels))]
        #: Free devices by position as counted in ``_counts``, -1 = not usable then; and how much of ``changed`` is in.
        self._counted = [-1] * len(self.nodes)
        self._counts = [np.zeros((len(names), self.largest + 1), dtype=np.int32) for names in self.domains]
        self._synced = 0
        self.changed.extend(range(len(self.nodes)))

    def _domain_of(self, level: int) -> list[int]:
        of = [-1] * len(self.nodes)
        for number, nodes in enumerate(self.domains[level].values()):
            for position in positions(nodes):
                of[position] = number
        return of

    def domain_counts(self, level: int) -> npt.NDArray[np.int32]:
        """Usable nodes by domain (in the order of ``domains``) and number of free devices; not to be changed."""
        self._sync()
        return self._counts[level]

    def _sync(self) -> None:
        """Bring the counts of domains up to date: cheaper for many changes together than for each alone."""
        if self._synced == len(self.changed):
            return
        for position in set(self.changed[self._synced :]):
            before = self._counted[position]
            now = self.free[position].bit_count() if self.usable >> position & 1 else -1
            if before == now:
                continue
            self._counted[position] = now
            for of, counts in zip(self.domain_of, self._counts, strict=True):
                number = of[position]
                if number >= 0:
                    if before >= 0:
                        counts[number, before] -= 1
                    if now >= 0:
                        counts[number, now] += 1
        self._synced = len(self.changed)

    def settle(self) -> None:
        """Forget which positions have changed: nothing derived from this pool is alive."""
        self._sync()
        self.changed.clear()
        self._synced = 0

    def copy(self) -> PoolState:
        self._sync()
        other = PoolState.__new__(PoolState)
        for name in ("pool", "levels", "reachable", "nodes", "index", "whole", "largest", "usable", "down", "every"):
            setattr(other, name, getattr(self, name))
        other.shareable, other.domains, other.domain_of = self.shareable, self.domains, self.domain_of
        other._counts = [counts.copy() for counts in self._counts]
        other._counted = self._counted.copy()
        other.changed = []
        other._synced = 0
        other.occupied = self.occupied.copy()
        other.held = self.held.copy()
        other.free = self.free.copy()
        other.buckets = self.buckets.copy()
        other.shares = self.shares.copy()
        other.held_shares = self.held_shares.copy()
        other.partial = self.partial.copy()
        return other

    # -- what is asked for -------------------------------------------------------------------------------------

    def amount(self, request: Request, workers: int | None = None) -> int | None:
        """Millionths of a GPU that a request takes here; ``None`` when a share by memory cannot be expressed."""
        if request.gpus:
            return (request.workers if workers is None else workers) * request.gpus * GPU
        return share_amount(request, self.pool)

    def capacity(self, nodes: int) -> int:
        """Whole devices on a set of nodes."""
        return sum(self.whole[i].bit_count() for i in positions(nodes))

    # -- changes -------------------------------------------------------------------------------------------------

    def take(self, placement: Placement) -> None:
        """An attempt holds these devices from now on."""
        for slot in placement:
            position = self.index[slot.node]
            if slot.share == GPU:
                self.occupied[position] |= slot.devices
                self._set_free(position, self.free[position] & ~slot.devices)
            else:
                self._change_share(self.shares, position, slot.devices.bit_length() - 1, slot.share)

    def give_back(self, placement: Placement) -> None:
        """The attempt is gone; devices that an eviction plan holds stay held."""
        for slot in placement:
            position = self.index[slot.node]
            if slot.share == GPU:
                self.occupied[position] &= ~slot.devices
                self._refresh(position, slot.devices)
            else:
                self._change_share(self.shares, position, slot.devices.bit_length() - 1, -slot.share)

    def hold(self, placement: Placement) -> None:
        for slot in placement:
            position = self.index[slot.node]
            if slot.share == GPU:
                self.held[position] |= slot.devices
                self._set_free(position, self.free[position] & ~slot.devices)
            else:
                self._change_share(self.held_shares, position, slot.devices.bit_length() - 1, slot.share)

    def unhold(self, placement: Placement) -> None:
        for slot in placement:
            position = self.index[slot.node]
            if slot.share == GPU:
                self.held[position] &= ~slot.devices
                self._refresh(position, slot.devices)
            else:
                self._change_share(self.held_shares, position, slot.devices.bit_length() - 1, -slot.share)

    def ready(self, placement: Placement) -> bool:
        """Whether held devices have been left by whoever had them, on nodes that may take something."""
        for slot in placement:
            position = self.index[slot.node]
            if not self.usable >> position & 1 or slot.devices & ~self.whole[position]:
                return False
            if slot.share == GPU:
                devices_in_shares = any((position, device) in self.shares for device in positions(slot.devices))
                if self.occupied[position] & slot.devices or devices_in_shares:
                    return False
            else:
                device = slot.devices.bit_length() - 1
                taken = self.shares.get((position, device), 0)
                if self.occupied[position] & slot.devices or taken + slot.share > GPU:
                    return False
        return True

    def set_node(self, node: Node) -> None:
        """A node's state, broken devices or shareability changed; its size and domains do not change in place."""
        position = self.index[node.id]
        bit = 1 << position
        self.nodes[position] = node
        if self.usable & bit:
            self.buckets[self.free[position].bit_count()] &= ~bit
        self.usable = self.usable | bit if self.reachable and node.state is NodeState.UP else self.usable & ~bit
        self.down = self.down | bit if node.state is NodeState.DOWN else self.down & ~bit
        self.whole[position] = ((1 << node.gpus) - 1) & ~node.broken
        self.free[position] = self._free_mask(position)
        self.changed.append(position)
        if self.usable & bit:
            self.buckets[self.free[position].bit_count()] |= bit

    def set_reachable(self, *, reachable: bool) -> None:
        self.reachable = reachable
        self.nodes = list(self.nodes)
        for node in list(self.nodes):
            self.set_node(node)

    # -- book-keeping ----------------------------------------------------------------------------------------------

    def _free_mask(self, position: int) -> int:
        mask = self.whole[position] & ~self.occupied[position] & ~self.held[position]
        if self.shares or self.held_shares:
            for device in positions(mask):
                if (position, device) in self.shares or (position, device) in self.held_shares:
                    mask &= ~(1 << device)
        return mask

    def _refresh(self, position: int, devices: int) -> None:
        mask = self.free[position] & ~devices | (self._free_mask(position) & devices)
        self._set_free(position, mask)

    def _set_free(self, position: int, mask: int) -> None:
        before = self.free[position]
        if mask == before:
            return
        self.free[position] = mask
        self.changed.append(position)
        bit = 1 << position
        if self.usable & bit:
            old, new = before.bit_count(), mask.bit_count()
            if old != new:
                self.buckets[old] ^= bit
                self.buckets[new] |= bit

    def _change_share(self, table: dict[tuple[int, int], int], position: int, device: int, by: int) -> None:
        key = (position, device)
        self._drop_partial(key)
        table[key] = table.get(key, 0) + by
        if not table[key]:
            del table[key]
        left = GPU - self.shares.get(key, 0) - self.held_shares.get(key, 0)
        if 0 < left < GPU:
            insort(self.partial, (left, position, device))
        self._refresh(position, 1 << device)

    def _drop_partial(self, key: tuple[int, int]) -> None:
        left = GPU - self.shares.get(key, 0) - self.held_shares.get(key, 0)
        if 0 < left < GPU:
            entry = (left, *key)
            at = bisect_left(self.partial, entry)
            if at < len(self.partial) and self.partial[at] == entry:
                del self.partial[at]
