"""What the versions of Slurm's REST API call things.

v0.0.38 (Slurm 22.05) cannot name nodes in a submit; there a job is pinned by features that single nodes have. From
v0.0.39 on (Slurm 23.02) ``required_nodes`` does it. Which of them a daemon speaks, and with which fields, is read from
its own ``/openapi/v3``.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from scheduling.backends.base import Rejected
from scheduling.backends.slurm.records import SlurmNode
from scheduling.backends.slurm.transport import Group, Submission

_VERSION = re.compile(r"^/slurm/(v0\.0\.(\d+))/job/submit/?$")
OLDEST = 38


class Dialect(Protocol):
    version: str
    #: Whether ``submission`` wants the cluster's nodes.
    needs_nodes: bool

    warnings: tuple[str, ...]

    def check(self, nodes: Sequence[SlurmNode], everything: Sequence[SlurmNode]) -> None:
        """Raises ``Rejected`` when jobs cannot be pinned to ``nodes``, a part of ``everything``."""
        ...

    def submission(self, job: Submission, nodes: Sequence[SlurmNode]) -> dict[str, Any]: ...

    def update(self, comment: str, time_limit: int | None) -> dict[str, Any]: ...


def choose_dialect(openapi: Mapping[str, Any]) -> Dialect:
    """The newest version the daemon offers. Raises ``Rejected`` when there is none that will do."""
    offered = {int(match[2]): match[1] for path in openapi.get("paths", {}) if (match := _VERSION.match(path))}
    usable = [number for number in offered if number >= OLDEST]
    if not usable:
        versions = ", ".join(sorted(offered.values())) or "none"
        raise Rejected(f"slurmrestd offers the API versions {versions}; v0.0.{OLDEST} or later is needed")
    newest = max(usable)
    if newest == OLDEST:
        return ByFeature(offered[newest])
    if "required_nodes" not in _job_fields(openapi, offered[newest]):
        raise Rejected(f"slurmrestd's {offered[newest]} has no required_nodes in a submit: no job can be pinned")
    return ByNode(offered[newest], _job_fields(openapi, offered[newest]))


def _job_fields(openapi: Mapping[str, Any], version: str) -> Mapping[str, Any]:
    """Fields of the job in a submit, following the references in the daemon's own description."""
    schemas = openapi.get("components", {}).get("schemas", {})
    for name in (f"{version}_job_desc_msg", f"{version}_job_properties", f"{version}_job_submission"):
        if "properties" in schemas.get(name, {}):
            return dict(schemas[name]["properties"])
    return {}


class ByFeature:
    """v0.0.38."""

    needs_nodes = True
    warnings: tuple[str, ...] = (
        "slurmrestd v0.0.38 does not pass on that jobs must not be requeued: set JobRequeue=0 in slurm.conf. Otherwise "
        "Slurm puts jobs back into its queue after a node failure; the portal ends them there and starts them itself",
    )

    def __init__(self, version: str) -> None:
        self.version = version

    def check(self, nodes: Sequence[SlurmNode], everything: Sequence[SlurmNode]) -> None:
        features = _own_features(everything)
        without = sorted(node.name for node in nodes if node.name not in features)
        if without:
            raise Rejected(
                f"slurmrestd {self.version} cannot name a job's nodes, and {len(without)} nodes have no feature of "
                f"their own to pin by ({', '.join(without[:5])}{' …' if len(without) > 5 else ''}). Give each node its "
                "name as a feature in slurm.conf, use slurmrestd v0.0.39 or later, or the transport `commands`."
            )

    def submission(self, job: Submission, nodes: Sequence[SlurmNode]) -> dict[str, Any]:
        features = _own_features(nodes)
        parts = [self._component(job, group, features) for group in job.groups]
        if len(parts) == 1:
            return {"script": job.script, "job": parts[0]}
        return {"script": job.script, "jobs": parts}

    def update(self, comment: str, time_limit: int | None) -> dict[str, Any]:
        return {"comment": comment} | ({} if time_limit is None else {"time_limit": time_limit})

    def _component(self, job: Submission, group: Group, features: Mapping[str, str]) -> dict[str, Any]:
        missing = [node for node in group.nodes if node not in features]
        if missing:
            raise Rejected(f"node {missing[0]} has no feature of its own to pin by")
        names = [features[node] for node in group.nodes]
        found: dict[str, Any] = {
            **_common(job),
            "open_mode": "append",
            "environment": dict(_environment()),
            "nodes": [len(group.nodes), len(group.nodes)],
            "tasks": len(group.nodes) * group.workers_per_node,
            "tasks_per_node": group.workers_per_node,
            "gres": group.gres,
            "constraints": names[0] if len(names) == 1 else "[" + "&".join(f"{name}*1" for name in names) + "]",
        }
        if job.time_limit is not None:
            found["time_limit"] = job.time_limit
        if job.signal_before:
            found["signal"] = f"{int(signal.SIGTERM)}@{job.signal_before}"
        if job.cpus_per_worker is not None:
            found["cpus_per_task"] = job.cpus_per_worker
        if job.memory_per_worker is not None:
            found["memory_per_node"] = job.memory_per_worker * group.workers_per_node
        return found


