"""Which of Slurm's refusals mean "not now", which "no", and which "I know no such job"."""

from __future__ import annotations

from scheduling.backends.base import BackendError, NotFound, Rejected, Unreachable

#: Parts of Slurm's error texts (slurm_errno.c) that mean "not now".
PASSING = (
    "unable to contact slurm controller", "communication", "connection refused", "timed out", "zero bytes",
    "backup controller in standby", "temporarily unable", "resource temporarily unavailable", "transport endpoint",
    "authentication", "munge", "message receive failure", "unexpected message received", "connect failure",
    "no route to host", "network is unreachable", "connection reset", "broken pipe", "receive failure",
    "send failure", "try again", "busy", "unable to establish configuration source", "no dns srv record", "shutdown",
    "cannot allocate memory", "no space left", "read-only file system", "is not running",
)  # fmt: skip
UNKNOWN_JOB = "invalid job id"
#: Said when a job to be signalled or cancelled has ended.
ENDED = ("already completing or completed", "already finished", "job/step already")


def classify(said: str) -> BackendError:
    """The error to raise for what Slurm said about a change that it did not make."""
    lower = said.lower()
    if UNKNOWN_JOB in lower:
        return NotFound(said)
    if not said or any(text in lower for text in PASSING):
        return Unreachable(said or "Slurm gave no reason")
    return Rejected(said)
