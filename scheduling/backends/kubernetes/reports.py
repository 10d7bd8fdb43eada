"""From an attempt's Jobs and pods to a run report, and what must be ended (docs/reference/kubernetes-states.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from uuid import UUID

from scheduling.backends.base import Cause, RunReport, RunState
from scheduling.backends.kubernetes.api import Json
from scheduling.backends.kubernetes.manifests import CONTAINER, FAILURE, PARTS, STOP, WORKERS

T = TypeVar("T")

#: Why a container waits that will never start. Others (ImagePullBackOff …) may pass and get the time of patience.
HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "ImageInspectError")
UNSTARTED = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "CreateContainerError", "RunContainerError")

#: Reasons of the pod condition DisruptionTarget.
DISRUPTIONS: dict[str, tuple[RunState, Cause]] = {
    "PreemptionByScheduler": (RunState.PREEMPTED, Cause.PREEMPTION),
    "PreemptionByKubeScheduler": (RunState.PREEMPTED, Cause.PREEMPTION),
    "EvictionByEvictionAPI": (RunState.PREEMPTED, Cause.PREEMPTION),
    "DeletionByTaintManager": (RunState.NODE_FAILED, Cause.NODE),
    "DeletionByPodGC": (RunState.NODE_FAILED, Cause.NODE),
    "TerminationByKubelet": (RunState.NODE_FAILED, Cause.NODE),
}
#: status.reason of a pod.
POD_REASONS: dict[str, tuple[RunState, Cause]] = {
    "Evicted": (RunState.PREEMPTED, Cause.PREEMPTION),
    "Preempting": (RunState.PREEMPTED, Cause.PREEMPTION),
    "DeadlineExceeded": (RunState.TIMED_OUT, Cause.WALLTIME),
    "NodeLost": (RunState.NODE_FAILED, Cause.NODE),
    "NodeShutdown": (RunState.NODE_FAILED, Cause.NODE),
    "Shutdown": (RunState.NODE_FAILED, Cause.NODE),
    "Terminated": (RunState.NODE_FAILED, Cause.NODE),
    "NodeAffinity": (RunState.NODE_FAILED, Cause.NODE),
    "UnexpectedAdmissionError": (RunState.NODE_FAILED, Cause.NODE),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt cannot succeed any more."""

    state: RunState
    cause: Cause
    detail: str
    exit_code: int | None = None

    def text(self) -> str:
        """For the annotation: the pods that showed it may be gone when the end is told."""
        return json.dumps([self.state.value, self.cause.value, self.detail[:500], self.exit_code])

    @classmethod
    def read(cls, text: str) -> Failure | None:
        try:
            state, cause, detail, code = json.loads(text)
            return cls(RunState(state), Cause(cause), str(detail), None if code is None else int(code))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Verdict:
    report: RunReport
    #: Set when the rest of the gang must be ended, and why.
    end: Failure | None = None


def judge(
    attempt: UUID, jobs: Sequence[Json], pods: Sequence[Json], down_nodes: frozenset[str], now: datetime, patience: int
) -> Verdict:
    """What the attempt's Jobs and pods amount to. ``jobs`` is not empty."""
    first = min(jobs, key=lambda job: str(job["metadata"]["name"]))
    notes = _annotations(first)
    workers = int(notes.get(WORKERS, "1"))
    complete = len(jobs) >= int(notes.get(PARTS, "1"))
    stopped = any(STOP in _annotations(job) for job in jobs)
    known = next((f for job in jobs if (f := Failure.read(_annotations(job).get(FAILURE, "")))), None)
    failure = known or _job_failure(jobs, pods) or _pod_failure(pods, down_nodes, now, patience, stopped)
    active = [pod for pod in pods if _active(pod, down_nodes)]
    running = [pod for pod in pods if _started(pod) is not None]
    starts = [at for pod in running if (at := _started(pod)) is not None]
    started = max(starts) if len(starts) >= workers else None
    name = str(first["metadata"]["namespace"]) + "/" + str(first["metadata"]["name"])

    def report(state: RunState, cause: Cause = Cause.NONE, detail: str = "", code: int | None = None) -> RunReport:
        ended = _ended(jobs, pods, now) if state.final else None
        begun = started or (min(starts) if starts and state.final else None)
        return RunReport(attempt, state, name, begun, ended, code, cause, detail)

    done = complete and all(_condition(job, "Complete") for job in jobs)
    if done and not active:
        return Verdict(report(RunState.SUCCEEDED, code=0))
    if failure is not None and not stopped:
        if active:
            return Verdict(report(RunState.STOPPING, detail=failure.detail), end=failure)
        return Verdict(report(failure.state, failure.cause, failure.detail, failure.exit_code), end=failure)
    if stopped:
        if active:
            return Verdict(report(RunState.STOPPING))
        return Verdict(report(RunState.CANCELLED, code=_exit_code(pods), detail=failure.detail if failure else ""))
    if started is not None:
        return Verdict(report(RunState.RUNNING))
    return Verdict(report(RunState.QUEUED, detail=_waiting(pods)))


def _job_failure(jobs: Sequence[Json], pods: Sequence[Json]) -> Failure | None:
    for job in jobs:
        condition = _condition(job, "Failed") or _condition(job, "FailureTarget")
        if condition and condition.get("reason") == "DeadlineExceeded":
            return Failure(RunState.TIMED_OUT, Cause.WALLTIME, str(condition.get("message") or ""), _exit_code(pods))
    return None


