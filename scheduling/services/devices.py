"""Which devices an attempt really holds: some clusters (Slurm) choose them themselves, and the ledger follows.

Where the ledger has another running attempt on a device that the cluster gave to this one, the two change places: the
other is not there either, and its own report puts it where it is. The change is made for the whole of the intervals
where the history allows it. Where an attempt that has ended held the device meanwhile, it is made from the instant on at
which the cluster started this one (the ledger's interval begins with the decision, a little earlier), or else from the
instant of the report on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from django.db import IntegrityError, connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from scheduling.models import GPU, Allocation, Attempt, Node
from scheduling.services.amounts import device_indices


def believed_devices(attempt: Attempt) -> dict[str, set[int]]:
    """Node name -> device indices, as the ledger has them."""
    names = _names(attempt)
    found: dict[str, set[int]] = {}
    for node, devices, _ in attempt.placement:
        found.setdefault(names[node], set()).update(device_indices(devices))
    return found


def follow_devices(
    attempt: Attempt, told: Mapping[str, Sequence[int]], now: datetime, *, started: datetime | None = None
) -> bool:
    """Bring the ledger to what the cluster tells as of ``now``, where the attempt was ``started`` by it; True when
    anything was changed. The caller holds the attempt's row and is in a transaction. What cannot be compared (other nodes or numbers, shares of devices) is left alone."""
    believed = believed_devices(attempt)
    if told.keys() != believed.keys() or any(len(set(told[name])) != len(believed[name]) for name in believed):
        return False
    ids = {name: node for node, name in _names(attempt).items()}
    changed = False
    for name, devices in believed.items():
        if set(told[name]) != devices:
            changed = _move(attempt, ids[name], set(told[name]), (started or now, now)) or changed
    return changed


def _names(attempt: Attempt) -> dict[int, str]:
    return dict(Node.objects.filter(pk__in={row[0] for row in attempt.placement}).values_list("pk", "name"))


def _move(attempt: Attempt, node: int, wanted: set[int], instants: Sequence[datetime]) -> bool:
    gpus = {gpu.index: gpu for gpu in GPU.objects.filter(node_id=node, exists__endswith=None)}
    if not wanted <= gpus.keys():
        return False
    open_rows = list(
        Allocation.objects.select_for_update(of=("self",))
        .filter(gpu__node_id=node, during__endswith=None, during__isempty=False)
        .select_related("gpu", "attempt")
        .order_by("gpu__index")
    )
    mine = [row for row in open_rows if row.attempt_id == attempt.pk]
    others = {row.gpu.index: row for row in open_rows if row.attempt_id != attempt.pk}
    held = {row.gpu.index for row in mine}
    leaving = [row for row in mine if row.gpu.index not in wanted]
    targets = sorted(wanted - held)
    if len(leaving) != len(targets) or any(row.share != 1 for row in open_rows if row.gpu.index in wanted | held):
        return False
    moves: list[tuple[Allocation, GPU]] = []
    for row, target in zip(leaving, targets, strict=True):
        moves.append((row, gpus[target]))
        if target in others:
            moves.append((others[target], gpus[row.gpu.index]))
    _carry_out(moves, instants)
    for other in {row.attempt_id for row, _ in moves}:
        _note_placement(attempt if other == attempt.pk else Attempt.objects.get(pk=other), node)
    return True


def _carry_out(moves: list[tuple[Allocation, GPU]], instants: Sequence[datetime]) -> None:
    """For the whole intervals if possible, else from the first of ``instants`` on from which it is."""
    for at in (None, *instants[:-1]):
        try:
            with transaction.atomic():
                if at is None:
                    _rewrite(moves)
                else:
                    _split(moves, at)
            return
        except IntegrityError:
            continue
    _split(moves, instants[-1])


def _rewrite(moves: list[tuple[Allocation, GPU]]) -> None:
    """Other devices for the whole of each interval. Emptied first, so that no two stand on one device in between."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL gpuportal.correcting = 'devices told by the cluster'")
        cursor.execute(
            "UPDATE scheduling_allocation SET during = 'empty' WHERE id = ANY(%s)", [[row.pk for row, _ in moves]]
        )
        for row, gpu in moves:
            cursor.execute(
                "UPDATE scheduling_allocation SET gpu_id = %s, during = tstzrange(%s, NULL, '[)') WHERE id = %s",
                [gpu.pk, row.during.lower, row.pk],
            )
        cursor.execute("SET LOCAL gpuportal.correcting = ''")


def _split(moves: list[tuple[Allocation, GPU]], at: datetime) -> None:
    """Other devices from ``at`` on."""
    at = max([at, *(row.during.lower for row, _ in moves)])
    Allocation.objects.bulk_update(
        [Allocation(pk=row.pk, during=DateTimeTZRange(row.during.lower, at, "[)")) for row, _ in moves], ["during"]
    )
    for row, gpu in moves:
        Allocation.objects.create(
            attempt_id=row.attempt_id,
            gpu=gpu,
            team_id=row.team_id,
            pool_id=row.pool_id,
            share=row.share,
            during=DateTimeTZRange(at, None, "[)"),
        )


def _note_placement(attempt: Attempt, node: int) -> None:
    """The placement's bit masks, worker by worker, from the allocations."""
    indices = list(
        Allocation.objects.filter(attempt=attempt, gpu__node_id=node, during__endswith=None, during__isempty=False)
        .order_by("gpu__index")
        .values_list("gpu__index", flat=True)
    )
    placement = [list(row) for row in attempt.placement]
    for row in placement:
        if row[0] == node:
            count = int(row[1]).bit_count()
            row[1] = sum(1 << index for index in indices[:count])
            indices = indices[count:]
    attempt.placement = placement
    attempt.save(update_fields=["placement"])
