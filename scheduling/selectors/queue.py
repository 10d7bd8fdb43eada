"""The queue, a page at a time: its order comes from the latest cycle, the rows from the database.

The order of 100,000 jobs is one compressed row. It is unpacked once per cycle and process; a page without filters is a
piece of it. With filters the database names the jobs that match (eight bytes each), and they are sorted by their
places here; that answer is kept as long as the order stays the same.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal

import numpy as np
from django.conf import settings
from django.db import connection
from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.utils import timezone
from numpy.typing import NDArray

from scheduling.models import Estimate, Job, JobEvent, Pool, QueueOrder
from teams.actors import Actor
from teams.permissions import Permission, visible_team_ids

PAGE = 50
#: Filters of the queue, as in its address.
FILTERS = ("state", "team", "pool", "owner", "reason", "name")
#: An order older than this no longer tells who waits: the loop does not run.
FRESH = timedelta(seconds=30)
#: Answers to filters that a process keeps.
KEPT = 64
#: Jobs newer than the order that a page shows at most.
MOST_NEW = 500

Numbers = NDArray[np.int64]


@dataclass(slots=True)
class Order:
    """Waiting jobs in the order of 4.2 as of one cycle."""

    id: int
    worked_out_at: datetime | None
    jobs: Numbers
    #: [team, pool, share, allocated, want], in millionths of a GPU.
    shares: list[list[int]] = field(default_factory=list)
    #: Ids in rising order, and where each stands in ``jobs``.
    _sorted: Numbers = field(init=False)
    _at: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self._at = np.argsort(self.jobs, kind="stable")
        self._sorted = self.jobs[self._at]

    @property
    def last(self) -> int:
        """The highest number in it; newer jobs have not been looked at yet."""
        return int(self._sorted[-1]) if len(self._sorted) else 0

    def places(self, numbers: Numbers) -> Numbers:
        """1 = first in line; 0 = not in the order."""
        if not len(self.jobs):
            return np.zeros(len(numbers), dtype=np.int64)
        near = np.searchsorted(self._sorted, numbers).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[near] == numbers, self._at[near] + 1, 0)

    def place(self, number: int) -> int | None:
        return int(self.places(np.array([number], dtype=np.int64))[0]) or None


_EMPTY = Order(0, None, np.array([], dtype=np.int64))
_lock = threading.Lock()
_order: Order = _EMPTY
_answers: OrderedDict[tuple[object, ...], Numbers] = OrderedDict()


def current_order() -> Order:
    """The order of the latest cycle; the ids are read only when there is a new one."""
    global _order
    order = _order
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT id, worked_out_at, CASE WHEN new THEN job_ids END, CASE WHEN new THEN shares END
            FROM scheduling_queueorder
            CROSS JOIN LATERAL (SELECT (id, worked_out_at) IS DISTINCT FROM (%s::bigint, %s::timestamptz) AS new) x
            ORDER BY id DESC LIMIT 1
            """,
            [order.id, order.worked_out_at],
        )
        row = cursor.fetchone()
    if row is None:
        return _EMPTY
    number, at, packed, shares = row
    if packed is None:
        return order
    jobs = np.frombuffer(zlib.decompress(bytes(packed)), dtype="<i8").astype(np.int64)
    order = Order(number, at, jobs, json.loads(shares) if isinstance(shares, str) else shares)
    with _lock:
        _order = order
        _answers.clear()
    return order


