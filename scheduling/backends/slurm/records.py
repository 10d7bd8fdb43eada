"""What Slurm's JSON says, as plain records: one reader for ``squeue --json``, ``sinfo --json`` and slurmrestd.

Two dialects exist. Until 22.05 (v0.0.38) numbers are bare and the job's state is one word; from 23.02 (v0.0.39) a
number is ``{"set": …, "infinite": …, "number": …}`` and the state a list of words. Both are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from scheduling.backends.slurm.hostlist import expand

_GRES = re.compile(
    r"(?:gres[/:])?(?P<name>[a-z_]+)(?::(?P<type>[^:()]+))??:(?P<count>\d+)(?P<unit>[KMGT]?)(?:\((?P<note>[^)]*)\))?$"
)
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@dataclass(frozen=True, slots=True)
class Tag:
    """What the portal writes into a job's comment."""

    instance: str
    attempt: UUID
    #: Set when a stop has been asked for: the end at the latest, seconds since the epoch.
    stop_by: int | None = None
    #: The stop signal has been sent.
    told: bool = False
    #: Slurm believed it running, but its batch script never began: ended by the portal.
    lost: bool = False

    def text(self) -> str:
        content: dict[str, object] = {"portal": self.instance, "attempt": str(self.attempt)}
        if self.stop_by is not None:
            content["stop_by"] = self.stop_by
        for name in ("told", "lost"):
            if getattr(self, name):
                content[name] = True
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def read(cls, comment: str) -> Tag | None:
        """None for a comment that is not ours."""
        try:
            content = json.loads(comment)
            stop_by = content.get("stop_by")
            instance, attempt = str(content["portal"]), UUID(content["attempt"])
            told, lost = bool(content.get("told")), bool(content.get("lost"))
            return cls(instance, attempt, None if stop_by is None else int(stop_by), told, lost)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job (or one component of a heterogeneous job) as Slurm reports it."""

    id: int
    states: tuple[str, ...]
    user: str
    comment: str = ""
    nodes: str = ""
    name: str = ""
    reason: str = ""
    started: datetime | None = None
    ended: datetime | None = None
    #: Exit status, and the signal that ended the batch script (0 = none).
    exit_status: int = 0
    exit_signal: int = 0
    #: Highest status of any step.
    step_status: int = 0
    #: Node -> device indices, while it runs.
    devices: Mapping[str, tuple[int, ...]] | None = None
    restarts: int = 0
    #: Id of the first component; 0 for an ordinary job.
    het_leader: int = 0
    het_offset: int = 0
    #: Minutes; None = unlimited.
    time_limit: int | None = None

    @property
    def tag(self) -> Tag | None:
        return Tag.read(self.comment)


@dataclass(frozen=True, slots=True)
class Gres:
    name: str
    type: str
    count: int
    #: What stands in brackets: "S:0-1", "IDX:0,2-3".
    note: str = ""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    name: str
    states: tuple[str, ...]
    gres: tuple[Gres, ...]
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    reason: str = ""
    slurm_version: str = ""


def read_job(row: Mapping[str, Any]) -> SlurmJob:
    """One element of ``jobs``. Raises ``KeyError`` or ``ValueError`` when it is not one."""
    status, signal = _exit(row.get("exit_code"))
    words = _words(row["job_state"])
    return SlurmJob(
        id=_number(row["job_id"]) or 0,
        states=words,
        user=str(row.get("user_name") or ""),
        comment=_comment(row.get("comment")),
        nodes=str(row.get("nodes") or ""),
        name=str(row.get("name") or ""),
        reason=_reason(row),
        started=None if "PENDING" in words else _instant(row.get("start_time")),
        ended=_instant(row.get("end_time")),
        exit_status=status,
        exit_signal=signal,
        step_status=_exit(row.get("derived_exit_code"))[0],
        devices=_devices(row),
        restarts=_number(row.get("restart_cnt")) or 0,
        het_leader=_number(row.get("het_job_id")) or 0,
        het_offset=_number(row.get("het_job_offset")) or 0,
        time_limit=_number(row.get("time_limit")),
    )


def read_node(row: Mapping[str, Any]) -> SlurmNode:
    """One element of ``nodes``."""
    words = (*_words(row.get("state") or "unknown"), *_words(row.get("state_flags") or ()))
    return SlurmNode(
        name=str(row["name"]),
        states=tuple(word for word in words if word),
        gres=tuple(parse_gres(str(row.get("gres") or ""))),
        features=_list(row.get("active_features") or row.get("features")),
        partitions=_list(row.get("partitions")),
        reason=_none(str(row.get("reason") or "")),
        slurm_version=str(row.get("slurmd_version") or row.get("version") or ""),
    )


def parse_gres(text: str) -> list[Gres]:
    """``gpu:h100:8(S:0-1),shard:32`` as records. Raises ``ValueError`` for what is no list of resources."""
    found = []
    for part in re.split(r",(?![^(]*\))", text.strip()):
        if not part or part in ("(null)", "N/A"):
            continue
        match = _GRES.match(part)
        if match is None:
            # A resource without a count is one of it: "gpu", "gpu:h100".
            match = _GRES.match(f"{part}:1")
        if match is None:
            raise ValueError(f"{part!r} is no generic resource of Slurm (in {text!r})")
        count = int(match["count"]) * _UNITS[match["unit"]]
        found.append(Gres(match["name"], match["type"] or "", count, match["note"] or ""))
    return found


def indices(note: str) -> tuple[int, ...]:
    """Device indices in ``IDX:0-1,3``; empty when there are none."""
    _, colon, text = note.partition("IDX:")
    if not colon or text in ("", "N/A"):
        return ()
    return tuple(sorted(int(name) for name in expand(f"[{text}]")))


def read_devices(text: str) -> dict[str, tuple[int, ...]] | None:
    """Devices by node from lines ``NODE INDEX,INDEX``, which the workers write; None when that is not what it is."""
    found: dict[str, set[int]] = {}
    for line in text.splitlines():
        node, _, devices = line.partition(" ")
        try:
            found.setdefault(node, set()).update(indices(f"IDX:{devices}"))
        except ValueError:
            return None
    return {node: tuple(sorted(devices)) for node, devices in found.items() if devices} or None


def merge_components(components: Sequence[SlurmJob]) -> SlurmJob:
    """One record for a heterogeneous job: the first component speaks for all, the devices are everybody's.

    A component that was put back into the queue, or that failed on a node while the first still runs, is the one
    that matters, so it is shown instead.
    """
    ordered = sorted(components, key=lambda job: job.het_offset)
    leader = ordered[0]
    devices: dict[str, tuple[int, ...]] = {}
    known = True
    for job in ordered:
        if job.devices is None:
            known = False
        else:
            devices.update(job.devices)
    bad = next((job for job in ordered if job.restarts or "NODE_FAIL" in job.states), leader)
    return replace(
        leader,
        states=bad.states,
        reason=bad.reason or leader.reason,
        restarts=max(job.restarts for job in ordered),
        devices=devices if known else None,
    )


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(word.strip() for word in re.split(r"[+,\s]+", value.strip()) if word.strip())
    if isinstance(value, Sequence):
        return tuple(str(word) for word in value)
    raise ValueError(f"{value!r} is no state")


def _number(value: object) -> int | None:
    if isinstance(value, Mapping):
        return int(value.get("number", 0)) if value.get("set") and not value.get("infinite") else None
    if value in (None, ""):
        return None
    return int(str(value))


def _instant(value: object) -> datetime | None:
    seconds = _number(value)
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def _exit(value: object) -> tuple[int, int]:
    """(status, signal) of a wait status, bare or taken apart."""
    if isinstance(value, Mapping) and ("return_code" in value or "signal" in value):
        signal = value.get("signal") or {}
        number = _number(signal.get("id", signal.get("signal_id"))) if isinstance(signal, Mapping) else 0
        return _number(value.get("return_code")) or 0, number or 0
    raw = _number(value) or 0
    return (raw >> 8) & 0xFF, raw & 0x7F


def _comment(value: object) -> str:
    # sacct --json nests it: {"job": …, "administrator": …, "system": …}
    return str(value.get("job") or "") if isinstance(value, Mapping) else _none(str(value or ""))


def _reason(row: Mapping[str, Any]) -> str:
    parts = [_none(str(row.get(key) or "")) for key in ("state_reason", "state_description")]
    return ": ".join(part for part in parts if part)


def _none(text: str) -> str:
    return "" if text in ("(null)", "None", "N/A") else text


def _list(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part for part in value.split(",") if part and part != "(null)")
    return tuple(str(part) for part in value) if isinstance(value, Sequence) else ()


def _devices(row: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    details = row.get("gres_detail") or []
    if not details or not row.get("nodes"):
        return None
    nodes = expand(str(row["nodes"]))
    if len(nodes) != len(details):
        return None
    found: dict[str, tuple[int, ...]] = {}
    for node, detail in zip(nodes, details, strict=True):
        devices: set[int] = set()
        for gres in parse_gres(str(detail)):
            if gres.name in ("gpu", "shard", "mps"):
                devices.update(indices(gres.note))
        found[node] = tuple(sorted(devices))
    return found
