"""What an attempt consists of on Kubernetes.

One Indexed Job for each node of the gang, pinned to it, with as many pods as the gang has workers there. One Job for
the whole gang could not say "two workers here, one there": its pods share one template, and the scheduler would be
free to spread them otherwise than the ledger has it. The pods are placed by node affinity, not by ``nodeName``, so that
the scheduler still checks resources and taints.

The other Jobs, and the headless service by which the workers find one another, belong to the first Job
(``ownerReferences``), so that they go when it goes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from uuid import UUID

from scheduling.backends.base import Rejected, StartCommand
from scheduling.backends.kubernetes.api import Json
from scheduling.backends.kubernetes.config import KubernetesConfig

PORTAL = "gpuportal.io/portal"
ATTEMPT = "gpuportal.io/attempt"
JOB = "gpuportal.io/job"
#: Annotations.
OWNER = "gpuportal.io/owner"
WORKERS = "gpuportal.io/workers"
PARTS = "gpuportal.io/parts"
STOP = "gpuportal.io/stop"
FAILURE = "gpuportal.io/failure"
CONTAINER = "worker"
RESOURCE = "nvidia.com/gpu"
MIG_RESOURCE = "nvidia.com/mig-"

_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_LONGEST_COMMAND = 120_000
#: Kubernetes ends a container without a chance to write anything below this.
_LEAST_GRACE = 1

#: As process 1 of a container a shell neither dies of SIGTERM nor passes it on. So it passes it to all others, and
#: the inner shell outlives it until its program has ended.
_ENTRY = """export GPUPORTAL_WORKER=$((GPUPORTAL_FIRST_WORKER + ${JOB_COMPLETION_INDEX:-0}))
if [ -n "$GPUPORTAL_MAKE_CHECKPOINT_DIR" ]; then mkdir -p "$GPUPORTAL_CHECKPOINT_DIR"; fi
if [ -n "$GPUPORTAL_WORKING_DIRECTORY" ]; then cd "$GPUPORTAL_WORKING_DIRECTORY" || exit 72; fi
(trap : TERM; eval "$1") &
child=$!
trap 'kill -TERM -1 2>/dev/null' TERM
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
exit "$code"
"""


def base_name(attempt: UUID) -> str:
    return f"gp-{attempt.hex}"


def job_name(attempt: UUID, part: int) -> str:
    return f"{base_name(attempt)}-{part}"


def jobs_of(config: KubernetesConfig, command: StartCommand) -> list[Json]:
    """The Jobs, in the order in which they are created. Raises ``Rejected`` for what cannot be run."""
    _check(config, command)
    workers = Counter(slot.node for slot in command.slots)
    nodes = sorted(workers, key=lambda node: (-workers[node], node))
    found, first = [], 0
    for part, node in enumerate(nodes):
        found.append(_job(config, command, part, len(nodes), node, workers[node], first))
        first += workers[node]
    return found


def service_of(config: KubernetesConfig, command: StartCommand, owner: Json) -> Json:
    """Gives each worker a name: ``JOB-INDEX.SERVICE``."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": base_name(command.attempt),
            "labels": _labels(config, command),
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {ATTEMPT: str(command.attempt)},
        },
    }


def owner_reference(job: Json) -> Json:
    meta = job["metadata"]
    return {
        "apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"], "blockOwnerDeletion": True,
    }  # fmt: skip


def _check(config: KubernetesConfig, command: StartCommand) -> None:
    if not command.slots:
        raise Rejected("the attempt has no workers")
    if any(slot.share < 1 for slot in command.slots):
        raise Rejected("this cluster cannot give a share of a GPU; MIG devices are pools of their own")
    if command.gpus_per_worker < 1:
        raise Rejected(f"{command.gpus_per_worker} GPUs per worker: at least 1 is needed")
    if not (command.image or config.default_image):
        raise Rejected("the job names no image, and this cluster has no default image")
    if len(command.command.encode()) > _LONGEST_COMMAND:
        raise Rejected(
            f"the command has {len(command.command.encode())} bytes; at most {_LONGEST_COMMAND} can be passed on"
        )
    for name in command.environment:
        if not _VARIABLE.match(name):
            raise Rejected(f"{name!r} is no name for an environment variable (letters, digits, _; no digit first)")
    namespace = config.namespace(command.team)
    if len(namespace) > 63:
        raise Rejected(f"the namespace {namespace!r} would have more than 63 characters")


def _labels(config: KubernetesConfig, command: StartCommand) -> dict[str, str]:
    return {PORTAL: config.instance, ATTEMPT: str(command.attempt), JOB: str(command.job_id)}


