"""Every state Slurm can report has a meaning."""

from __future__ import annotations

import re
import subprocess

import pytest

from scheduling.backends.base import Cause, NodeCondition, RunState
from scheduling.backends.slurm.states import (
    JOB_FLAGS,
    JOB_STATES,
    NODE_STATES,
    NODE_SUFFIXES,
    UnknownState,
    job_state,
    node_condition,
)
from tests.backends.slurm_cluster import SlurmCluster

#: slurm.h of 20.11 to 25.05: base states and flags of jobs.
JOB_WORDS = [
    "PENDING",
    "RUNNING",
    "SUSPENDED",
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
    "LAUNCH_FAILED",
    "UPDATE_DB",
    "REQUEUED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "RESIZING",
    "CONFIGURING",
    "COMPLETING",
    "STOPPED",
    "RECONFIG_FAIL",
    "POWER_UP_NODE",
    "REVOKED",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SIGNALING",
    "STAGE_OUT",
    "EXPEDITING",
]
#: node_state_string and the flags of slurm.h.
NODE_WORDS = [
    "UNKNOWN",
    "DOWN",
    "IDLE",
    "ALLOCATED",
    "ERROR",
    "MIXED",
    "FUTURE",
    "CLOUD",
    "COMPLETING",
    "DRAIN",
    "DYNAMIC_FUTURE",
    "DYNAMIC_NORM",
    "FAIL",
    "INVALID_REG",
    "MAINTENANCE",
    "NOT_RESPONDING",
    "PERFCTRS",
    "PLANNED",
    "POWERED_DOWN",
    "POWERING_DOWN",
    "POWERING_UP",
    "POWER_DOWN",
    "POWER_UP",
    "REBOOT_ISSUED",
    "REBOOT_REQUESTED",
    "REBOOT_CANCELED",
    "RESERVED",
    "RESUME",
    "UNDRAIN",
    "BLOCKED",
    "EXTERNAL",
    "POWER_DRAIN",
    "DRAINED",
    "DRAINING",
    "FAILING",
    "REBOOT",
    "INVAL",
]


def test_no_job_state_of_slurm_is_missing() -> None:
    assert set(JOB_WORDS) == JOB_STATES.keys() | JOB_FLAGS.keys()


@pytest.mark.parametrize("flag", sorted(JOB_FLAGS))
@pytest.mark.parametrize("base", sorted(JOB_STATES))
def test_every_base_state_with_every_flag_has_a_meaning(base: str, flag: str) -> None:
    state, _ = job_state([base, flag])
    meaning = JOB_FLAGS[flag]
    final_configuring = flag == "CONFIGURING" and JOB_STATES[base][0].final
    expected = JOB_STATES[base][0] if meaning is None or final_configuring else meaning[0]
    assert state is expected


@pytest.mark.parametrize(
    ("words", "state", "cause"),
    [
        (["PENDING"], RunState.QUEUED, Cause.NONE),
        (["RUNNING"], RunState.RUNNING, Cause.NONE),
        (["RUNNING", "CONFIGURING"], RunState.QUEUED, Cause.NONE),
        (["RUNNING", "COMPLETING"], RunState.STOPPING, Cause.NONE),
        (["COMPLETED", "COMPLETING"], RunState.STOPPING, Cause.NONE),
        (["SUSPENDED"], RunState.RUNNING, Cause.NONE),
        (["COMPLETED"], RunState.SUCCEEDED, Cause.NONE),
        (["FAILED"], RunState.FAILED, Cause.USER),
        (["OUT_OF_MEMORY"], RunState.FAILED, Cause.OUT_OF_MEMORY),
        (["TIMEOUT"], RunState.TIMED_OUT, Cause.WALLTIME),
        (["DEADLINE"], RunState.TIMED_OUT, Cause.WALLTIME),
        (["NODE_FAIL"], RunState.NODE_FAILED, Cause.NODE),
        (["BOOT_FAIL"], RunState.NODE_FAILED, Cause.NODE),
        (["PREEMPTED"], RunState.PREEMPTED, Cause.PREEMPTION),
        (["PENDING", "REQUEUED"], RunState.REQUEUED, Cause.NONE),
        (["PENDING", "REQUEUE_HOLD"], RunState.REQUEUED, Cause.NODE),
        (["PENDING", "SPECIAL_EXIT"], RunState.REQUEUED, Cause.USER),
        (["CANCELLED+"], RunState.CANCELLED, Cause.NONE),
    ],
)
def test_what_a_job_state_means(words: list[str], state: RunState, cause: Cause) -> None:
    assert job_state(words) == (state, cause)


