"""Storing why jobs wait without writing a row per job and cycle.

Jobs that are blocked alike share a ``ReasonGroup`` of their team; each cycle brings the numbers of the groups up to
date and touches only the jobs that moved from one group to another.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.db import connection

from scheduling.engine.decisions import Blocked, Blocker, ShareRow
from scheduling.models import Cycle, QueueOrder, ReasonGroup
from scheduling.services.clock import instant


def blocker_json(blocker: Blocker) -> dict[str, Any]:
    """Only what is set; instants as ISO text, amounts in millionths."""
    row: dict[str, Any] = {"code": blocker.code.value}
    for name in ("pool", "team", "limit", "in_use", "asked", "free", "largest", "level", "job", "detail"):
        value = getattr(blocker, name)
        if value not in (None, ""):
            row[name] = value
    if blocker.until is not None:
        row["until"] = instant(blocker.until).isoformat()
    if blocker.remedy is not None:
        remedy = blocker.remedy
        row["remedy"] = {
            key: value
            for key, value in (("change", remedy.change), ("value", remedy.value), ("pool", remedy.pool))
            if value is not None
        }
    return row


def _key(blockers: tuple[Blocker, ...]) -> str:
    """What stays the same while numbers move: codes, pools, teams, levels."""
    parts = [(b.code.value, b.pool, b.team, b.level, b.asked) for b in blockers]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def store_reasons(
    blocked: Iterable[Blocked],
    team_of: dict[int, int],
    known: dict[int, int | None],
    at: datetime,
    cycle: Cycle,
    shares: Iterable[ShareRow] = (),
) -> None:
    """Bring groups up to date, move jobs between groups, and store the order of the queue with the fair shares."""
    keys_by_identity: dict[int, str] = {}
    groups: dict[tuple[int, str], tuple[Blocker, ...]] = {}
    wanted: dict[int, tuple[int, str]] = {}
    order = array("q")
    for row in blocked:
        order.append(row.job)
        if not row.blockers:
            continue
        identity = id(row.blockers)
        key = keys_by_identity.get(identity)
        if key is None:
            key = keys_by_identity[identity] = _key(row.blockers)
        name = (team_of[row.job], key)
        groups.setdefault(name, row.blockers)
        wanted[row.job] = name
    ReasonGroup.objects.bulk_create(
        [
            ReasonGroup(
                team_id=team,
                key=key,
                code=blockers[0].code.value,
                blockers=[blocker_json(blocker) for blocker in blockers],
                worked_out_at=at,
            )
            for (team, key), blockers in groups.items()
        ],
        update_conflicts=True,
        unique_fields=["team", "key"],
        update_fields=["code", "blockers", "worked_out_at"],
        batch_size=2000,
    )
    ids = {
        (team, key): number
        for number, team, key in ReasonGroup.objects.filter(worked_out_at=at).values_list("id", "team_id", "key")
    }
    moved = [(job, ids[name]) for job, name in wanted.items() if known.get(job) != ids[name]]
    if moved:
        with connection.cursor() as cursor:
            cursor.execute(
                """
                UPDATE scheduling_job j SET reason_group_id = m.grp
                FROM unnest(%s::bigint[], %s::bigint[]) AS m(job, grp)
                WHERE j.id = m.job AND j.state = 'waiting'
                """,
                [[job for job, _ in moved], [group for _, group in moved]],
            )
    QueueOrder.objects.all().delete()
    QueueOrder.objects.create(
        cycle=cycle,
        worked_out_at=at,
        count=len(order),
        job_ids=zlib.compress(order.tobytes(), 1),
        shares=[[row.team, row.pool, round(row.share), row.allocated, row.want] for row in shares],
    )


def queue_order() -> list[int]:
    """Waiting jobs in the order of 4.2 as of the latest cycle."""
    row = QueueOrder.objects.order_by("-id").values_list("job_ids", flat=True).first()
    order = array("q")
    if row is not None:
        order.frombytes(zlib.decompress(bytes(row)))
    return list(order)
