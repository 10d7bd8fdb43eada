"""Measurements of devices, from whoever delivers them, into the ledger's terms."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Q

from scheduling.backends.base import Sample
from scheduling.models import GPU, Allocation, Cluster, GPUSample

#: What DCGM puts where it has no value.
SENTINEL = 9223372036854775794


def store_samples(cluster: Cluster, samples: Iterable[Sample]) -> int:
    """Store samples of devices of ``cluster``, each with the attempt that held the device alone; a device and instant
    that is there already is left as it is. Returns how many were new or known."""
    rows = list(samples)
    if not rows:
        return 0
    names = {sample.node for sample in rows}
    gpus = {
        (name, index): number
        for name, index, number in GPU.objects.filter(
            node__cluster=cluster, node__name__in=names, exists__endswith=None
        ).values_list("node__name", "index", "id")
    }
    holders = _holders(set(gpus.values()))
    stored = []
    for sample in rows:
        gpu = gpus.get((sample.node, sample.device))
        if gpu is None:
            continue
        activity = sample.activity
        if activity is not None and not 0 <= activity <= 1:
            activity = None
        stored.append(
            GPUSample(
                gpu_id=gpu,
                attempt_id=holders.get(gpu),
                at=sample.at,
                seconds=sample.seconds,
                activity=activity,
                metric=sample.metric[:20],
                power_watts=sample.power_watts,
                memory_used_bytes=sample.memory_used_bytes,
            )
        )
    GPUSample.objects.bulk_create(stored, ignore_conflicts=True, batch_size=2000)
    return len(stored)


def _holders(gpu_ids: set[int]) -> dict[int, int]:
    """The attempt on each device; none where several share it."""
    found: dict[int, int] = {}
    shared: set[int] = set()
    rows = Allocation.objects.filter(Q(gpu_id__in=gpu_ids), during__endswith=None).values_list("gpu_id", "attempt_id")
    for gpu, attempt in rows:
        if gpu in found:
            shared.add(gpu)
        found[gpu] = attempt
    return {gpu: attempt for gpu, attempt in found.items() if gpu not in shared}
