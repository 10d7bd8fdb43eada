"""The words of the portal in a sentence each: help texts of the pages, and the glossary."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Anchor -> (term, what it means).
TERMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cluster": ("Cluster", "A set of machines behind one back end: simulated, Slurm or Kubernetes."),
        "node": ("Node", "One machine of a cluster, with its GPUs."),
        "pool": (
            "Pool",
            "The nodes of one cluster that have the same GPU model. Quotas and prices are set per pool.",
        ),
        "topology": (
            "Topology domain",
            "A place in the tree of a cluster, such as block, rack or NVLink island. A job may ask to be kept inside one.",
        ),
        "team": ("Team", "Owner of jobs and quotas. Departments stand above; only teams at the leaves own jobs."),
        "guarantee": ("Guarantee", "GPUs of a pool that a team can always get back, whoever borrows them meanwhile."),
        "limit": ("Limit", "The most GPUs of a pool that a team may hold at once; empty means none."),
        "weight": ("Weight", "A team's claim on what is left over when all guarantees are met; 1 is normal."),
        "share": (
            "Fair share",
            "GPUs of a pool that are a team's due now: its guarantee, and its part of what nobody else is owed, "
            "by weight and by how little it used lately.",
        ),
        "gang": ("Gang", "The workers of one job: all start together, or none."),
        "gpu-share": ("GPU share", "A fraction, or an amount of memory, of one device instead of whole GPUs."),
        "walltime": (
            "Walltime",
            "The longest time a job may run; then it is ended. A short one can start in gaps that longer jobs leave.",
        ),
        "interruptible": (
            "Interruptible",
            "May be stopped, with its grace, and started again later from its last checkpoint. "
            "It can then borrow idle GPUs beyond the guarantee.",
        ),
        "checkpoint": (
            "Checkpoint",
            "Work written down, from which an interrupted job goes on. What came after it is lost.",
        ),
        "grace": ("Grace", "Time between the signal to stop and the end, for a last checkpoint."),
        "elastic": (
            "Elastic",
            "A job that may start with fewer workers than it asks for, and grows when there is room.",
        ),
        "priority": ("Priority", "Order inside a team. It never moves a team ahead of another team."),
        "attempt": ("Attempt", "One run of a job. A job that is evicted or retried has several."),
        "allocation": (
            "Allocation",
            "One GPU, or a share of it, held by an attempt for a time. All accounting adds these up.",
        ),
        "borrowing": ("Borrowing", "Running above the guarantee on GPUs that nobody entitled is using."),
        "reclaim": ("Reclaim", "Taking borrowed GPUs back for the team to which they are owed."),
        "preemption": (
            "Preemption",
            "Inside a team, a job of higher priority takes the GPUs of one of lower priority.",
        ),
        "backfill": (
            "Backfill",
            "Starting a later job on GPUs that an earlier one cannot use yet, without delaying it.",
        ),
        "reservation": ("Reservation", "GPUs promised to a waiting job from a moment in the future."),
        "filler": ("Filler", "An interruptible job on reserved GPUs; it is stopped when the reservation falls due."),
        "estimate": (
            "Start estimate",
            "When a job will start by the engine run forward: in half of the cases by the first time, in nine of ten by "
            "the second. Estimates are compared with what happened.",
        ),
        "lost-work": ("Lost work", "GPU-hours since the last checkpoint when an attempt ended without success."),
    }
)
