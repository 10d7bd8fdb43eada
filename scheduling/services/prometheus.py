"""DCGM metrics out of a Prometheus server, and the push of the same measurements by API.

Activity: ``DCGM_FI_PROF_SM_ACTIVE``, else ``DCGM_FI_PROF_GR_ENGINE_ACTIVE`` (ratios), else ``DCGM_FI_DEV_GPU_UTIL`` (per
cent; 100 can mean one busy SM), labelled as what it is. DCGM writes its sentinel where it has no value: missing, never
a number. Energy: differences of ``DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION`` (mJ); the counter begins anew with the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import httpx
import structlog
from django.conf import settings
from django.db import transaction

from scheduling.models import GPU, Allocation, GPUEvent, GPUSample
from scheduling.services import clock

log = structlog.get_logger(__name__)

#: Counters of activity, best first: (metric, name it is stored under, factor to a ratio).
ACTIVITY = (
    ("DCGM_FI_PROF_SM_ACTIVE", "sm_active", 1.0),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gr_engine_active", 1.0),
    ("DCGM_FI_DEV_GPU_UTIL", "gpu_util", 0.01),
)
POWER, ENERGY = "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
MEMORY, XID = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_XID_ERRORS"
#: DCGM's "no value" for 64-bit integers begins here (…794 and its neighbours); as a float it is a little off.
SENTINEL = 9.2e18
WINDOW = 60

Points = list[tuple[float, float]]
Device = tuple[str, str]


class PrometheusError(RuntimeError):
    """The server did not answer, or not with data: in its own words."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One device over ``seconds`` ending at ``at``. What was not measured is ``None``."""

    node: str
    device: str
    at: datetime
    seconds: int
    activity: float | None = None
    metric: str = ""
    power_watts: float | None = None
    energy_joules: float | None = None
    memory_used_bytes: int | None = None
    xid: int | None = None


def collect(now: datetime | None = None) -> int:
    """Read the last full minute and store it; returns the samples stored. Without a configured server nothing. A server
    that is away is logged: its minutes stay unknown."""
    url = settings.GPUPORTAL_PROMETHEUS_URL
    if not url:
        return 0
    now = now or clock.now()
    at = now.replace(second=0, microsecond=0)
    try:
        readings = read(url, at, settings.GPUPORTAL_PROMETHEUS_NODE_LABEL, settings.GPUPORTAL_PROMETHEUS_DEVICE_LABEL)
    except PrometheusError as error:
        log.warning("prometheus.unreachable", error=str(error))
        return 0
    return store(readings)


def read(url: str, at: datetime, node_label: str = "Hostname", device_label: str = "gpu") -> list[Reading]:
    """All devices over the minute that ends at ``at``. Raises ``PrometheusError``."""
    names = [name for name, _, _ in ACTIVITY] + [POWER, MEMORY, XID, ENERGY]
    with httpx.Client(base_url=url, timeout=20) as client:
        # Energy reaches back one more window: its difference begins at the last value before this one.
        series = {
            name: _series(client, name, at, 2 * WINDOW if name == ENERGY else WINDOW, node_label, device_label)
            for name in names
        }
    devices = sorted({device for rows in series.values() for device in rows})
    return [_reading(device, series, at) for device in devices]


def _series(
    client: httpx.Client, metric: str, at: datetime, seconds: int, node_label: str, device_label: str
) -> dict[Device, Points]:
    try:
        answer = client.get("/api/v1/query", params={"query": f"{metric}[{seconds}s]", "time": at.timestamp()})
        body = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise PrometheusError(f"{metric}: {error}") from error
    if body.get("status") != "success":
        raise PrometheusError(f"{metric}: {body.get('errorType')}: {body.get('error')}")
    found: dict[Device, Points] = {}
    for row in body["data"]["result"]:
        labels: Mapping[str, str] = row["metric"]
        node, device = labels.get(node_label), labels.get(device_label)
        if node and device:
            points = [(float(t), float(v)) for t, v in row["values"]]
            found.setdefault((node, device), []).extend(p for p in points if 0 <= p[1] < SENTINEL)
    return {device: sorted(set(points)) for device, points in found.items()}


