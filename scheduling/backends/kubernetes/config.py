"""Settings of a Kubernetes connection."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import yaml

from scheduling.backends.fields import DISPATCH_PARALLEL, ConfigError, ConfigField, read_settings

FIELDS: tuple[ConfigField, ...] = (
    ConfigField(
        "access",
        "How to sign in",
        "token: a service account's token; kubeconfig: a whole kubeconfig file; in-cluster: "
        "the portal runs inside this cluster.",
        kind="choice",
        choices=("token", "kubeconfig", "in-cluster"),
        default="token",
    ),
    ConfigField("server", "API server", "For example https://10.0.0.1:6443 (with token)."),
    ConfigField(
        "ca_certificate",
        "CA certificate",
        "PEM, to check the API server with (with token). Empty: the system's.",
        kind="multiline",
    ),
    ConfigField("token", "Token", "Of the service account in deploy/kubernetes/cluster-access.yaml.", secret=True),
    ConfigField(
        "kubeconfig",
        "kubeconfig",
        "The file's contents, with certificates and keys inside.",
        kind="multiline",
        secret=True,
    ),
    ConfigField("context", "Context", "Of the kubeconfig. Empty: its current one."),
    ConfigField(
        "namespace_prefix",
        "Namespace prefix",
        "A team's jobs run in the namespace PREFIX + team name.",
        default="gpuportal-",
    ),
    ConfigField(
        "create_namespaces",
        "Create namespaces",
        "Create a team's namespace when it is missing.",
        kind="boolean",
        default=False,
    ),
    ConfigField(
        "gpu_models",
        "GPU names",
        "One PRODUCT=MODEL a line, where the label nvidia.com/gpu.product is not the model's name here.",
        kind="list",
        default=(),
    ),
    ConfigField(
        "levels",
        "Topology levels",
        "One LEVEL=LABEL a line, widest first. Empty: the usual labels that are there.",
        kind="list",
        default=(),
    ),
    ConfigField(
        "node_selector", "Only nodes with", "One LABEL=VALUE a line: other nodes are left out.", kind="list", default=()
    ),
    ConfigField(
        "tolerations", "Tolerations", "Taint keys that jobs tolerate; nvidia.com/gpu always.", kind="list", default=()
    ),
    ConfigField("default_image", "Default image", "For jobs that name none. Empty: such jobs are refused."),
    ConfigField("shell", "Shell", "Runs the job's command inside the image.", default="/bin/sh"),
    ConfigField("service_account", "Service account", "Of the pods. Its token is not mounted.", default="default"),
    ConfigField(
        "claims",
        "Volumes",
        "One CLAIM=/PATH a line: persistent volume claims of the team's namespace, mounted in every pod.",
        kind="list",
        default=(),
    ),
    ConfigField(
        "shared_memory",
        "Large /dev/shm",
        "Memory-backed /dev/shm, which data loaders need.",
        kind="boolean",
        default=True,
    ),
    ConfigField(
        "checkpoint_directory",
        "Checkpoint folder",
        "Path inside the pods, on one of the volumes; each job gets a subfolder.",
    ),
    ConfigField("cpus_per_gpu", "CPUs per GPU", "Requested with every worker. Empty: none.", kind="integer", minimum=1),
    ConfigField(
        "memory_per_gpu",
        "Memory per GPU, MiB",
        "Requested and limited with every worker. Empty: none.",
        kind="integer",
        minimum=1,
    ),
    ConfigField(
        "patience",
        "Patience, seconds",
        "A worker that cannot be placed, or whose image cannot be pulled, for so long ends the attempt.",
        kind="integer",
        minimum=10,
        maximum=86400,
        default=300,
    ),
    ConfigField(
        "keep_finished",
        "Keep finished jobs, seconds",
        "Then Kubernetes removes them with their logs.",
        kind="integer",
        minimum=600,
        maximum=2_592_000,
        default=86400,
    ),
    ConfigField(
        "full_list_every",
        "Full list every, seconds",
        "In between, only changes are watched.",
        kind="integer",
        minimum=5,
        maximum=3600,
        default=60,
    ),
    ConfigField(
        "instance",
        "Name of this portal",
        "Labels the portal's objects; two portals on one cluster need two names.",
        default="gpuportal",
    ),
    ConfigField("timeout", "Time-out, seconds", "For one request.", kind="integer", minimum=1, maximum=300, default=20),
    DISPATCH_PARALLEL,
)

#: An RFC 1123 label, what namespaces and label values are made of.
_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_LABEL_KEY = re.compile(r"^([A-Za-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """Checked settings; the meaning of each is in ``FIELDS``."""

    access: Literal["token", "kubeconfig", "in-cluster"] = "token"
    server: str = ""
    ca_certificate: str = ""
    token: str = ""
    #: The kubeconfig as read.
    kubeconfig: Mapping[str, Any] | None = None
    context: str = ""
    namespace_prefix: str = "gpuportal-"
    create_namespaces: bool = False
    gpu_models: Mapping[str, str] | None = None
    levels: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[str, ...] = ()
    default_image: str = ""
    shell: str = "/bin/sh"
    service_account: str = "default"
    claims: tuple[tuple[str, str], ...] = ()
    shared_memory: bool = True
    checkpoint_directory: str = ""
    cpus_per_gpu: int | None = None
    memory_per_gpu: int | None = None
    patience: int = 300
    keep_finished: int = 86400
    full_list_every: int = 60
    instance: str = "gpuportal"
    timeout: int = 20

    def __repr__(self) -> str:  # secrets stay out of logs
        return f"KubernetesConfig({self.access}, {self.server})"

    def namespace(self, team: str) -> str:
        return f"{self.namespace_prefix}{team}".replace("_", "-").replace(".", "-")


def parse(config: Mapping[str, object], secret: Mapping[str, object] | None) -> KubernetesConfig:
    """Raises ``ConfigError`` naming every field that is wrong."""
    values = read_settings(FIELDS, config, secret)
    errors: dict[str, str] = {}

    def text(name: str) -> str:
        return cast(str, values[name] or "")

    pairs = {
        "gpu_models": _pairs(values["gpu_models"], "gpu_models", "PRODUCT=MODEL", errors),
        "levels": _pairs(values["levels"], "levels", "LEVEL=LABEL", errors),
        "node_selector": _pairs(values["node_selector"], "node_selector", "LABEL=VALUE", errors),
        "claims": _pairs(values["claims"], "claims", "CLAIM=/PATH", errors),
    }
    for level, label in pairs["levels"]:
        if not _LABEL_KEY.match(label):
            errors["levels"] = f"{label!r} (of level {level!r}) is no label key"
    for claim, path in pairs["claims"]:
        if not _LABEL.match(claim) or not path.startswith("/"):
            errors["claims"] = f"{claim}={path} must be the name of a claim and an absolute path"
    if not re.match(r"^[a-z0-9]([-a-z0-9]*)$", text("namespace_prefix")):
        errors["namespace_prefix"] = f"{text('namespace_prefix')!r} may only have a-z, 0-9 and -, and not begin with -"
    if not _LABEL.match(text("instance")):
        errors["instance"] = f"{text('instance')!r} may only have a-z, 0-9 and -"
    for name in ("shell", "checkpoint_directory"):
        if text(name) and not text(name).startswith("/"):
            errors[name] = f"{text(name)!r} must be an absolute path"
    kubeconfig = _access(text, errors)
    if errors:
        raise ConfigError(errors)
    plain = {field.name for field in FIELDS} - {*pairs, "kubeconfig", "tolerations", "dispatch_parallel"}
    numbers = ("cpus_per_gpu", "memory_per_gpu")
    given: dict[str, Any] = {
        name: ("" if values[name] is None and name not in numbers else values[name]) for name in plain
    }
    models = dict(pairs.pop("gpu_models"))
    given.update({name: tuple(found) for name, found in pairs.items()})
    tolerations = cast("tuple[str, ...]", values["tolerations"] or ())
    return KubernetesConfig(**given, gpu_models=models, tolerations=tolerations, kubeconfig=kubeconfig)


def _access(text: Any, errors: dict[str, str]) -> Mapping[str, Any] | None:
    if text("access") == "token":
        if not re.match(r"^https?://[^\s/]+", text("server")):
            errors["server"] = (
                f"{text('server')!r} must begin with https://" if text("server") else "is required with a token"
            )
        if not text("token"):
            errors["token"] = "is required"
        if text("ca_certificate") and "BEGIN CERTIFICATE" not in text("ca_certificate"):
            errors["ca_certificate"] = "is no PEM certificate"
        return None
    if text("access") == "in-cluster":
        return None
    if not text("kubeconfig"):
        errors["kubeconfig"] = "is required"
        return None
    try:
        content = yaml.safe_load(text("kubeconfig"))
        users = [user.get("user") or {} for user in content["users"]]
        json.dumps(content)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError):
        errors["kubeconfig"] = "is no kubeconfig (YAML with clusters, users and contexts)"
        return None
    for user in users:
        for key in ("exec", "auth-provider", "tokenFile", "client-certificate", "client-key"):
            if key in user:
                errors["kubeconfig"] = (
                    f"uses {key!r}, which needs a program or file beside it; use a token or inline data"
                )
    return cast("Mapping[str, Any]", content)


def _pairs(raw: object, field: str, form: str, errors: dict[str, str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for line in cast("tuple[str, ...]", raw or ()):
        key, equals, value = (part.strip() for part in line.partition("="))
        if not (equals and key and value):
            errors[field] = f"{line!r} is not of the form {form}"
        elif key in dict(found):
            errors[field] = f"{key!r} is there twice"
        found.append((key, value))
    return found
