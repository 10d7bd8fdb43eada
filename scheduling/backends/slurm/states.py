"""Every state Slurm can report, and what it means here (docs/reference/slurm-states.md has the table for people).

Sources: squeue(1) "JOB STATE CODES", sinfo(1) "NODE STATE CODES", and slurm.h, of Slurm 20.11 to 25.05. A state that
is in none of these tables raises ``UnknownState``: better an error that is seen than a job believed to be something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from scheduling.backends.base import BackendError, Cause, NodeCondition, RunState


class UnknownState(BackendError):
    """Slurm reported a state that this version does not know."""


#: Base state -> (our state, cause). Exactly one base state is reported for a job.
JOB_STATES: Mapping[str, tuple[RunState, Cause]] = MappingProxyType(
    {
        "PENDING": (RunState.QUEUED, Cause.NONE),
        "RUNNING": (RunState.RUNNING, Cause.NONE),
        "SUSPENDED": (RunState.RUNNING, Cause.NONE),  # holds its GPUs
        "COMPLETED": (RunState.SUCCEEDED, Cause.NONE),
        "CANCELLED": (RunState.CANCELLED, Cause.NONE),
        "FAILED": (RunState.FAILED, Cause.USER),
        "TIMEOUT": (RunState.TIMED_OUT, Cause.WALLTIME),
        "NODE_FAIL": (RunState.NODE_FAILED, Cause.NODE),
        "PREEMPTED": (RunState.PREEMPTED, Cause.PREEMPTION),
        "BOOT_FAIL": (RunState.NODE_FAILED, Cause.NODE),
        "DEADLINE": (RunState.TIMED_OUT, Cause.WALLTIME),
        "OUT_OF_MEMORY": (RunState.FAILED, Cause.OUT_OF_MEMORY),
    }
)

#: Flag -> (our state, cause); it outranks the base state. ``None`` = the flag alone says nothing new.
JOB_FLAGS: Mapping[str, tuple[RunState, Cause] | None] = MappingProxyType(
    {
        "COMPLETING": (RunState.STOPPING, Cause.NONE),  # processes or epilog still on the nodes: GPUs not free yet
        "CONFIGURING": (RunState.QUEUED, Cause.NONE),  # nodes booting, prolog
        "POWER_UP_NODE": (RunState.QUEUED, Cause.NONE),
        "RESIZING": None,
        "UPDATE_DB": None,
        "STAGE_OUT": (RunState.STOPPING, Cause.NONE),
        "SIGNALING": (RunState.STOPPING, Cause.NONE),
        "STOPPED": (RunState.RUNNING, Cause.NONE),  # SIGSTOP; holds its GPUs
        "EXPEDITING": (RunState.REQUEUED, Cause.NODE),
        "REQUEUED": (RunState.REQUEUED, Cause.NONE),
        "REQUEUE_FED": (RunState.REQUEUED, Cause.NONE),
        "REQUEUE_HOLD": (RunState.REQUEUED, Cause.NODE),
        "SPECIAL_EXIT": (RunState.REQUEUED, Cause.USER),
        "RESV_DEL_HOLD": (RunState.QUEUED, Cause.NONE),  # held: its reservation is gone
        "REVOKED": (RunState.CANCELLED, Cause.NONE),  # the sibling on another federated cluster runs
        "LAUNCH_FAILED": (RunState.NODE_FAILED, Cause.NODE),
        "RECONFIG_FAIL": (RunState.NODE_FAILED, Cause.NODE),
    }
)

#: Short forms and other spellings that some commands and versions print.
JOB_ALIASES: Mapping[str, str] = MappingProxyType({"NODE_FAILED": "NODE_FAIL", "OOM": "OUT_OF_MEMORY"})

#: When several flags are set the first of these decides.
_FLAG_ORDER = (
    "LAUNCH_FAILED", "RECONFIG_FAIL", "REQUEUE_HOLD", "SPECIAL_EXIT", "EXPEDITING", "REQUEUED", "REQUEUE_FED",
    "REVOKED", "RESV_DEL_HOLD", "COMPLETING", "STAGE_OUT", "SIGNALING", "CONFIGURING", "POWER_UP_NODE", "STOPPED",
    "RESIZING", "UPDATE_DB",
)  # fmt: skip


def job_state(words: Iterable[str], *, restarts: int = 0) -> tuple[RunState, Cause]:
    """State and cause for what Slurm reports: a base state and any flags, in any order and spelling.

    A job that Slurm has restarted (``restarts`` > 0) was requeued behind our back, whatever it does now.
    Raises ``UnknownState``.
    """
    names = [_job_word(word) for word in words]
    if not names:
        raise UnknownState("Slurm reported a job without any state")
    base = next((JOB_STATES[name] for name in names if name in JOB_STATES), None)
    if restarts > 0:
        return RunState.REQUEUED, Cause.NONE
    for flag in _FLAG_ORDER:
        meaning = JOB_FLAGS[flag]
        if flag in names and meaning is not None:
            if flag == "CONFIGURING" and base and base[0].final:
                continue
            return meaning
    if base is None:
        raise UnknownState(f"Slurm reported the job state {'+'.join(names)!r} without a base state")
    return base


def _job_word(word: str) -> str:
    name = word.strip().rstrip("*+").upper()
    name = JOB_ALIASES.get(name, name)
    if name not in JOB_STATES and name not in JOB_FLAGS:
        raise UnknownState(f"Slurm reported the job state {word!r}, which is not known here")
    return name


#: Node base states and flags. Any DOWN among them wins, then any DRAINED.
NODE_STATES: Mapping[str, NodeCondition] = MappingProxyType(
    {
        # base states
        "IDLE": NodeCondition.UP,
        "ALLOCATED": NodeCondition.UP,
        "ALLOC": NodeCondition.UP,
        "MIXED": NodeCondition.UP,
        "MIX": NodeCondition.UP,
        "DOWN": NodeCondition.DOWN,
        "ERROR": NodeCondition.DOWN,
        "FUTURE": NodeCondition.DOWN,
        "UNKNOWN": NodeCondition.DOWN,
        "INVAL": NodeCondition.DOWN,
        "?": NodeCondition.DOWN,
        # flags
        "DRAIN": NodeCondition.DRAINED,
        "DRAINED": NodeCondition.DRAINED,
        "DRAINING": NodeCondition.DRAINED,
        "FAIL": NodeCondition.DRAINED,  # expected to fail: takes nothing, runs on
        "FAILING": NodeCondition.DRAINED,
        "MAINT": NodeCondition.DRAINED,
        "MAINTENANCE": NodeCondition.DRAINED,
        "RESERVED": NodeCondition.DRAINED,  # in a Slurm reservation; see the setting `reservation`
        "RES": NodeCondition.DRAINED,
        "REBOOT": NodeCondition.DRAINED,
        "REBOOT^": NodeCondition.DOWN,
        "REBOOT_REQUESTED": NodeCondition.DRAINED,
        "REBOOT_ISSUED": NodeCondition.DOWN,
        "REBOOT_CANCELED": NodeCondition.UP,
        "INVALID_REG": NodeCondition.DOWN,
        "NOT_RESPONDING": NodeCondition.DOWN,
        "NO_RESPOND": NodeCondition.DOWN,
        "NO_RESPONSE": NodeCondition.DOWN,
        "BLOCKED": NodeCondition.DRAINED,
        "POWERED_DOWN": NodeCondition.UP,  # power saving: Slurm wakes it for a job
        "POWER_DOWN": NodeCondition.UP,
        "POWERING_DOWN": NodeCondition.UP,
        "POWERING_UP": NodeCondition.UP,
        "POWER_UP": NodeCondition.UP,
        "POWER_DRAIN": NodeCondition.DRAINED,
        "POWERED": NodeCondition.UP,
        "CLOUD": NodeCondition.UP,
        "COMPLETING": NodeCondition.UP,
        "COMP": NodeCondition.UP,
        "PLANNED": NodeCondition.UP,
        "PLND": NodeCondition.UP,
        "PERFCTRS": NodeCondition.UP,
        "NPC": NodeCondition.UP,
        "DYNAMIC": NodeCondition.UP,
        "DYNAMIC_NORM": NodeCondition.UP,
        "DYNAMIC_FUTURE": NodeCondition.UP,
        "EXTERNAL": NodeCondition.UP,
        "RESUME": NodeCondition.UP,
        "UNDRAIN": NodeCondition.UP,
        "CANCEL_REBOOT": NodeCondition.UP,
        "INVALID": NodeCondition.DOWN,
    }
)

#: Suffixes that sinfo puts behind a node state (sinfo(1)).
NODE_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {
        "*": "NOT_RESPONDING",
        "~": "POWERED_DOWN",
        "#": "POWERING_UP",
        "!": "POWER_DOWN",
        "%": "POWERING_DOWN",
        "$": "MAINTENANCE",
        "@": "REBOOT_REQUESTED",
        "^": "REBOOT_ISSUED",
        "-": "PLANNED",
        "+": "",  # several states among several nodes
    }
)


def node_condition(words: Iterable[str], *, own_reservation: bool = False) -> NodeCondition:
    """Condition for a node's base state and flags. With ``own_reservation`` a reserved node is usable.

    Raises ``UnknownState``.
    """
    seen = set()
    names = [name for word in words for name in _node_words(word)]
    if not names:
        raise UnknownState("Slurm reported a node without any state")
    for name in names:
        if own_reservation and name in ("RESERVED", "RES"):
            continue
        seen.add(NODE_STATES[name])
    for condition in (NodeCondition.DOWN, NodeCondition.DRAINED):
        if condition in seen:
            return condition
    return NodeCondition.UP


def _node_words(word: str) -> list[str]:
    name = word.strip().upper()
    found = []
    while name and name not in NODE_STATES and name[-1] in NODE_SUFFIXES:
        if flag := NODE_SUFFIXES[name[-1]]:
            found.append(flag)
        name = name[:-1]
    if name not in NODE_STATES:
        raise UnknownState(f"Slurm reported the node state {word!r}, which is not known here")
    return [name, *found]