@dataclass(frozen=True, slots=True)
class StartRange:
    """A start estimate: half of the cases start by the first instant, nine of ten by the second."""

    p50_at: datetime | None
    p90_at: datetime | None


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A job in the queue; ``open`` = the viewer may see all of it."""

    job: Job
    position: int | None
    open: bool
    gpus: Decimal
    estimate: StartRange | None = None


@dataclass(slots=True)
class QueuePage:
    rows: list[QueueRow]
    total: int
    page: int
    pages: int
    worked_out_at: datetime | None = None


def amount(job: Job) -> Decimal:
    """GPUs that a job asks for."""
    if job.gpus:
        return Decimal(job.workers * job.gpus)
    return job.share if job.share is not None else Decimal("1")


def scope(actor: Actor) -> set[int] | None:
    """Teams whose jobs the actor may see in full; ``None`` = all."""
    return visible_team_ids(actor, Permission.VIEW_JOBS)


def queue_version(filters: Mapping[str, str], teams: set[int] | None) -> str:
    """Changes whenever the page of these filters could: the latest cycle, event and estimate."""
    order = QueueOrder.objects.order_by("-id").values_list("pk", flat=True).first()
    event = JobEvent.objects.order_by("-id").values_list("pk", flat=True).first()
    estimate = Estimate.objects.order_by("-id").values_list("pk", flat=True).first()
    seen = "all" if teams is None else ",".join(map(str, sorted(teams)))
    return f"{order}-{event}-{estimate}-{timezone.localdate()}-{seen}-{sorted(filters.items())}"


def queue_page(order: Order, filters: Mapping[str, str], page: int, teams: set[int] | None) -> QueuePage:
    """One page of waiting or running jobs, in the order of the queue, for a viewer with ``scope`` ``teams``."""
    state = filters.get("state") if filters.get("state") in ("waiting", "running") else "waiting"
    rows = Job.objects.filter(state=state)
    private = teams is not None and settings.GPUPORTAL_QUEUE == "private"
    if private:
        rows = rows.filter(team_id__in=teams)
    rows, narrowed = _filtered(rows, filters, teams)
    if state == "waiting":
        key = (tuple(sorted(filters.items())), None if teams is None else frozenset(teams))
        return _waiting_page(order, rows, teams, page, key if narrowed or private else None)
    total = rows.count()
    pages = max(1, -(-total // PAGE))
    page = min(max(1, page), pages)
    found = rows.select_related("team", "owner", "reason_group").order_by("-id")[(page - 1) * PAGE : page * PAGE]
    return QueuePage([_row(job, None, teams) for job in found], total, page, pages)


def _waiting_page(
    order: Order, rows: QuerySet[Job], teams: set[int] | None, page: int, key: tuple[object, ...] | None
) -> QueuePage:
    """``key`` names the filters; ``None`` = all that wait, which the order itself tells while it is fresh."""
    fresh = order.worked_out_at is not None and timezone.now() - order.worked_out_at < FRESH
    if key is None and fresh:
        old = order.jobs
    elif fresh:
        old = _kept(rows, order, key)
    else:
        old = _in_order(_numbers(rows), order)
    new = np.array(
        rows.filter(pk__gt=max(order.last, int(old.max(initial=0)))).order_by("pk").values_list("pk", flat=True)[:MOST_NEW],
        dtype=np.int64,
    )  # fmt: skip
    total = len(old) + len(new)
    pages = max(1, -(-total // PAGE))
    page = min(max(1, page), pages)
    wanted = (
        np.concatenate([old, new])[(page - 1) * PAGE : page * PAGE]
        if len(new)
        else old[(page - 1) * PAGE : page * PAGE]
    )
    numbers = [int(number) for number in wanted]
    found = with_estimates(rows.select_related("team", "owner", "reason_group").filter(pk__in=numbers))
    jobs = {job.pk: job for job in found}
    places = dict(zip(numbers, order.places(wanted).tolist(), strict=True))
    shown = [_row(jobs[number], places[number] or None, teams) for number in numbers if number in jobs]
    return QueuePage(shown, total, page, pages, order.worked_out_at)


def _kept(rows: QuerySet[Job], order: Order, key: tuple[object, ...] | None) -> Numbers:
    """The answer to these filters as of this order."""
    name = (order.id, order.worked_out_at, key)
    with _lock:
        found = _answers.get(name)
        if found is not None:
            _answers.move_to_end(name)
            return found
    found = _in_order(_numbers(rows.filter(pk__lte=order.last)), order)
    with _lock:
        _answers[name] = found
        while len(_answers) > KEPT:
            _answers.popitem(last=False)
    return found


def _numbers(rows: QuerySet[Job]) -> Numbers:
    """Ids of all rows as one value: a list of 100,000 Python numbers would cost more than the query."""
    statement, values = rows.order_by().values("pk").query.sql_with_params()
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT string_agg(int8send(found.id), ''::bytea) FROM ({statement}) found(id)", values)
        (packed,) = cursor.fetchone()
    return np.frombuffer(bytes(packed or b""), dtype=">i8").astype(np.int64)


def _in_order(numbers: Numbers, order: Order) -> Numbers:
    places = order.places(numbers)
    places[places == 0] = np.iinfo(np.int64).max
    return numbers[np.lexsort((numbers, places))]


def with_estimates(rows: QuerySet[Job]) -> QuerySet[Job]:
    """Each job with the newest estimate of its start, in the same query."""
    newest = Estimate.objects.filter(job=OuterRef("pk")).order_by("-made_at")
    return rows.annotate(
        **{f"estimate_{name}": Subquery(newest.values(name)[:1]) for name in ("made_at", "p50_at", "p90_at")}
    )


def estimate_of(job: Job) -> StartRange | None:
    """Of a job out of ``with_estimates``."""
    if getattr(job, "estimate_made_at", None) is None:
        return None
    return StartRange(job.estimate_p50_at, job.estimate_p90_at)  # type: ignore[attr-defined]


def _row(job: Job, position: int | None, teams: set[int] | None) -> QueueRow:
    return QueueRow(job, position, teams is None or job.team_id in teams, amount(job), estimate_of(job))


def _filtered(rows: QuerySet[Job], filters: Mapping[str, str], teams: set[int] | None) -> tuple[QuerySet[Job], bool]:
    """The matching rows, and whether anything was asked for. What the viewer may not see is not searched."""
    wanted = Q()
    if filters.get("team"):
        wanted &= Q(team__name=filters["team"])
    if filters.get("pool"):
        number = Pool.objects.filter(name=filters["pool"]).values_list("pk", flat=True).first()
        wanted &= Q(pools__contains=[number or -1])
    if filters.get("owner"):
        wanted &= Q(owner__username=filters["owner"])
    if filters.get("reason"):
        wanted &= Q(reason_group__code=filters["reason"])
    if filters.get("name"):
        wanted &= Q(name__icontains=filters["name"].replace("\x00", ""))
    if teams is not None and (filters.get("owner") or filters.get("name")):
        wanted &= Q(team_id__in=teams)
    return rows.filter(wanted), bool(wanted)
