"""The Kubernetes back end against an API server over HTTP."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
import yaml

from scheduling.backends.base import (
    Cause,
    NodeCondition,
    NotFound,
    Observation,
    Rejected,
    RunReport,
    RunState,
    StartCommand,
    StopCommand,
    Unreachable,
    WorkerSlot,
)
from scheduling.backends.fields import ConfigError
from scheduling.backends.kubernetes import KubernetesBackend, from_config
from scheduling.backends.kubernetes.config import KubernetesConfig, parse
from scheduling.backends.kubernetes.manifests import jobs_of
from tests.backends.fake_kubernetes import TOKEN, ApiError, FakeKubernetes, Json

H100 = "NVIDIA-H100-80GB-HBM3"


@pytest.fixture
def cluster() -> Iterator[FakeKubernetes]:
    fake = FakeKubernetes()
    for name in ("a", "b"):
        fake.add_node(name)
    fake.add_namespace("gpuportal-vision")
    yield fake
    fake.close()


@pytest.fixture
def backend(cluster: FakeKubernetes) -> KubernetesBackend:
    return connect(cluster)


def connect(cluster: FakeKubernetes, **changes: object) -> KubernetesBackend:
    config = {"server": cluster.url, "default_image": "registry/train:1", "timeout": 3} | changes
    return from_config(config, {"token": TOKEN})


def start_command(*nodes: str, **changes: object) -> StartCommand:
    given: dict[str, object] = {
        "attempt": uuid4(),
        "job_id": 7,
        "job_name": "train",
        "team": "vision",
        "account": "ada",
        "command": "python train.py",
        "slots": tuple(WorkerSlot(node, (0, 1)) for node in nodes or ("a",)),
        "gpu_model": H100,
        "gpus_per_worker": 2,
        "walltime": timedelta(hours=1),
        "grace": timedelta(seconds=60),
    }
    return StartCommand(**(given | changes))  # type: ignore[arg-type]


def stop(backend: KubernetesBackend, attempt: UUID, grace: float = 60, backend_id: str = "") -> None:
    backend.stop(StopCommand(attempt, timedelta(seconds=grace), "cancel", backend_id))


def report(backend: KubernetesBackend, attempt: UUID) -> RunReport:
    found = [run for run in backend.observe("", [attempt]).runs if run.attempt == attempt]
    assert len(found) == 1, f"{len(found)} reports"
    return found[0]


def running(cluster: FakeKubernetes, backend: KubernetesBackend, *nodes: str, **changes: object) -> StartCommand:
    command = start_command(*nodes, **changes)
    backend.start(command)
    for pod in cluster.pods_of(command.attempt):
        cluster.run(pod)
    return command


# nodes


def test_nodes_with_gpus_become_nodes_with_model_memory_and_topology(cluster: FakeKubernetes) -> None:
    cluster.add_node("c", 4, "NVIDIA-A100-SXM4-40GB", topology_kubernetes_io__zone="z1")
    cluster.add_node("cpu-only", 0, "")
    found = connect(cluster, gpu_models=[f"{H100}=H100"]).describe()
    assert found.version == "Kubernetes v1.31.2"
    assert found.levels == ("zone",)
    assert [(node.name, node.gpu_model, node.gpus, dict(node.domains)) for node in found.nodes] == [
        ("a", "H100", 8, {}),
        ("b", "H100", 8, {}),
        ("c", "NVIDIA-A100-SXM4-40GB", 4, {"zone": "z1"}),
    ]
    assert found.nodes[0].gpu_memory == 81559 << 20


def test_mig_devices_are_a_model_of_their_own_and_mixed_nodes_are_left_out(cluster: FakeKubernetes) -> None:
    cluster.add_node("mig", 0, "NVIDIA-A100-SXM4-40GB")
    cluster.add_node("both", 2, "NVIDIA-A100-SXM4-40GB")
    cluster.add_node("sliced", 8, H100, nvidia_com__gpu_replicas="4")
    cluster.add_node("nameless", 8, "")
    for name in ("mig", "both"):
        cluster.change(
            "nodes", name, "", lambda node: node["status"]["capacity"].update({"nvidia.com/mig-1g.5gb": "7"})
        )
    found = connect(cluster, node_selector=[]).describe()
    mig = next(node for node in found.nodes if node.name == "mig")
    assert (mig.gpu_model, mig.gpus, mig.gpu_memory) == ("NVIDIA-A100-SXM4-40GB MIG 1g.5gb", 7, 0)
    assert {node.name for node in found.nodes} == {"a", "b", "mig"}
    said = " ".join(found.warnings)
    assert "both" in said
    assert "time-sliced" in said
    assert "nameless" in said


def test_a_mig_job_asks_for_the_mig_resource() -> None:
    job = jobs_of(KubernetesConfig(default_image="x"), start_command(gpu_model="A100 MIG 1g.5gb", gpus_per_worker=1))[0]
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/mig-1g.5gb": "1"}


@pytest.mark.parametrize(
    ("change", "condition", "reason"),
    [
        ({"spec": {"unschedulable": True}}, NodeCondition.DRAINED, "cordoned"),
        ({"spec": {"taints": [{"key": "broken", "effect": "NoExecute"}]}}, NodeCondition.DRAINED, "broken"),
        ({"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}, NodeCondition.UP, ""),
        (
            {"status": {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}},
            NodeCondition.DOWN,
            "NodeStatusUnknown",
        ),
        ({"status": {"conditions": []}}, NodeCondition.DOWN, "no condition"),
    ],
)
def test_conditions_of_nodes_are_observed_with_their_reasons(
    cluster: FakeKubernetes, backend: KubernetesBackend, change: Json, condition: NodeCondition, reason: str
) -> None:
    cluster.change("nodes", "a", "", lambda node: [node[key].update(value) for key, value in change.items()])
    found = {node.name: node for node in backend.observe("", []).nodes}
    assert found["a"].condition is condition
    assert reason in found["a"].reason
    assert found["b"].condition is NodeCondition.UP


def test_gpus_of_others_are_told_as_a_warning(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    cluster.store.put(
        "pods",
        {
            "metadata": {"name": "x", "namespace": "other"},
            "spec": {"nodeName": "a", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "3"}}}]},
            "status": {"phase": "Running"},
        },
        "ADDED",
    )
    assert any(
        "3 GPUs are held by pods that are not the portal's" in warning for warning in backend.describe().warnings
    )


# starting


def test_an_attempt_is_a_job_per_node_pinned_there_with_everything_it_needs(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = start_command("b", "a", "b", environment={"LR": "$(date) $$ $HOME"})
    started = backend.start(command)
    jobs = sorted(cluster.all("jobs"), key=lambda job: job["metadata"]["name"])
    assert started.backend_id == f"gpuportal-vision/{jobs[0]['metadata']['name']}"
    assert [job["metadata"]["namespace"] for job in jobs] == ["gpuportal-vision"] * 2
    assert [job["spec"]["completions"] for job in jobs] == [2, 1], "two workers on b, one on a"
    pods = cluster.pods_of(command.attempt)
    pinned = [_pinned(pod) for pod in pods]
    assert sorted(pinned) == ["a", "b", "b"]
    for job in jobs:
        spec, pod = job["spec"], job["spec"]["template"]["spec"]
        assert (spec["backoffLimit"], pod["restartPolicy"], spec["completionMode"]) == (0, "Never", "Indexed")
        assert spec["activeDeadlineSeconds"] == 3540, "SIGTERM an hour less the grace period after the start"
        assert pod["terminationGracePeriodSeconds"] == 60
        assert pod["automountServiceAccountToken"] is False
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        env = {item["name"]: item["value"] for item in pod["containers"][0]["env"]}
        assert env["GPUPORTAL_ATTEMPT"] == str(command.attempt)
        assert env["LR"] == "$$(date) $$$$ $$HOME", "Kubernetes would replace $(…) and $$ otherwise"
    assert [_env(job)["GPUPORTAL_FIRST_WORKER"] for job in jobs] == ["0", "2"]
    assert jobs[1]["metadata"]["ownerReferences"][0]["uid"] == jobs[0]["metadata"]["uid"]
    (service,) = cluster.all("services")
    assert service["spec"]["clusterIP"] == "None"


def test_starting_twice_changes_nothing(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    command = start_command("a", "b")
    first = backend.start(command)
    version = cluster.store.version
    assert backend.start(command) == first
    assert connect(cluster).start(command) == first
    assert cluster.store.version == version


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_start_that_breaks_off_is_completed_by_the_next(
    cluster: FakeKubernetes, backend: KubernetesBackend, after: int
) -> None:
    command = start_command("a", "b")
    posts = 0

    def fault(method: str, path: str) -> None:
        nonlocal posts
        posts += method == "POST"
        if posts == after:
            raise ApiError(500, "InternalError", "etcdserver: request timed out")

    cluster.fault = fault
    with pytest.raises(Unreachable, match="etcdserver"):
        backend.start(command)
    cluster.fault = None
    backend.start(command)
    assert len(cluster.all("jobs")) == 2
    assert len(cluster.pods_of(command.attempt)) == 2


def test_a_missing_namespace_is_named_or_created(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    with pytest.raises(Rejected, match="gpuportal-speech-lab does not exist"):
        backend.start(start_command(team="speech.lab"))
    connect(cluster, create_namespaces=True).start(start_command(team="speech.lab"))
    assert ("", "gpuportal-speech-lab") in cluster.store.objects["namespaces"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slots": (WorkerSlot("a", (0,), 0.5),), "gpus_per_worker": 0}, "share"),
        ({"environment": {"A-B": "1"}}, "A-B"),
        ({"command": "x" * 200_000}, "200000 bytes"),
        ({"team": "t" * 60}, "63 characters"),
    ],
)
def test_what_cannot_be_run_is_rejected_with_the_reason(
    backend: KubernetesBackend, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(Rejected, match=words):
        backend.start(start_command(**changes))  # type: ignore[arg-type]


def test_a_job_without_image_is_rejected_where_there_is_no_default(cluster: FakeKubernetes) -> None:
    with pytest.raises(Rejected, match="no default image"):
        connect(cluster, default_image="").start(start_command())


def test_a_quota_of_the_cluster_rejects_with_its_own_words(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    def fault(method: str, path: str) -> None:
        if method == "POST":
            raise ApiError(403, "Forbidden", "exceeded quota: gpus, requested: 2, used: 8, limited: 8")

    cluster.fault = fault
    with pytest.raises(Rejected, match="exceeded quota: gpus"):
        backend.start(start_command())


def test_the_entry_script_passes_signals_and_exit_codes_on(tmp_path: Path) -> None:
    """Run as the container would: the shell as a process of its own, the signal to it alone."""
    job = jobs_of(KubernetesConfig(default_image="x"), start_command(command="exit 7"))[0]
    words = [_expanded(word) for word in job["spec"]["template"]["spec"]["containers"][0]["command"]]
    env = {"PATH": os.environ["PATH"], "GPUPORTAL_FIRST_WORKER": "3", "JOB_COMPLETION_INDEX": "2"}
    assert subprocess.run(words, env=env, check=False).returncode == 7
    words[-1] = 'echo "worker $GPUPORTAL_WORKER $(echo $((1+1)))"'
    assert subprocess.run(words, env=env, check=False, capture_output=True, text=True).stdout == "worker 5 2\n"


# what becomes of it


def test_a_gang_runs_when_all_its_workers_run_and_succeeds_when_all_have(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = start_command("a", "b")
    backend.start(command)
    assert report(backend, command.attempt).state is RunState.QUEUED
    first, second = cluster.pods_of(command.attempt)
    cluster.run(first)
    assert report(backend, command.attempt).state is RunState.QUEUED
    cluster.run(second)
    found = report(backend, command.attempt)
    assert found.state is RunState.RUNNING
    assert found.started_at is not None
    cluster.finish(first)
    assert report(backend, command.attempt).state is RunState.RUNNING
    cluster.finish(second)
    done = report(backend, command.attempt)
    assert (done.state, done.exit_code, done.cause) == (RunState.SUCCEEDED, 0, Cause.NONE)
    assert done.ended_at is not None
    assert done.started_at == found.started_at


@pytest.mark.parametrize(
    ("end", "state", "cause", "code"),
    [
        ({"code": 3}, RunState.FAILED, Cause.USER, 3),
        ({"code": 137, "reason": "OOMKilled"}, RunState.FAILED, Cause.OUT_OF_MEMORY, 137),
        ({"code": 128, "reason": "StartError"}, RunState.FAILED, Cause.REJECTED, 128),
        (
            {"code": 137, "status_reason": "Evicted", "message": "low on memory"},
            RunState.PREEMPTED,
            Cause.PREEMPTION,
            137,
        ),
        ({"code": 143, "reason_": "PreemptionByScheduler"}, RunState.PREEMPTED, Cause.PREEMPTION, 143),
        ({"code": 143, "reason_": "EvictionByEvictionAPI"}, RunState.PREEMPTED, Cause.PREEMPTION, 143),
        ({"code": 137, "reason_": "DeletionByTaintManager"}, RunState.NODE_FAILED, Cause.NODE, 137),
        ({"code": 137, "reason_": "DeletionByPodGC"}, RunState.NODE_FAILED, Cause.NODE, 137),
        ({"code": 143, "reason_": "TerminationByKubelet"}, RunState.NODE_FAILED, Cause.NODE, 143),
        ({"code": 137, "status_reason": "NodeLost"}, RunState.NODE_FAILED, Cause.NODE, 137),
        ({"code": 1, "status_reason": "UnexpectedAdmissionError"}, RunState.NODE_FAILED, Cause.NODE, 1),
        ({"code": 1, "status_reason": "OutOfnvidia.com/gpu"}, RunState.NODE_FAILED, Cause.NODE, 1),
    ],
)
def test_each_way_of_ending_has_its_outcome(
    cluster: FakeKubernetes,
    backend: KubernetesBackend,
    end: dict[str, object],
    state: RunState,
    cause: Cause,
    code: int,
) -> None:
    command = running(cluster, backend)
    arguments = {key: value for key, value in end.items() if key != "reason_"}
    (pod,) = cluster.pods_of(command.attempt)
    if "reason_" in end:
        cluster.disrupt(pod, str(end["reason_"]), int(str(end["code"])))
    else:
        cluster.finish(pod, **arguments)  # type: ignore[arg-type]
    done = report(backend, command.attempt)
    assert (done.state, done.cause, done.exit_code) == (state, cause, code)


def test_one_failed_worker_ends_the_whole_gang(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    command = running(cluster, backend, "a", "b")
    first, _ = cluster.pods_of(command.attempt)
    cluster.finish(first, code=9)
    seen = report(backend, command.attempt)
    assert seen.state is RunState.STOPPING, "the other one still holds its GPUs"
    assert all(job["spec"].get("suspend") or _failed(job) for job in cluster.all("jobs"))
    cluster.remove_terminating()
    done = report(backend, command.attempt)
    assert (done.state, done.exit_code, done.cause) == (RunState.FAILED, 9, Cause.USER)


def test_why_it_failed_is_known_even_when_the_failed_pod_is_gone(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = running(cluster, backend, "a", "b")
    first, _ = cluster.pods_of(command.attempt)
    cluster.finish(first, code=137, reason="OOMKilled")
    report(backend, command.attempt)
    cluster._remove("pods", first)
    cluster.remove_terminating()
    assert report(backend, command.attempt).cause is Cause.OUT_OF_MEMORY


def test_a_walltime_ends_it_as_timed_out(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    command = running(cluster, backend)
    cluster.deadline(cluster.all("jobs")[0])
    assert report(backend, command.attempt).state is RunState.STOPPING
    cluster.remove_terminating()
    done = report(backend, command.attempt)
    assert (done.state, done.cause) == (RunState.TIMED_OUT, Cause.WALLTIME)


@pytest.mark.parametrize(
    ("reason", "age", "state"),
    [
        ("ContainerCreating", 9999, RunState.QUEUED),
        ("ErrImagePull", 5, RunState.QUEUED),
        ("ImagePullBackOff", 5, RunState.QUEUED),
        ("ErrImagePull", 400, RunState.FAILED),
        ("ImagePullBackOff", 400, RunState.FAILED),
        ("InvalidImageName", 0, RunState.FAILED),
        ("CreateContainerConfigError", 0, RunState.FAILED),
    ],
)
def test_an_image_that_cannot_be_pulled_fails_the_attempt_after_the_time_of_patience(
    cluster: FakeKubernetes, backend: KubernetesBackend, reason: str, age: int, state: RunState
) -> None:
    command = start_command()
    backend.start(command)
    (pod,) = cluster.pods_of(command.attempt)
    cluster.wait_state(pod, reason, "manifest unknown", age)
    seen = wait_for_final(backend, command.attempt) if state.final else report(backend, command.attempt)
    assert seen.state is state
    if state.final:
        assert seen.cause is Cause.REJECTED
        assert reason in seen.detail
        assert "manifest unknown" in seen.detail
        assert cluster.all("jobs")[0]["spec"]["suspend"] is True, "nothing may start later"


def test_a_worker_that_cannot_be_placed_fails_the_attempt_after_the_time_of_patience(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = start_command()
    backend.start(command)
    (pod,) = cluster.pods_of(command.attempt)
    cluster.unschedulable(pod, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu", age=10)
    seen = report(backend, command.attempt)
    assert seen.state is RunState.QUEUED
    assert "Insufficient nvidia.com/gpu" in seen.detail
    cluster.unschedulable(pod, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu", age=400)
    done = wait_for_final(backend, command.attempt)
    assert (done.state, done.cause) == (RunState.NODE_FAILED, Cause.NODE)


def test_a_lost_node_fails_its_attempt_once_the_pod_is_given_up(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = running(cluster, backend)
    condition = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    cluster.change("nodes", "a", "", lambda node: node["status"].update(conditions=[condition]))
    assert report(backend, command.attempt).state is RunState.RUNNING, "it may come back"
    (pod,) = cluster.pods_of(command.attempt)
    cluster._delete("pods", pod, None)
    done = report(backend, command.attempt)
    assert (done.state, done.cause) == (RunState.NODE_FAILED, Cause.NODE)


# stopping


def test_a_stop_leaves_the_grace_period_and_ends_as_cancelled(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = running(cluster, backend, "a", "b")
    stop(backend, command.attempt)
    assert [p["metadata"]["deletionGracePeriodSeconds"] for p in cluster.pods_of(command.attempt)] == [60, 60]
    assert report(backend, command.attempt).state is RunState.STOPPING
    version = cluster.store.version
    stop(backend, command.attempt)
    assert cluster.store.version == version, "a second stop changes nothing"
    cluster.remove_terminating()
    done = report(backend, command.attempt)
    assert (done.state, done.cause) == (RunState.CANCELLED, Cause.NONE)
    stop(backend, command.attempt)


def test_a_shorter_grace_period_than_the_pods_own_takes_effect(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = running(cluster, backend)
    stop(backend, command.attempt, grace=5)
    assert cluster.pods_of(command.attempt)[0]["metadata"]["deletionGracePeriodSeconds"] == 5


def test_a_stopped_job_is_deleted_once_the_ledger_has_closed_it(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = running(cluster, backend, "a", "b")
    stop(backend, command.attempt)
    cluster.remove_terminating()
    backend.observe("", [command.attempt])
    assert len(cluster.all("jobs")) == 2
    backend.observe("", [])
    assert cluster.all("jobs") == []
    assert cluster.all("services") == []


def test_stopping_what_never_was_is_not_found(backend: KubernetesBackend) -> None:
    with pytest.raises(NotFound):
        stop(backend, uuid4())


def test_stopping_what_has_ended_is_no_error(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    command = running(cluster, backend)
    cluster.finish(cluster.pods_of(command.attempt)[0])
    stop(backend, command.attempt)
    assert report(backend, command.attempt).state is RunState.SUCCEEDED


def test_attempts_that_the_ledger_has_given_up_are_told_while_they_run(
    cluster: FakeKubernetes, backend: KubernetesBackend
) -> None:
    command = running(cluster, backend)
    assert [run.attempt for run in backend.observe("", []).runs] == [command.attempt]


# watching


def follow(backend: KubernetesBackend, since: Observation, attempts: list[UUID]) -> Observation:
    return backend.observe(since.cursor, attempts)


def test_after_a_full_list_only_changes_are_told(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    commands = [running(cluster, backend) for _ in range(3)]
    attempts = [command.attempt for command in commands]
    full = backend.observe("", attempts)
    assert full.complete
    assert len(full.runs) == 3
    assert len(full.cursor) <= 200
    quiet = follow(backend, full, attempts)
    assert (quiet.complete, quiet.runs, quiet.nodes) == (False, (), ())
    cluster.finish(cluster.pods_of(attempts[1])[0])
    cluster.change("nodes", "b", "", lambda node: node["spec"].update(unschedulable=True))
    changed = follow(backend, quiet, attempts)
    assert [(run.attempt, run.state) for run in changed.runs] == [(attempts[1], RunState.SUCCEEDED)]
    assert {node.name: node.condition for node in changed.nodes}["b"] is NodeCondition.DRAINED
    lists = [path for method, path in cluster.requests if "watch" not in path and "labelSelector" in path]
    assert lists, "the changed attempt is read afresh"


def test_a_watch_that_breaks_off_is_resumed_where_it_ended(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    commands = [running(cluster, backend) for _ in range(4)]
    attempts = [command.attempt for command in commands]
    seen = backend.observe("", attempts)
    cluster.break_watch_after = 1
    for attempt in attempts:
        cluster.finish(cluster.pods_of(attempt)[0])
    ended: set[UUID] = set()
    for _ in range(12):
        seen = follow(backend, seen, attempts)
        assert not seen.complete
        ended |= {run.attempt for run in seen.runs if run.state is RunState.SUCCEEDED}
    assert ended == set(attempts), "no change is lost"


def test_a_version_that_is_too_old_leads_to_a_full_list(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    command = running(cluster, backend)
    full = backend.observe("", [command.attempt])
    cluster.finish(cluster.pods_of(command.attempt)[0])
    cluster.compact()
    again = follow(backend, full, [command.attempt])
    assert again.complete
    assert again.runs[0].state is RunState.SUCCEEDED


def test_everything_is_listed_again_after_a_while(cluster: FakeKubernetes) -> None:
    backend = connect(cluster, full_list_every=5)
    full = backend.observe("", [])
    moved = full.cursor.split(" ")
    moved[0] = str(int(moved[0]) - 6)
    assert backend.observe(" ".join(moved), []).complete


def test_a_foreign_cursor_leads_to_a_full_list(backend: KubernetesBackend) -> None:
    assert backend.observe("1234", []).complete


def test_long_lists_come_in_pages(
    cluster: FakeKubernetes, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduling.backends.kubernetes.api.PAGE", 3)
    commands = [running(cluster, backend) for _ in range(10)]
    found = backend.observe("", [command.attempt for command in commands])
    assert len(found.runs) == 10
    assert sum("continue=" in path for _, path in cluster.requests) >= 6


# errors


@pytest.mark.parametrize("code", [429, 500, 503, 504])
def test_errors_that_may_pass_are_unreachable(cluster: FakeKubernetes, backend: KubernetesBackend, code: int) -> None:
    def fault(method: str, path: str) -> None:
        raise ApiError(code, "Busy", "try later")

    cluster.fault = fault
    for call in (
        lambda: backend.start(start_command()),
        lambda: stop(backend, uuid4()),
        lambda: backend.observe("", []),
        lambda: backend.logs(uuid4()),
        backend.describe,
    ):
        with pytest.raises(Unreachable, match="try later"):
            call()


def test_a_server_that_is_slow_or_not_there_is_unreachable(cluster: FakeKubernetes) -> None:
    backend = connect(cluster, timeout=1)
    cluster.fault = lambda *_: time.sleep(2.5)
    with pytest.raises(Unreachable, match="cannot be reached"):
        backend.observe("", [])
    nowhere = from_config({"server": "http://127.0.0.1:9", "timeout": 1}, {"token": "x"})
    with pytest.raises(Unreachable):
        nowhere.start(start_command(image="x"))


def test_a_wrong_token_is_refused_on_connecting_and_waited_out_later(cluster: FakeKubernetes) -> None:
    backend = from_config({"server": cluster.url, "default_image": "x"}, {"token": "wrong"})
    with pytest.raises(Rejected, match="credentials"):
        backend.describe()
    with pytest.raises(Unreachable, match="credentials"):
        backend.observe("", [])
    with pytest.raises(Unreachable, match="credentials"):
        backend.start(start_command())


# logs


def test_logs_of_the_first_worker_are_read_by_offset(cluster: FakeKubernetes, backend: KubernetesBackend) -> None:
    command = start_command("a", "b")
    started = backend.start(command)
    with pytest.raises(NotFound):
        backend.logs(command.attempt)
    first, second = cluster.pods_of(command.attempt)
    cluster.run(first, b"0123456789")
    cluster.run(second, b"other")
    part = backend.logs(command.attempt, offset=4, limit=3, backend_id=started.backend_id)
    assert (part.data, part.end, part.finished) == (b"456", 7, False)
    cluster.finish(first)
    rest = backend.logs(command.attempt, offset=7)
    assert (rest.data, rest.end, rest.finished) == (b"789", 10, True)


# settings


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"server": "10.0.0.1", "levels": ["rack"], "claims": ["data=relative"], "instance": "A B"}, None)
    assert caught.value.errors.keys() == {"server", "token", "levels", "claims", "instance"}


def test_a_kubeconfig_works_and_one_that_needs_programs_is_refused(cluster: FakeKubernetes) -> None:
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }  # fmt: skip
    backend = from_config({"access": "kubeconfig"}, {"kubeconfig": yaml.safe_dump(content)})
    assert len(backend.describe().nodes) == 2
    content["users"] = [{"name": "u", "user": {"exec": {"command": "aws"}}}]
    with pytest.raises(ConfigError, match="exec"):
        from_config({"access": "kubeconfig"}, {"kubeconfig": yaml.safe_dump(content)})


def test_the_token_is_in_no_text_form_of_the_settings() -> None:
    assert "s3cret" not in repr(parse({"server": "https://x"}, {"token": "s3cret"}))


# rights


def test_the_rbac_manifest_allows_exactly_what_the_back_end_does(cluster: FakeKubernetes) -> None:
    """Every request made by all of the above, held against the manifest."""
    backend = connect(cluster, create_namespaces=True)
    command = running(cluster, backend, "a", "b")
    other = start_command(team="new")
    backend.start(other)
    backend.start(command)
    full = backend.observe("", [])
    backend.observe(full.cursor, [])
    backend.logs(command.attempt)
    stop(backend, command.attempt, grace=1)
    cluster.remove_terminating()
    backend.observe("", [])
    backend.describe()
    manifest = Path(__file__).parents[2] / "deploy" / "kubernetes" / "cluster-access.yaml"
    allowed = set()
    for document in yaml.safe_load_all(manifest.read_text()):
        if document["kind"] == "ClusterRole":
            for rule in document["rules"]:
                allowed |= {(resource, verb) for resource in rule["resources"] for verb in rule["verbs"]}
    used = {used for method, path in cluster.requests if (used := _right(method, path)) is not None}
    assert used == allowed


def _right(method: str, path: str) -> tuple[str, str] | None:
    place, _, query = path.partition("?")
    parts = place.strip("/").split("/")
    if parts == ["version"]:
        return None  # every signed-in account may
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if rest[0] == "namespaces" and len(rest) >= 3:
        rest = rest[2:]
    if rest[-1] == "log":
        return "pods/log", "get"
    verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
    if method == "GET":
        return rest[0], "watch" if "watch=" in query else ("get" if len(rest) > 1 else "list")
    return rest[0], verbs[method]


if "GPUPORTAL_TEST_KUBECONFIG" in os.environ:

    def test_a_real_cluster_can_be_described_and_observed() -> None:
        text = Path(os.environ["GPUPORTAL_TEST_KUBECONFIG"]).read_text()
        backend = from_config({"access": "kubeconfig"}, {"kubeconfig": text})
        assert backend.describe().version.startswith("Kubernetes v")
        assert backend.observe("", []).complete


# helpers


def wait_for_final(backend: KubernetesBackend, attempt: UUID) -> RunReport:
    for _ in range(5):
        seen = report(backend, attempt)
        if seen.state.final:
            return seen
    raise AssertionError(f"{attempt} is {seen}")


def _pinned(pod: Json) -> str:
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return str(affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])


def _env(job: Json) -> dict[str, str]:
    return {item["name"]: item["value"] for item in job["spec"]["template"]["spec"]["containers"][0]["env"]}


def _failed(job: Json) -> bool:
    return any(c["type"] == "Failed" for c in job["status"].get("conditions", []))


def _expanded(word: str) -> str:
    """What Kubernetes makes of ``$$`` in a command."""
    return word.replace("$$", "$")
