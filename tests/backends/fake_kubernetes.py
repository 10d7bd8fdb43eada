"""An API server that speaks the real protocol over HTTP: paths, verbs, resource versions, paged lists, label selectors,
conflicts, watches with bookmarks, ``410 Gone`` after compaction, merge patches, deletion with grace, logs, and the
little of the Job controller that the back end relies on (pods for a Job, none while it is suspended, owners taking
their own with them). Tests play the kubelet: ``run``, ``finish``, ``fail`` …
"""

from __future__ import annotations

import copy
import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
TOKEN = "let-me-in"
GROUPS = {"nodes": "api/v1", "namespaces": "api/v1", "pods": "api/v1", "services": "api/v1", "jobs": "apis/batch/v1"}
KINDS = {"nodes": "Node", "namespaces": "Namespace", "pods": "Pod", "services": "Service", "jobs": "Job"}


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "code": code,
        }
        self.code = code
        super().__init__(message)


@dataclass
class Store:
    """What etcd holds."""

    version: int = 100
    #: Versions up to this one are compacted: no watch from there.
    compacted: int = 0
    objects: dict[str, dict[tuple[str, str], Json]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    events: list[tuple[int, str, str, Json]] = field(default_factory=list)
    logs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    def put(self, kind: str, item: Json, event: str) -> Json:
        with self.changed:
            self.version += 1
            item = copy.deepcopy(item)
            meta = item["metadata"]
            meta["resourceVersion"] = str(self.version)
            key = (meta.get("namespace", ""), meta["name"])
            if event == "DELETED":
                self.objects[kind].pop(key, None)
            else:
                self.objects[kind][key] = item
            self.events.append((self.version, event, kind, item))
            self.changed.notify_all()
            return item


class FakeKubernetes:
    def __init__(self) -> None:
        self.store = Store()
        self.requests: list[tuple[str, str]] = []
        #: Called before each request; may raise ``ApiError`` or ``Hang``.
        self.fault: Callable[[str, str], None] | None = None
        #: Ends every watch after so many events, as a broken connection does.
        self.break_watch_after: int | None = None
        fake = self

        class Handler(_Handler):
            cluster = fake

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    # what tests do

    def add_node(self, name: str, gpus: int = 8, product: str = "NVIDIA-H100-80GB-HBM3", **labels: str) -> None:
        all_labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": "81559"} if product else {}
        all_labels |= {name.replace("__", "/").replace("_", "."): value for name, value in labels.items()}
        capacity = {"cpu": "64", "memory": "512Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        self.store.put(
            "nodes",
            {
                "metadata": {"name": name, "labels": all_labels, "uid": str(uuid.uuid4())},
                "spec": {},
                "status": {
                    "capacity": capacity,
                    "allocatable": capacity,
                    "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
                },
            },
            "ADDED",
        )

    def add_namespace(self, name: str) -> None:
        self.store.put("namespaces", {"metadata": {"name": name}}, "ADDED")

    def change(self, kind: str, name: str, namespace: str, change: Callable[[Json], None]) -> None:
        with self.store.changed:
            item = copy.deepcopy(self.store.objects[kind][(namespace, name)])
            change(item)
            self.store.put(kind, item, "MODIFIED")

    def all(self, kind: str) -> list[Json]:
        with self.store.changed:
            return [copy.deepcopy(item) for item in self.store.objects[kind].values()]

    def pods_of(self, attempt: uuid.UUID) -> list[Json]:
        found = [
            pod for pod in self.all("pods") if pod["metadata"]["labels"].get("gpuportal.io/attempt") == str(attempt)
        ]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def run(self, pod: Json, output: bytes = b"") -> None:
        """The kubelet has started it on the node that its affinity names."""
        node = _pinned(pod)

        def change(item: Json) -> None:
            item["spec"]["nodeName"] = node
            item["status"] = {"phase": "Running", "containerStatuses": [_status({"running": {"startedAt": now()}})]}

        self._pod(pod, change)
        self.store.logs[(pod["metadata"]["namespace"], pod["metadata"]["name"])] = output

    def disrupt(self, pod: Json, reason: str, code: int) -> None:
        """It is ended by the cluster, for a reason that stands in the condition DisruptionTarget."""
        self.finish(pod, code, disruption=reason)

    def finish(
        self,
        pod: Json,
        code: int = 0,
        reason: str = "",
        status_reason: str = "",
        message: str = "",
        disruption: str = "",
    ) -> None:
        """Its container has ended."""

        def change(item: Json) -> None:
            state = _container_state(item)
            started = (state.get("running") or state.get("terminated") or {}).get("startedAt") or now()
            terminated = {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}
            item["status"]["phase"] = "Succeeded" if code == 0 and not status_reason and not disruption else "Failed"
            item["status"]["containerStatuses"] = [
                _status({"terminated": terminated | {"startedAt": started, "finishedAt": now()}})
            ]
            if status_reason:
                item["status"] |= {"reason": status_reason, "message": message}
            if disruption:
                item["status"]["conditions"] = [
                    {"type": "DisruptionTarget", "status": "True", "reason": disruption, "message": "by the cluster"}
                ]

        self._pod(pod, change)
        self._count(pod)
        if pod["metadata"].get("deletionTimestamp"):
            self._remove("pods", pod)

    def wait_state(self, pod: Json, reason: str, message: str = "", age: int = 0) -> None:
        """Its container waits, since ``age`` seconds."""
        created = datetime.fromtimestamp(time.time() - age, UTC)

        def change(item: Json) -> None:
            item["metadata"]["creationTimestamp"] = created.isoformat()
            item["status"] = {
                "phase": "Pending",
                "containerStatuses": [_status({"waiting": {"reason": reason, "message": message}})],
            }

        self._pod(pod, change)

    def unschedulable(self, pod: Json, message: str, age: int = 0) -> None:
        created = datetime.fromtimestamp(time.time() - age, UTC)

        def change(item: Json) -> None:
            item["metadata"]["creationTimestamp"] = created.isoformat()
            item["status"] = {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                ],
            }

        self._pod(pod, change)

    def remove_terminating(self) -> None:
        """The grace periods are over: what was being deleted is gone."""
        for pod in self.all("pods"):
            if pod["metadata"].get("deletionTimestamp"):
                self._remove("pods", pod)
        for job in self.all("jobs"):
            if job["metadata"].get("deletionTimestamp"):
                self._remove("jobs", job)

    def deadline(self, job: Json) -> None:
        """The Job controller has found activeDeadlineSeconds passed."""
        condition = {
            "type": "Failed", "status": "True", "reason": "DeadlineExceeded",
            "message": "Job was active longer than specified deadline",
        }  # fmt: skip

        def change(item: Json) -> None:
            item["status"]["conditions"] = [condition]

        self.change("jobs", job["metadata"]["name"], job["metadata"]["namespace"], change)
        for pod in self._owned("pods", job):
            self._delete("pods", pod, None)

    def compact(self) -> None:
        with self.store.changed:
            self.store.compacted = self.store.version

    # the controllers

    def created(self, job: Json) -> None:
        if not job["spec"].get("suspend"):
            for index in range(job["spec"]["completions"]):
                meta = job["metadata"]
                template = copy.deepcopy(job["spec"]["template"])
                pod = {
                    "metadata": {
                        "name": f"{meta['name']}-{index}-{uuid.uuid4().hex[:5]}",
                        "namespace": meta["namespace"],
                        "uid": str(uuid.uuid4()),
                        "creationTimestamp": now(),
                        "labels": template["metadata"]["labels"] | {"batch.kubernetes.io/job-name": meta["name"]},
                        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                        "ownerReferences": [{"kind": "Job", "name": meta["name"], "uid": meta["uid"]}],
                    },
                    "spec": template["spec"],
                    "status": {"phase": "Pending"},
                }
                self.store.put("pods", pod, "ADDED")

    def patched(self, job: Json) -> None:
        if job["spec"].get("suspend"):
            for pod in self._owned("pods", job):
                if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                    self._delete("pods", pod, None)

    def _count(self, pod: Json) -> None:
        owner = pod["metadata"]["ownerReferences"][0]["name"]
        namespace = pod["metadata"]["namespace"]
        job = self.store.objects["jobs"].get((namespace, owner))
        if job is None or job["spec"].get("suspend"):
            return
        phases = [p["status"].get("phase") for p in self._owned("pods", job)]
        condition: Json | None = None
        if "Failed" in phases:
            condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
        elif phases.count("Succeeded") == job["spec"]["completions"]:
            condition = {"type": "Complete", "status": "True"}
        if condition is not None:
            final = condition

            def change(item: Json) -> None:
                item["status"]["conditions"] = [final]
                if final["type"] == "Complete":
                    item["status"]["completionTime"] = now()

            self.change("jobs", owner, namespace, change)
            if final["type"] == "Failed":
                for other in self._owned("pods", job):
                    if other["status"].get("phase") not in ("Succeeded", "Failed"):
                        self._delete("pods", other, None)

    def _owned(self, kind: str, job: Json) -> list[Json]:
        uid = job["metadata"]["uid"]
        return [
            item for item in self.all(kind)
            if any(o.get("uid") == uid for o in item["metadata"].get("ownerReferences", []))
        ]  # fmt: skip

    def _pod(self, pod: Json, change: Callable[[Json], None]) -> None:
        self.change("pods", pod["metadata"]["name"], pod["metadata"]["namespace"], change)

    def _delete(self, kind: str, item: Json, grace: int | None) -> None:
        key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
        with self.store.changed:
            current = self.store.objects[kind].get(key)
            if current is None:
                return
            current = copy.deepcopy(current)
            if kind == "pods":
                own = current["spec"].get("terminationGracePeriodSeconds", 30)
                wanted = own if grace is None else grace
                before = current["metadata"].get("deletionGracePeriodSeconds")
                # Once it is being deleted the grace period can only be shortened.
                current["metadata"]["deletionGracePeriodSeconds"] = wanted if before is None else min(before, wanted)
                current["metadata"].setdefault("deletionTimestamp", now())
                if not current["spec"].get("nodeName"):
                    self.store.put(kind, current, "DELETED")
                    return
            else:
                current["metadata"]["deletionTimestamp"] = now()
            self.store.put(kind, current, "MODIFIED")
        if kind == "jobs":
            pods = self._owned("pods", item)
            for pod in pods:
                self._delete("pods", pod, None)
            for other in ("jobs", "services"):
                for owned in self._owned(other, item):
                    self._delete(other, owned, None)
            if not self._owned("pods", item):
                self._remove("jobs", item)
        if kind == "services":
            self._remove(kind, item)

    def _remove(self, kind: str, item: Json) -> None:
        with self.store.changed:
            key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
            if key in self.store.objects[kind]:
                self.store.put(kind, self.store.objects[kind][key], "DELETED")


