"""The Kubernetes API through the official client: plain JSON in and out, errors of our own kinds."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import urllib3
from kubernetes import client
from kubernetes import config as kubernetes_config
from kubernetes.client.exceptions import ApiException

from scheduling.backends.base import BackendError, NotFound, Rejected, Unreachable
from scheduling.backends.fields import ConfigError
from scheduling.backends.kubernetes.config import KubernetesConfig

#: Objects in one answer; longer lists come in pieces.
PAGE = 500
Json = dict[str, Any]


class Gone(BackendError):
    """410: the resource version is too old to watch from. List again."""


class Conflict(BackendError):
    """409: it is there already, or has changed meanwhile."""


class BadCredentials(BackendError):
    """401."""


class Api:
    """The few calls the back end makes; every one raises ``Unreachable`` or ``BadCredentials`` as well."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        api = client.ApiClient(_configuration(config))
        self._core = client.CoreV1Api(api)
        self._batch = client.BatchV1Api(api)
        self._version = client.VersionApi(api)

    def version(self) -> str:
        return str(self._read(self._version.get_code)["gitVersion"])

    def list_nodes(self, selector: str) -> tuple[list[Json], str]:
        return self._list(self._core.list_node, selector)

    def list_jobs(self, selector: str, namespace: str = "") -> tuple[list[Json], str]:
        """Jobs and the resource version of the list. Raises ``Gone`` when the list changed too much on the way."""
        if namespace:
            return self._list(self._batch.list_namespaced_job, selector, namespace=namespace)
        return self._list(self._batch.list_job_for_all_namespaces, selector)

    def list_pods(self, selector: str, namespace: str = "") -> tuple[list[Json], str]:
        if namespace:
            return self._list(self._core.list_namespaced_pod, selector, namespace=namespace)
        return self._list(self._core.list_pod_for_all_namespaces, selector)

    def list_pods_on_gpu_nodes(self) -> list[Json]:
        """All pods that have not ended, of everybody."""
        phases = "status.phase!=Succeeded,status.phase!=Failed"
        return self._list(self._core.list_pod_for_all_namespaces, "", field_selector=phases)[0]

    def watch(self, kind: str, selector: str, version: str, seconds: int) -> Iterator[tuple[str, Json]]:
        """Changes (type, object) since ``version``, for ``seconds`` at the longest. Raises ``Gone``."""
        calls: dict[str, Callable[..., Any]] = {
            "nodes": self._core.list_node,
            "jobs": self._batch.list_job_for_all_namespaces,
            "pods": self._core.list_pod_for_all_namespaces,
        }
        response = self._call(
            calls[kind], label_selector=selector, resource_version=version, watch=True, timeout_seconds=seconds,
            allow_watch_bookmarks=True,
        )  # fmt: skip
        try:
            yield from _events(response)
        finally:
            response.release_conn()

    def get_job(self, namespace: str, name: str) -> Json:
        return self._read(self._batch.read_namespaced_job, name=name, namespace=namespace)

    def create_job(self, namespace: str, body: Json) -> Json:
        return self._read(self._batch.create_namespaced_job, namespace=namespace, body=body)

    def patch_job(self, namespace: str, name: str, body: Json) -> Json:
        return self._read(self._batch.patch_namespaced_job, name=name, namespace=namespace, body=body)

    def delete_job(self, namespace: str, name: str) -> None:
        self._read(self._batch.delete_namespaced_job, name=name, namespace=namespace, propagation_policy="Foreground")

    def delete_pod(self, namespace: str, name: str, grace_seconds: int) -> None:
        self._read(self._core.delete_namespaced_pod, name=name, namespace=namespace, grace_period_seconds=grace_seconds)

    def create_service(self, namespace: str, body: Json) -> Json:
        return self._read(self._core.create_namespaced_service, namespace=namespace, body=body)

    def create_namespace(self, body: Json) -> Json:
        return self._read(self._core.create_namespace, body=body)

    def pod_log(self, namespace: str, name: str, container: str, limit: int) -> bytes:
        response = self._call(
            self._core.read_namespaced_pod_log, name=name, namespace=namespace, container=container, limit_bytes=limit
        )
        try:
            return bytes(response.data)
        finally:
            response.release_conn()

    # plumbing

    def _list(self, call: Callable[..., Any], selector: str, **given: Any) -> tuple[list[Json], str]:
        items: list[Json] = []
        following = ""
        while True:
            more = {"_continue": following} if following else {}
            content = self._read(call, label_selector=selector, limit=PAGE, **more, **given)
            items += content.get("items") or []
            meta = content.get("metadata") or {}
            following = meta.get("continue") or ""
            if not following:
                return items, str(meta.get("resourceVersion") or "")

    def _read(self, call: Callable[..., Any], **given: Any) -> Json:
        response = self._call(call, **given)
        try:
            content = json.loads(response.data)
        except ValueError as error:
            raise Unreachable("the API server answered with something that is no JSON") from error
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"the API server's answer broke off: {error}") from error
        finally:
            response.release_conn()
        if not isinstance(content, dict):
            raise Unreachable("the API server answered with something that is no object")
        return content

    def _call(self, call: Callable[..., Any], **given: Any) -> Any:
        watch = given.get("timeout_seconds", 0)
        timeout = (min(self._config.timeout, 10), self._config.timeout + watch)
        try:
            return call(**given, _preload_content=False, _request_timeout=timeout)
        except ApiException as error:
            raise _translated(error) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"the API server cannot be reached: {error}") from error