@pytest.mark.parametrize("base", sorted(JOB_STATES))
def test_a_job_that_slurm_restarted_counts_as_requeued_whatever_it_does_now(base: str) -> None:
    assert job_state([base], restarts=1)[0] is RunState.REQUEUED


@pytest.mark.parametrize("words", [["DREAMING"], ["RUNNING", "DREAMING"], [], ["COMPLETING_SOON"], ["RESIZING"]])
def test_an_unknown_job_state_is_an_error_and_no_guess(words: list[str]) -> None:
    with pytest.raises(UnknownState):
        job_state(words)


def test_no_node_state_of_slurm_is_missing() -> None:
    assert set(NODE_WORDS) <= NODE_STATES.keys()


@pytest.mark.parametrize(
    ("words", "condition"),
    [
        (["idle"], NodeCondition.UP),
        (["mixed", "PLANNED"], NodeCondition.UP),
        (["idle", "DRAIN"], NodeCondition.DRAINED),
        (["allocated", "DRAIN"], NodeCondition.DRAINED),
        (["down", "DRAIN"], NodeCondition.DOWN),
        (["idle", "NOT_RESPONDING"], NodeCondition.DOWN),
        (["idle*"], NodeCondition.DOWN),
        (["idle~"], NodeCondition.UP),
        (["mix-"], NodeCondition.UP),
        (["drained$"], NodeCondition.DRAINED),
        (["idle", "MAINTENANCE", "RESERVED"], NodeCondition.DRAINED),
        (["idle", "RESERVED"], NodeCondition.DRAINED),
    ],
)
def test_what_a_node_state_means(words: list[str], condition: NodeCondition) -> None:
    assert node_condition(words) is condition


def test_nodes_of_the_own_reservation_are_usable() -> None:
    assert node_condition(["IDLE", "RESERVED"], own_reservation=True) is NodeCondition.UP
    assert node_condition(["IDLE", "RESERVED", "DRAIN"], own_reservation=True) is NodeCondition.DRAINED


@pytest.mark.parametrize("suffix", sorted(NODE_SUFFIXES))
def test_every_suffix_of_sinfo_is_read(suffix: str) -> None:
    assert node_condition([f"idle{suffix}"]) in NodeCondition


def test_an_unknown_node_state_is_an_error() -> None:
    with pytest.raises(UnknownState, match="asleep"):
        node_condition(["asleep"])


@pytest.mark.slurm
@pytest.mark.xdist_group("slurm")
def test_every_state_that_the_installed_slurm_lists_is_known(slurm: SlurmCluster) -> None:
    """squeue and sinfo list all states they know when asked for one they do not."""
    import os

    environment = {**os.environ, **slurm.environment}
    jobs = subprocess.run(["squeue", "-t", "?"], env=environment, capture_output=True, text=True, check=False).stderr
    words = re.search(r"include: (\S+)", jobs)
    assert words is not None
    assert len(words[1].split(",")) > 15
    unknown = set(words[1].split(",")) - JOB_STATES.keys() - JOB_FLAGS.keys()
    assert unknown == set()
    nodes = subprocess.run(["sinfo", "-t", "foo"], env=environment, capture_output=True, text=True, check=False).stderr
    listed = re.search(r"valid states: (\S+)", nodes)
    assert listed is not None
    for word in listed[1].split(","):
        node_condition([word])
