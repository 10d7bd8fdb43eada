"""The Kubernetes back end: the contract of ``backends.base`` over the API server.

``start`` creates Jobs named by the attempt's UUID, so a second start meets ``409 AlreadyExists`` and is done. ``stop``
suspends them: Kubernetes then deletes their pods with their grace period, while the Jobs stay and can tell what
happened; ``observe`` deletes a stopped Job once the ledger has closed its attempt. (Deleting at once would leave
nothing behind to tell a stopped attempt from a lost one.)

``observe`` lists everything now and then and watches for changes in between. The watch only says *which* attempts
changed; their state is then read afresh, so a missed or doubled event does no harm.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from scheduling.backends.base import (
    Description,
    LogChunk,
    NodeCondition,
    NodeReport,
    NotFound,
    Observation,
    Rejected,
    RunReport,
    StartCommand,
    Started,
    StopCommand,
    Unreachable,
)
from scheduling.backends.kubernetes import inventory, manifests
from scheduling.backends.kubernetes.api import Api, BadCredentials, Conflict, Gone, Json, labels_of
from scheduling.backends.kubernetes.config import KubernetesConfig
from scheduling.backends.kubernetes.cursor import Cursor
from scheduling.backends.kubernetes.manifests import ATTEMPT, CONTAINER, FAILURE, PORTAL, STOP
from scheduling.backends.kubernetes.reports import Failure, judge

logger = logging.getLogger(__name__)

#: Above so many changed attempts a full list is cheaper than reading each.
_MANY = 40
#: How long a watch waits for changes.
_WATCH_SECONDS = 1
KINDS = ("jobs", "pods", "nodes")


def _utc_now() -> datetime:
    return datetime.now(UTC)


class KubernetesBackend:
    """See ``backends.base.Backend``."""

    def __init__(self, config: KubernetesConfig, api: Api, *, now: Callable[[], datetime] = _utc_now) -> None:
        self._config = config
        self._api = api
        self._now = now
        self._selector = f"{PORTAL}={config.instance}"

    def describe(self) -> Description:
        try:
            version = self._api.version()
            nodes, _ = self._api.list_nodes(inventory.selector(self._config))
            foreign = self._foreign_gpus({node["metadata"]["name"] for node in nodes})
        except BadCredentials as error:
            raise Rejected(str(error)) from error
        except Gone as error:
            raise Unreachable(str(error)) from error
        infos, warnings = inventory.gpu_nodes(self._config, nodes)
        names = {info.name for info in infos}
        levels = inventory.levels_of(self._config, [node for node in nodes if node["metadata"]["name"] in names])
        labels = {node["metadata"]["name"]: labels_of(node) for node in nodes}
        placed = tuple(
            replace(info, domains={lv: labels[info.name][label] for lv, label in levels if label in labels[info.name]})
            for info in infos
        )
        if not placed:
            warnings.append(f"no usable GPU node ({len(nodes)} nodes in all)")
        if foreign:
            warnings.append(
                f"{foreign} GPUs are held by pods that are not the portal's; it cannot see them as taken, and its own "
                "may wait for them"
            )
        return Description(f"Kubernetes {version}", tuple(level for level, _ in levels), placed, tuple(warnings))

    def start(self, command: StartCommand) -> Started:
        jobs = manifests.jobs_of(self._config, command)
        namespace = self._config.namespace(command.team)
        with _passing():
            first = self._create_job(namespace, jobs[0], command)
            if len(command.slots) > 1:
                self._create_service(namespace, manifests.service_of(self._config, command, first))
            for job in jobs[1:]:
                job["metadata"]["ownerReferences"] = [manifests.owner_reference(first)]
                self._create_job(namespace, job, command)
        return Started(f"{namespace}/{manifests.job_name(command.attempt, 0)}")

    def stop(self, command: StopCommand) -> None:
        with _passing():
            jobs, pods = self._of_attempt(command.attempt, command.backend_id)
            if not jobs:
                raise NotFound(f"the cluster knows no job of attempt {command.attempt}")
            stop_by = self._now() + command.grace
            for job in jobs:
                if not _finished(job):
                    self._suspend(job, {STOP: stop_by.isoformat(timespec="seconds")})
            grace = max(1, round(command.grace.total_seconds()))
            for pod in pods:
                self._shorten(pod, grace)

    def observe(self, since: str, attempts: Sequence[UUID]) -> Observation:
        with _passing():
            cursor = Cursor.read(since)
            now = self._now()
            if cursor is not None and now - cursor.listed < timedelta(seconds=self._config.full_list_every):
                try:
                    return self._changes(cursor, set(attempts), now)
                except Gone:
                    logger.info("the resource version is too old to watch from: listing everything")
            return self._everything(set(attempts), now)

    def logs(self, attempt: UUID, *, offset: int = 0, limit: int = 1 << 20, backend_id: str = "") -> LogChunk:
        """Output of the first worker. Kubernetes has no offsets: all before ``offset`` is read and dropped."""
        if offset < 0 or limit < 1:
            raise ValueError(f"offset {offset} must be at least 0 and limit {limit} at least 1")
        with _passing():
            _, pods = self._of_attempt(attempt, backend_id)
            pod = min(pods, key=_worker, default=None)
            if pod is None:
                raise NotFound(f"there is no pod of attempt {attempt} (yet, or any more)")
            ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            try:
                data = self._api.pod_log(
                    pod["metadata"]["namespace"], pod["metadata"]["name"], CONTAINER, offset + limit
                )[offset:]
            except Rejected as error:  # 400: the container is waiting to start
                raise NotFound(str(error)) from error
        return LogChunk(offset, data, offset + len(data), finished=ended and len(data) < limit)

    # starting

    def _create_job(self, namespace: str, job: Json, command: StartCommand) -> Json:
        try:
            return self._api.create_job(namespace, job)
        except Conflict:
            return self._existing(namespace, job, command)
        except NotFound as error:
            if not self._config.create_namespaces:
                raise Rejected(
                    f"the namespace {namespace} does not exist; create it, or let the portal do so (create_namespaces)"
                ) from error
        self._create_namespace(namespace)
        try:
            return self._api.create_job(namespace, job)
        except Conflict:
            return self._existing(namespace, job, command)

    def _existing(self, namespace: str, job: Json, command: StartCommand) -> Json:
        """The Job of an earlier start. Raises ``Rejected`` when the name is somebody else's."""
        try:
            found = self._api.get_job(namespace, job["metadata"]["name"])
        except NotFound as error:
            raise Unreachable(f"{error}; it was there a moment ago") from error
        if (
            labels_of(found).get(ATTEMPT) != str(command.attempt)
            or labels_of(found).get(PORTAL) != self._config.instance
        ):
            raise Rejected(f"there is a Job {namespace}/{job['metadata']['name']} that is not this portal's")
        return found

    def _create_service(self, namespace: str, service: Json) -> None:
        try:
            self._api.create_service(namespace, service)
        except Conflict:
            logger.debug("service %s/%s is there already", namespace, service["metadata"]["name"])

    def _create_namespace(self, namespace: str) -> None:
        labels = {PORTAL: self._config.instance}
        try:
            self._api.create_namespace(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
            )
        except Conflict:
            logger.debug("namespace %s is there already", namespace)

    # ending

    def _suspend(self, job: Json, notes: dict[str, str]) -> None:
        meta = job["metadata"]
        # The first instant stands: a stop sent twice changes nothing.
        missing = {key: value for key, value in notes.items() if key not in (meta.get("annotations") or {})}
        if not missing and (job.get("spec") or {}).get("suspend"):
            return
        body: Json = {"metadata": {"annotations": missing}, "spec": {"suspend": True}}
        try:
            self._api.patch_job(meta["namespace"], meta["name"], body)
        except NotFound:
            logger.info("job %s was gone before it could be stopped", meta["name"])

    def _shorten(self, pod: Json, grace: int) -> None:
        """A grace period that differs from the pod's own takes effect by deleting the pod with it."""
        meta = pod["metadata"]
        own = (pod.get("spec") or {}).get("terminationGracePeriodSeconds", 30)
        current = meta.get("deletionGracePeriodSeconds", own) if meta.get("deletionTimestamp") else own
        if grace >= current or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return
        try:
            self._api.delete_pod(meta["namespace"], meta["name"], grace)
        except NotFound:
            logger.debug("pod %s is gone", meta["name"])

    # observing

    def _everything(self, wanted: set[UUID], now: datetime) -> Observation:
        try:
            nodes, nodes_version = self._api.list_nodes(inventory.selector(self._config))
            jobs, jobs_version = self._api.list_jobs(self._selector)
            pods, pods_version = self._api.list_pods(self._selector)
        except Gone as error:  # a long list that changed under our hands
            raise Unreachable(str(error)) from error
        jobs_by, pods_by = _by_attempt(jobs), _by_attempt(pods)
        down = self._down(nodes)
        runs = []
        for attempt, found in jobs_by.items():
            report = self._settle(attempt, found, pods_by.get(attempt, []), down, now)
            if attempt in wanted or not report.state.final:
                runs.append(report)
            if attempt not in wanted and report.state.final:
                self._clean_up(found)
        cursor = Cursor(now, jobs_version, pods_version, nodes_version)
        return Observation(now, tuple(runs), self._node_reports(nodes), cursor.text(), complete=True)

    def _changes(self, cursor: Cursor, wanted: set[UUID], now: datetime) -> Observation:
        with ThreadPoolExecutor(len(KINDS)) as pool:
            jobs, pods, nodes = pool.map(lambda kind: self._watched(kind, cursor), KINDS)
        changed = {attempt for found in (jobs[0], pods[0]) for attempt in _by_attempt(found)}
        listed_nodes: list[Json] = []
        if nodes[0] or changed:
            listed_nodes, _ = self._api.list_nodes(inventory.selector(self._config))
        if len(changed) > _MANY:
            raise Gone("many changes")
        down = self._down(listed_nodes)
        runs = []
        for attempt in changed:
            found, of_it = self._of_attempt(attempt, "")
            if found:
                report = self._settle(attempt, found, of_it, down, now)
                if attempt in wanted or not report.state.final:
                    runs.append(report)
        following = Cursor(cursor.listed, jobs[1], pods[1], nodes[1])
        reports = self._node_reports(listed_nodes)
        return Observation(now, tuple(runs), reports, following.text(), complete=False)

    def _watched(self, kind: str, cursor: Cursor) -> tuple[list[Json], str]:
        """Objects changed since the cursor, and the version to go on from."""
        selector = inventory.selector(self._config) if kind == "nodes" else self._selector
        version = cursor.version(kind)
        found = []
        for event, content in self._api.watch(kind, selector, version, _WATCH_SECONDS):
            version = str((content.get("metadata") or {}).get("resourceVersion") or version)
            if event != "BOOKMARK":
                found.append(content)
        return found, version

    def _settle(
        self, attempt: UUID, jobs: list[Json], pods: list[Json], down: frozenset[str], now: datetime
    ) -> RunReport:
        """Report on an attempt; when part of a gang has failed, the rest is ended."""
        verdict = judge(attempt, jobs, pods, down, now, self._config.patience)
        if verdict.end is not None:
            for job in jobs:
                self._end(job, verdict.end)
        return verdict.report

    def _end(self, job: Json, failure: Failure) -> None:
        notes = (job["metadata"].get("annotations")) or {}
        if FAILURE not in notes and not _finished(job):
            self._suspend(job, {FAILURE: failure.text()})

    def _clean_up(self, jobs: list[Json]) -> None:
        """Finished Jobs go by themselves (ttlSecondsAfterFinished); suspended ones never finish."""
        for job in jobs:
            if (job.get("spec") or {}).get("suspend") and not job["metadata"].get("deletionTimestamp"):
                try:
                    self._api.delete_job(job["metadata"]["namespace"], job["metadata"]["name"])
                except NotFound:
                    continue

    def _of_attempt(self, attempt: UUID, backend_id: str) -> tuple[list[Json], list[Json]]:
        selector = f"{self._selector},{ATTEMPT}={attempt}"
        namespace, slash, _ = backend_id.partition("/")
        place = namespace if slash else ""
        jobs, _ = self._api.list_jobs(selector, place)
        pods, _ = self._api.list_pods(selector, place)
        return jobs, pods

    def _down(self, nodes: Sequence[Json]) -> frozenset[str]:
        return frozenset(
            node["metadata"]["name"]
            for node in nodes
            if inventory.condition_of(self._config, node)[0] is NodeCondition.DOWN
        )

    def _node_reports(self, nodes: Sequence[Json]) -> tuple[NodeReport, ...]:
        found = []
        for node in nodes:
            if inventory.is_gpu_node(node):
                condition, reason = inventory.condition_of(self._config, node)
                found.append(NodeReport(node["metadata"]["name"], condition, reason))
        return tuple(found)

    def _foreign_gpus(self, nodes: set[str]) -> int:
        count = 0
        for pod in self._api.list_pods_on_gpu_nodes():
            if labels_of(pod).get(PORTAL) == self._config.instance or pod["spec"].get("nodeName") not in nodes:
                continue
            for container in pod["spec"].get("containers") or []:
                limits = (container.get("resources") or {}).get("limits") or {}
                count += sum(
                    int(n) for name, n in limits.items() if name.startswith(("nvidia.com/gpu", "nvidia.com/mig-"))
                )
        return count


class _passing:
    """What is no contract of ``observe``, ``start`` and ``stop`` becomes ``Unreachable``: jobs keep their state."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (BadCredentials, Gone, Conflict)):
            raise Unreachable(str(error)) from error


def _by_attempt(items: Sequence[Json]) -> dict[UUID, list[Json]]:
    found: dict[UUID, list[Json]] = defaultdict(list)
    for item in items:
        try:
            found[UUID(labels_of(item)[ATTEMPT])].append(item)
        except (KeyError, ValueError):
            continue
    return found


def _worker(pod: Json) -> tuple[str, int]:
    """Order of the workers: by Job, then by index; the latest pod of an index is as good as any."""
    job = labels_of(pod).get("batch.kubernetes.io/job-name") or labels_of(pod).get("job-name") or ""
    notes = pod["metadata"].get("annotations") or {}
    return job, int(notes.get("batch.kubernetes.io/job-completion-index") or 0)


def _finished(job: Json) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(c.get("type") in ("Complete", "Failed") and c.get("status") == "True" for c in conditions)