def _events(response: Any) -> Iterator[tuple[str, Json]]:
    """One JSON object a line. A connection that breaks off ends the watch: the next one resumes where this ended."""
    rest = b""
    try:
        for chunk in response.stream(amt=None, decode_content=False):
            rest += chunk
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if line.strip():
                    yield _event(line)
    except (urllib3.exceptions.HTTPError, OSError):
        return


def _event(line: bytes) -> tuple[str, Json]:
    try:
        event = json.loads(line)
        kind, content = str(event["type"]), event["object"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable("the API server sent an event that cannot be read") from error
    if kind == "ERROR":
        if content.get("code") == 410:
            raise Gone(str(content.get("message")))
        raise Unreachable(f"the watch ended with an error: {content.get('message')}")
    return kind, content


def _translated(error: ApiException) -> BackendError:
    status = error.status or 0
    try:
        said = str(json.loads(error.body or "{}").get("message") or error.reason)
    except (ValueError, AttributeError):
        said = str(error.reason)
    match status:
        case 401:
            return BadCredentials(f"the API server does not accept the portal's credentials: {said}")
        case 404:
            return NotFound(said)
        case 409:
            return Conflict(said)
        case 410:
            return Gone(said)
        case 400 | 403 | 405 | 413 | 415 | 422:
            return Rejected(said)
        case _:
            return Unreachable(f"the API server answered {status}: {said}")


def _configuration(config: KubernetesConfig) -> client.Configuration:
    found = client.Configuration()
    try:
        if config.access == "in-cluster":
            kubernetes_config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
        elif config.access == "kubeconfig":
            kubernetes_config.load_kube_config_from_dict(  # type: ignore[no-untyped-call]
                dict(config.kubeconfig or {}), context=config.context or None, client_configuration=found,
                persist_config=False,
            )  # fmt: skip
        else:
            found.host = config.server.rstrip("/")
            found.api_key = {"authorization": f"Bearer {config.token}"}
            if config.ca_certificate:
                found.ssl_ca_cert = _certificate_file(config.ca_certificate)
    except kubernetes_config.ConfigException as error:
        raise ConfigError({"access": str(error)}) from error
    # Repeating is the caller's business: it knows what is idempotent.
    found.retries = urllib3.Retry(total=0, connect=0, read=0, redirect=0, status=0)
    return found


_certificates: dict[str, str] = {}
_certificates_lock = threading.Lock()


def _certificate_file(pem: str) -> str:
    """The client wants a file; one per certificate and process."""
    with _certificates_lock:
        if pem not in _certificates:
            with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as file:
                file.write(pem)
            _certificates[pem] = file.name
        return _certificates[pem]


def labels_of(item: Mapping[str, Any]) -> Mapping[str, str]:
    return (item.get("metadata") or {}).get("labels") or {}
