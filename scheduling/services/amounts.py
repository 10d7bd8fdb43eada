"""GPU amounts between the database (Decimal GPUs) and the engine (int millionths), and placements as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from scheduling.engine.snapshot import GPU, Placement, Slot


def millionths(amount: Decimal) -> int:
    return int(amount * GPU)


def gpus(amount: float) -> Decimal:
    return (Decimal(amount) / GPU).quantize(Decimal("0.000001"))


def placement_json(placement: Placement) -> list[list[int]]:
    """[[node id, device bits, share in millionths], …], one per worker."""
    return [[slot.node, slot.devices, slot.share] for slot in placement]


def placement_of(rows: Sequence[Sequence[int]]) -> Placement:
    return tuple(Slot(node, devices, share) for node, devices, share in rows)


def device_indices(devices: int) -> tuple[int, ...]:
    """Bit mask -> indices."""
    return tuple(index for index in range(devices.bit_length()) if devices >> index & 1)