def _reading(device: Device, series: Mapping[str, Mapping[Device, Points]], at: datetime) -> Reading:
    activity, metric = None, ""
    for name, stored_as, factor in ACTIVITY:
        value = _mean(series[name].get(device, ()))
        if value is not None and value * factor <= 1.0001:
            activity, metric = min(value * factor, 1.0), stored_as
            break
    memory = _mean(series[MEMORY].get(device, ()))
    xid = series[XID].get(device)
    return Reading(
        node=device[0],
        device=device[1],
        at=at,
        seconds=WINDOW,
        activity=activity,
        metric=metric,
        power_watts=_mean(series[POWER].get(device, ())),
        energy_joules=energy(series[ENERGY].get(device, ()), at.timestamp() - WINDOW),
        memory_used_bytes=None if memory is None else int(memory * 1024 * 1024),
        xid=int(xid[-1][1]) if xid and xid[-1][1] else None,
    )


def _mean(points: Sequence[tuple[float, float]]) -> float | None:
    return sum(value for _, value in points) / len(points) if points else None


def energy(points: Sequence[tuple[float, float]], since: float) -> float | None:
    """Joules from the last value at or before ``since`` on; a counter that falls has begun anew at zero."""
    before = [point for point in points if point[0] <= since]
    inside = [point for point in points if point[0] > since]
    if not before or not inside:
        return None
    total, last = 0.0, before[-1][1]
    for _, value in inside:
        total += value - last if value >= last else value
        last = value
    return total / 1000


@transaction.atomic
def store(readings: Iterable[Reading]) -> int:
    """Samples and XID events of known devices, each with the attempt that held the device alone; what is there already
    stays. The push API calls this too. Returns how many samples belonged to known devices."""
    rows = list(readings)
    gpus: dict[tuple[str, str], int] = {}
    known = GPU.objects.filter(node__name__in={row.node for row in rows}, exists__endswith=None)
    for number, node, index, uuid in known.values_list("id", "node__name", "index", "uuid"):
        gpus[node, str(index)] = number
        if uuid:
            gpus[node, uuid] = number
    found = [(gpus[row.node, row.device], row) for row in rows if (row.node, row.device) in gpus]
    holders = _holders({number for number, _ in found})
    GPUSample.objects.bulk_create(
        [
            GPUSample(
                gpu_id=number, attempt_id=holders.get(number), at=row.at, seconds=row.seconds, activity=row.activity,
                metric=row.metric, power_watts=row.power_watts, energy_joules=row.energy_joules,
                memory_used_bytes=row.memory_used_bytes,
            )
            for number, row in found
            if not row.activity is row.power_watts is row.energy_joules is row.memory_used_bytes is None
        ],
        ignore_conflicts=True,
        batch_size=2000,
    )  # fmt: skip
    _store_events([(number, row) for number, row in found if row.xid], holders)
    return len(found)


def _store_events(found: list[tuple[int, Reading]], holders: Mapping[int, int]) -> None:
    """DCGM goes on telling the last XID: only a new code, or the same after a day, is an event."""
    for number, row in found:
        again = GPUEvent.objects.filter(
            gpu_id=number, kind="xid", code=row.xid, at__gt=row.at - timedelta(days=1), at__lte=row.at
        )
        if not again.exists():
            GPUEvent.objects.create(
                gpu_id=number,
                attempt_id=holders.get(number),
                at=row.at,
                kind="xid",
                code=row.xid,
                detail=f"XID {row.xid}",
            )


def _holders(numbers: set[int]) -> dict[int, int]:
    """The attempt on each device; none where several share it."""
    held: dict[int, list[int]] = {}
    for gpu, attempt in Allocation.objects.filter(gpu_id__in=numbers, during__endswith=None).values_list(
        "gpu_id", "attempt_id"
    ):
        held.setdefault(gpu, []).append(attempt)
    return {gpu: attempts[0] for gpu, attempts in held.items() if len(attempts) == 1}
