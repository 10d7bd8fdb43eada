"""What runs where, what was decided about it, and what came of it."""

from scheduling.models.decisions import (
    Command,
    Cycle,
    Decision,
    Drift,
    Estimate,
    Hold,
    PolicyVersion,
    QueueOrder,
    ReasonGroup,
    Reservation,
    TeamUsage,
)
from scheduling.models.hardware import GPU, Cluster, ClusterKind, GPUModel, Node, NodeInterval, Pool, Window
from scheduling.models.jobs import Job, JobDependency, JobEvent, JobState, Priority, WorkloadClass
from scheduling.models.ledger import Allocation, Attempt, AttemptState, Mark, Outcome
from scheduling.models.telemetry import GPUEvent, GPUSample

__all__ = [
    "GPU",
    "Allocation",
    "Attempt",
    "AttemptState",
    "Cluster",
    "ClusterKind",
    "Command",
    "Cycle",
    "Decision",
    "Drift",
    "Estimate",
    "GPUEvent",
    "GPUModel",
    "GPUSample",
    "Hold",
    "Job",
    "JobDependency",
    "JobEvent",
    "JobState",
    "Mark",
    "Node",
    "NodeInterval",
    "Outcome",
    "PolicyVersion",
    "Pool",
    "Priority",
    "QueueOrder",
    "ReasonGroup",
    "Reservation",
    "TeamUsage",
    "Window",
    "WorkloadClass",
]