class ByNode:
    """v0.0.39 and later."""

    needs_nodes = False
    warnings: tuple[str, ...] = ()

    def __init__(self, version: str, fields: Mapping[str, Any]) -> None:
        self.version = version
        self._fields = fields

    def check(self, nodes: Sequence[SlurmNode], everything: Sequence[SlurmNode]) -> None:
        """Any node can be named."""

    def submission(self, job: Submission, nodes: Sequence[SlurmNode]) -> dict[str, Any]:
        parts = [self._component(job, group) for group in job.groups]
        for part in parts:
            unknown = sorted(part.keys() - self._fields.keys())
            if unknown:
                raise Rejected(f"slurmrestd {self.version} knows no {', '.join(unknown)} in a submit")
        if len(parts) == 1:
            return {"script": job.script, "job": parts[0]}
        return {"script": job.script, "jobs": parts}

    def update(self, comment: str, time_limit: int | None) -> dict[str, Any]:
        return {"comment": comment} | ({} if time_limit is None else {"time_limit": _number(time_limit)})

    def _component(self, job: Submission, group: Group) -> dict[str, Any]:
        found: dict[str, Any] = {
            **_common(job),
            "open_mode": self._open_mode(),
            "environment": [f"{name}={value}" for name, value in _environment()],
            "required_nodes": list(group.nodes),
            "minimum_nodes": len(group.nodes),
            "maximum_nodes": len(group.nodes),
            "tasks": len(group.nodes) * group.workers_per_node,
            "tasks_per_node": group.workers_per_node,
            "tres_per_node": f"gres/{group.gres}",
        }
        if job.time_limit is not None:
            found["time_limit"] = _number(job.time_limit)
        if job.signal_before:
            found["kill_warning_signal"] = "TERM"
            found["kill_warning_delay"] = _number(job.signal_before)
        if job.cpus_per_worker is not None:
            found["cpus_per_task"] = job.cpus_per_worker
        if job.memory_per_worker is not None:
            found["memory_per_node"] = _number(job.memory_per_worker * group.workers_per_node)
        return found

    def _open_mode(self) -> str | list[str]:
        """A word until v0.0.39, a list of flags (by reference) since."""
        return "append" if self._fields.get("open_mode", {}).get("type") == "string" else ["APPEND"]


def _common(job: Submission) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": job.name,
        "comment": job.comment,
        "current_working_directory": job.directory,
        "standard_output": job.output,
        "requeue": False,
    }
    for field, value in (("partition", job.partition), ("qos", job.qos), ("reservation", job.reservation)):
        if value:
            found[field] = value
    if job.charge:
        found["account"] = job.charge
    return found


def _environment() -> list[tuple[str, str]]:
    # The script sets everything else; slurmrestd refuses a job without any variable.
    return [("PATH", "/usr/local/bin:/usr/bin:/bin"), ("LC_ALL", "C.UTF-8")]


def _number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


def _own_features(nodes: Sequence[SlurmNode]) -> dict[str, str]:
    """By node a feature that no other node has: its name if it is one, else the first in order."""
    counts = Counter(feature for node in nodes for feature in set(node.features))
    found = {}
    for node in nodes:
        own = sorted(feature for feature in node.features if counts[feature] == 1)
        if own:
            found[node.name] = node.name if node.name in own else own[0]
    return found
