"""Keeping what a cycle read, and deciding it again later."""

from __future__ import annotations

import hashlib
import io
import pickle
import zlib
from typing import Any

from scheduling.engine.decisions import Plan
from scheduling.engine.plan import plan
from scheduling.engine.snapshot import Snapshot
from scheduling.models import Cycle

#: Cycles whose snapshots are kept; the decisions themselves stay for good.
KEEP_SNAPSHOTS = 500


class ReplayError(Exception):
    """The cycle cannot be replayed, or the plan differs."""


class _OnlySnapshots(pickle.Unpickler):
    """Loads the engine's own data classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "scheduling.engine.snapshot" or (module, name) == ("builtins", "frozenset"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a snapshot")


def pack(snapshot: Snapshot) -> bytes:
    return zlib.compress(pickle.dumps(snapshot, protocol=5), 1)


def unpack(data: bytes) -> Snapshot:
    loaded = _OnlySnapshots(io.BytesIO(zlib.decompress(data))).load()
    if not isinstance(loaded, Snapshot):
        raise ReplayError("the stored data is not a snapshot")
    return loaded


def decisions_hash(decided: Plan) -> str:
    """Of everything that is carried out; explanations do not count."""
    parts = (decided.starts, decided.evictions, decided.holds, decided.released)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def replay(cycle: Cycle) -> Plan:
    """Decide a stored cycle again. Raises ``ReplayError`` when its snapshot is gone or the plan differs."""
    if cycle.snapshot is None:
        raise ReplayError(
            f"Cycle {cycle.pk} decided nothing, or its snapshot is older than the last {KEEP_SNAPSHOTS} kept ones."
        )
    decided = plan(unpack(bytes(cycle.snapshot)))
    if decisions_hash(decided) != cycle.plan_hash:
        raise ReplayError(f"Cycle {cycle.pk} gives another plan now: the engine's rules have changed since.")
    return decided


def forget_old_snapshots() -> int:
    """Drop snapshots beyond the newest ``KEEP_SNAPSHOTS``; returns how many."""
    kept = Cycle.objects.filter(snapshot__isnull=False).order_by("-id").values_list("id", flat=True)
    oldest = list(kept[KEEP_SNAPSHOTS - 1 : KEEP_SNAPSHOTS])
    if not oldest:
        return 0
    return Cycle.objects.filter(id__lt=oldest[0], snapshot__isnull=False).update(snapshot=None)