def _pod_failure(
    pods: Sequence[Json], down_nodes: frozenset[str], now: datetime, patience: int, stopped: bool
) -> Failure | None:
    found = [
        failure
        for pod in pods
        if (failure := _failure_of(pod, down_nodes, now, patience, stopped)) is not None
    ]  # fmt: skip
    # What the cluster did explains more than the exit code that follows from it.
    order = (RunState.NODE_FAILED, RunState.PREEMPTED, RunState.TIMED_OUT, RunState.FAILED)
    return min(found, key=lambda failure: order.index(failure.state), default=None)


def _failure_of(pod: Json, down_nodes: frozenset[str], now: datetime, patience: int, stopped: bool) -> Failure | None:
    status = pod.get("status") or {}
    node = (pod.get("spec") or {}).get("nodeName", "")
    if status.get("phase") == "Failed":
        return _failed_pod(pod)
    if node in down_nodes and status.get("phase") != "Succeeded" and pod["metadata"].get("deletionTimestamp"):
        return Failure(RunState.NODE_FAILED, Cause.NODE, f"node {node} was lost")
    if stopped or status.get("phase") != "Pending":
        return None
    impatient = now - _instant(pod["metadata"].get("creationTimestamp"), now) >= timedelta(seconds=patience)
    waiting = (_container(pod).get("state") or {}).get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason in HOPELESS or (reason in UNSTARTED and impatient):
        return Failure(RunState.FAILED, Cause.REJECTED, f"{reason}: {waiting.get('message', '')}".rstrip(": "))
    scheduled = _pod_condition(pod, "PodScheduled")
    if impatient and scheduled.get("status") == "False":
        detail = f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}"
        return Failure(RunState.NODE_FAILED, Cause.NODE, f"not placed within {patience} s; {detail}")
    return None


def _failed_pod(pod: Json) -> Failure:
    status = pod["status"]
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    terminated = (_container(pod).get("state") or {}).get("terminated") or {}
    code = terminated.get("exitCode")
    disruption = _pod_condition(pod, "DisruptionTarget")
    if disruption.get("status") == "True":
        state, cause = DISRUPTIONS.get(disruption.get("reason", ""), (RunState.PREEMPTED, Cause.PREEMPTION))
        if reason == "Evicted":
            state, cause = POD_REASONS[reason]
        return Failure(state, cause, f"{disruption.get('reason')}: {disruption.get('message', '')}", code)
    if reason.startswith("OutOf"):
        # The kubelet had not the resources that the scheduler believed in.
        return Failure(RunState.NODE_FAILED, Cause.NODE, f"{reason}: {message}", code)
    if reason in POD_REASONS:
        state, cause = POD_REASONS[reason]
        return Failure(state, cause, f"{reason}: {message}".rstrip(": "), code)
    if terminated.get("reason") == "OOMKilled":
        return Failure(RunState.FAILED, Cause.OUT_OF_MEMORY, "OOMKilled", code)
    if terminated.get("reason") in ("ContainerCannotRun", "StartError"):
        detail = f"{terminated['reason']}: {terminated.get('message', '')}"
        return Failure(RunState.FAILED, Cause.REJECTED, detail, code)
    detail = terminated.get("reason") or f"{reason}: {message}".strip(": ") or "the pod failed"
    return Failure(RunState.FAILED, Cause.USER, str(detail), code)


def _active(pod: Json, down_nodes: frozenset[str]) -> bool:
    """Whether it still holds its GPUs. On a lost node nobody can tell; there it counts as gone once it is deleted."""
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return False
    lost = (pod.get("spec") or {}).get("nodeName") in down_nodes
    return not (lost and pod["metadata"].get("deletionTimestamp"))


def _started(pod: Json) -> datetime | None:
    state = _container(pod).get("state") or {}
    at = (state.get("running") or state.get("terminated") or {}).get("startedAt")
    return _instant(at, None) if at else None


def _ended(jobs: Sequence[Json], pods: Sequence[Json], now: datetime) -> datetime:
    ends = [
        _instant(at, now)
        for pod in pods
        if (at := ((_container(pod).get("state") or {}).get("terminated") or {}).get("finishedAt"))
    ]
    if not ends:
        times = [(job.get("status") or {}).get("completionTime") for job in jobs]
        ends = [_instant(at, now) for at in times if at]
    return max(ends, default=now)


def _exit_code(pods: Sequence[Json]) -> int | None:
    codes = [
        code
        for pod in pods
        if (code := ((_container(pod).get("state") or {}).get("terminated") or {}).get("exitCode")) is not None
    ]
    return max(codes, default=None)


def _waiting(pods: Sequence[Json]) -> str:
    for pod in pods:
        waiting = (_container(pod).get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        scheduled = _pod_condition(pod, "PodScheduled")
        if scheduled.get("status") == "False":
            return f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}".strip(": ")
    return ""


def _annotations(item: Json) -> dict[str, str]:
    return (item.get("metadata") or {}).get("annotations") or {}


def _condition(job: Json, kind: str) -> Json | None:
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition.get("type") == kind and condition.get("status") == "True":
            return dict(condition)
    return None


def _pod_condition(pod: Json, kind: str) -> Json:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((dict(condition) for condition in conditions if condition.get("type") == kind), {})


def _container(pod: Json) -> Json:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return next((dict(status) for status in statuses if status.get("name") == CONTAINER), {})


def _instant(text: object, default: T) -> datetime | T:
    if not isinstance(text, str):
        return default
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)