class _Handler(BaseHTTPRequestHandler):
    cluster: FakeKubernetes
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.cluster.requests.append((self.command, self.path))
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise ApiError(401, "Unauthorized", "Unauthorized")
            if self.cluster.fault is not None:
                self.cluster.fault(self.command, self.path)
            if query.get("watch") == "true":
                self._watch(url.path, query)
                return
            answer = self._answer(url.path.strip("/").split("/"), query, body)
        except ApiError as error:
            self._send(error.code, error.body)
            return
        self._send(201 if self.command == "POST" else 200, answer)

    do_GET = do_POST = do_PATCH = do_DELETE = handle_any

    def log_message(self, *args: object) -> None:
        pass

    def _send(self, code: int, content: Json | bytes) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(content, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, parts: list[str], query: dict[str, str], body: Json | None) -> Json | bytes:
        if parts == ["version"]:
            return {"major": "1", "minor": "31", "gitVersion": "v1.31.2"}
        kind, namespace, name, rest = _route(parts)
        store = self.cluster.store
        if self.command == "GET" and rest == ["log"]:
            return self._log(namespace, name, query)
        if self.command == "GET" and not name:
            return self._list(kind, namespace, query)
        if self.command == "POST":
            assert body is not None
            return self._create(kind, namespace, body)
        with store.changed:
            item = store.objects[kind].get((namespace, name))
            if item is None:
                raise ApiError(404, "NotFound", f'{kind} "{name}" not found')
            if self.command == "GET":
                return item
            if self.command == "PATCH":
                assert body is not None
                item = store.put(kind, _merge(copy.deepcopy(item), body), "MODIFIED")
        if self.command == "PATCH":
            if kind == "jobs":
                self.cluster.patched(item)
            return item
        options = {**query, **(body or {})}
        if kind == "jobs" and options.get("propagationPolicy") != "Foreground":
            raise ApiError(400, "BadRequest", "the tests want propagationPolicy Foreground")
        grace = options.get("gracePeriodSeconds")
        self.cluster._delete(kind, item, None if grace is None else int(grace))
        return item

    def _create(self, kind: str, namespace: str, body: Json) -> Json:
        store = self.cluster.store
        with store.changed:
            name = body["metadata"]["name"]
            if namespace and ("", namespace) not in store.objects["namespaces"]:
                raise ApiError(404, "NotFound", f'namespaces "{namespace}" not found')
            if (namespace, name) in store.objects[kind]:
                raise ApiError(409, "AlreadyExists", f'{kind} "{name}" already exists')
            if len(name) > 63 or not name.replace("-", "").isalnum() or name != name.lower():
                raise ApiError(422, "Invalid", f'metadata.name: Invalid value: "{name}"')
            item = copy.deepcopy(body)
            item["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            if namespace:
                item["metadata"]["namespace"] = namespace
            item.setdefault("status", {})
            item = store.put(kind, item, "ADDED")
        if kind == "jobs":
            self.cluster.created(item)
        return item

    def _list(self, kind: str, namespace: str, query: dict[str, str]) -> Json:
        store = self.cluster.store
        with store.changed:
            chosen = [
                item for (place, _), item in sorted(store.objects[kind].items())
                if (not namespace or place == namespace) and _selected(item, query)
            ]  # fmt: skip
            start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
            page = chosen[start : start + limit] if limit else chosen
            meta: Json = {"resourceVersion": str(store.version)}
            if limit and start + limit < len(chosen):
                meta["continue"] = str(start + limit)
            return {"kind": f"{KINDS[kind]}List", "apiVersion": "v1", "metadata": meta, "items": copy.deepcopy(page)}

    def _log(self, namespace: str, name: str, query: dict[str, str]) -> bytes:
        store = self.cluster.store
        pod = store.objects["pods"].get((namespace, name))
        if pod is None:
            raise ApiError(404, "NotFound", f'pods "{name}" not found')
        if pod["status"].get("phase") == "Pending":
            raise ApiError(
                400, "BadRequest", f'container "worker" in pod "{name}" is waiting to start: ContainerCreating'
            )
        limit = int(query.get("limitBytes") or 1 << 30)
        return store.logs.get((namespace, name), b"")[:limit]

    def _watch(self, path: str, query: dict[str, str]) -> None:
        kind, namespace, _, _ = _route(path.strip("/").split("/"))
        store = self.cluster.store
        since = int(query["resourceVersion"])
        end = time.monotonic() + int(query.get("timeoutSeconds") or 60)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if since < store.compacted:
            self._event("ERROR", ApiError(410, "Expired", f"too old resource version: {since}").body)
            self._end()
            return
        sent = 0
        while time.monotonic() < end:
            with store.changed:
                fresh = [event for event in store.events if event[0] > since]
                if not fresh:
                    store.changed.wait(0.05)
                    continue
            for version, event, of, item in fresh:
                since = version
                if (
                    of == kind
                    and (not namespace or item["metadata"].get("namespace") == namespace)
                    and _selected(item, query)
                ):
                    self._event(event, item)
                    sent += 1
                    if self.cluster.break_watch_after is not None and sent >= self.cluster.break_watch_after:
                        self.close_connection = True
                        self.connection.close()
                        return
        if query.get("allowWatchBookmarks") == "true":
            self._event("BOOKMARK", {"kind": KINDS[kind], "metadata": {"resourceVersion": str(since)}})
        self._end()

    def _event(self, event: str, item: Json) -> None:
        data = json.dumps({"type": event, "object": item}).encode() + b"\n"
        # In two chunks: a line need not come in one piece.
        for piece in (data[:20], data[20:]):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.flush()

    def _end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()


def _route(parts: list[str]) -> tuple[str, str, str, list[str]]:
    """Kind, namespace, name and what follows. Raises 404 for a path that Kubernetes does not have."""
    length = 2 if parts[0] == "api" else 3
    group, rest = "/".join(parts[:length]), parts[length:]
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) >= 3:
        namespace, rest = rest[1], rest[2:]
    kind = rest[0] if rest else ""
    if GROUPS.get(kind) != group:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return kind, namespace, rest[1] if len(rest) > 1 else "", rest[2:]


def _selected(item: Json, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for part in filter(None, (query.get("labelSelector") or "").split(",")):
        key, _, value = part.partition("=")
        if labels.get(key) != value:
            return False
    for part in filter(None, (query.get("fieldSelector") or "").split(",")):
        key, _, value = part.partition("!=")
        assert key == "status.phase"
        if (item.get("status") or {}).get("phase") == value:
            return False
    return True


def _merge(item: Json, patch: Json) -> Json:
    for key, value in patch.items():
        if value is None:
            item.pop(key, None)
        elif isinstance(value, dict) and isinstance(item.get(key), dict):
            _merge(item[key], value)
        else:
            item[key] = value
    return item


def _status(state: Json) -> Json:
    return {"name": "worker", "state": state}


def _container_state(pod: Json) -> Json:
    statuses = pod["status"].get("containerStatuses") or [{}]
    return dict(statuses[0].get("state") or {})


def _pinned(pod: Json) -> str:
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return str(affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