def _job(
    config: KubernetesConfig, command: StartCommand, part: int, parts: int, node: str, workers: int, first: int
) -> Json:
    spec: Json = {
        "completionMode": "Indexed",
        "completions": workers,
        "parallelism": workers,
        "backoffLimit": 0,
        # A deleted pod is not replaced while it is still going.
        "podReplacementPolicy": "Failed",
        "ttlSecondsAfterFinished": config.keep_finished,
        "template": {
            "metadata": {
                "labels": _labels(config, command),
                # Cluster autoscalers do not move it.
                "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
            },
            "spec": _pod(config, command, node, first),
        },
    }
    if command.walltime is not None:
        # Kubernetes sends SIGTERM at the deadline and waits for the grace period: together they are the walltime.
        spec["activeDeadlineSeconds"] = max(1, math.ceil((command.walltime - command.grace).total_seconds()))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(command.attempt, part),
            "labels": _labels(config, command),
            "annotations": {
                OWNER: command.account,
                WORKERS: str(len(command.slots)),
                PARTS: str(parts),
                "gpuportal.io/name": command.job_name,
            },
        },
        "spec": spec,
    }


def _pod(config: KubernetesConfig, command: StartCommand, node: str, first: int) -> Json:
    claims = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(config.claims)
    ]
    mounts = [{"name": f"claim-{number}", "mountPath": path} for number, (_, path) in enumerate(config.claims)]
    if config.shared_memory:
        claims.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(_LEAST_GRACE, math.ceil(command.grace.total_seconds())),
        "serviceAccountName": config.service_account,
        "automountServiceAccountToken": False,
        "subdomain": base_name(command.attempt),
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
                    ]
                }
            }
        },
        "tolerations": [{"key": key, "operator": "Exists"} for key in (RESOURCE, *config.tolerations)],
        "volumes": claims,
        "containers": [
            {
                "name": CONTAINER,
                "image": command.image or config.default_image,
                "command": [config.shell, "-c", _literal(_ENTRY), "gpuportal", _literal(command.command)],
                "env": [{"name": k, "value": v} for k, v in _environment(config, command, first).items()],
                "resources": _resources(config, command),
                "volumeMounts": mounts,
                "securityContext": {"allowPrivilegeEscalation": False},
            }
        ],
    }


def _environment(config: KubernetesConfig, command: StartCommand, first: int) -> Mapping[str, str]:
    head = f"{job_name(command.attempt, 0)}-0.{base_name(command.attempt)}"
    found = {
        "GPUPORTAL_JOB": str(command.job_id),
        "GPUPORTAL_ATTEMPT": str(command.attempt),
        "GPUPORTAL_RESTART_COUNT": str(command.number - 1),
        "GPUPORTAL_WORKERS": str(len(command.slots)),
        "GPUPORTAL_GPUS_PER_WORKER": str(command.gpus_per_worker),
        **{name: _literal(str(value)) for name, value in command.environment.items()},
        "GPUPORTAL_HEAD_NODE": head,
        "GPUPORTAL_FIRST_WORKER": str(first),
    }
    if command.working_directory:
        found["GPUPORTAL_WORKING_DIRECTORY"] = _literal(command.working_directory)
    if config.checkpoint_directory:
        found["GPUPORTAL_CHECKPOINT_DIR"] = f"{config.checkpoint_directory.rstrip('/')}/{command.job_id}"
        found["GPUPORTAL_MAKE_CHECKPOINT_DIR"] = "1"
    return found


def _literal(text: str) -> str:
    """Kubernetes replaces $(NAME) and $$ in commands and variables before any shell sees them."""
    return text.replace("$", "$$")


def _resources(config: KubernetesConfig, command: StartCommand) -> Json:
    gpus = command.gpus_per_worker
    limits = {resource_of(command.gpu_model): str(gpus)}
    requests = dict(limits)
    if config.cpus_per_gpu:
        requests["cpu"] = str(config.cpus_per_gpu * gpus)
    if config.memory_per_gpu:
        limits["memory"] = requests["memory"] = f"{config.memory_per_gpu * gpus}Mi"
    return {"limits": limits, "requests": requests}


def resource_of(model: str) -> str:
    """``MODEL MIG 1g.10gb`` is a MIG device with a resource of its own (the mixed strategy); others are GPUs."""
    _, mig, profile = model.rpartition(" MIG ")
    return f"{MIG_RESOURCE}{profile}" if mig else RESOURCE
