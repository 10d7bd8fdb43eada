"""What happens to a job when an attempt of it has ended (4.10)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scheduling.engine.snapshot import Policy


class Outcome(StrEnum):
    """How an attempt ends (design.md 2)."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    NODE_FAILED = "node_failed"
    LOST = "lost"


#: Not the user's fault, not charged to the user's retries.
INFRASTRUCTURE = frozenset({Outcome.NODE_FAILED, Outcome.LOST})


@dataclass(frozen=True, slots=True)
class Next:
    """What becomes of the job: ``final`` state, or back to the queue, not before ``delay`` seconds from now."""

    final: Outcome | None
    delay: float = 0.0
    user_failures: int = 0
    infrastructure_failures: int = 0


def after_attempt(
    outcome: Outcome, *, retries: int, user_failures: int, infrastructure_failures: int, policy: Policy
) -> Next:
    """``user_failures`` and ``infrastructure_failures`` are those before this attempt.

    ``timed_out`` and ``cancelled`` are final; preempted jobs always return to the queue at once, which does not count
    as a retry.
    """
    if outcome is Outcome.PREEMPTED:
        return Next(None, 0.0, user_failures, infrastructure_failures)
    if outcome in INFRASTRUCTURE:
        failures = infrastructure_failures + 1
        if failures > policy.infrastructure_retries:
            return Next(Outcome.FAILED, 0.0, user_failures, failures)
        return Next(None, backoff(failures, policy), user_failures, failures)
    if outcome is Outcome.FAILED:
        failures = user_failures + 1
        if failures > retries:
            return Next(Outcome.FAILED, 0.0, failures, infrastructure_failures)
        return Next(None, backoff(failures, policy), failures, infrastructure_failures)
    return Next(outcome, 0.0, user_failures, infrastructure_failures)


def backoff(failures: int, policy: Policy) -> float:
    """Seconds before the next attempt: ``backoff × 2^(n−1)``, at most ``backoff_max``."""
    return min(policy.backoff_max, policy.backoff * 2.0 ** min(failures - 1, 60))
