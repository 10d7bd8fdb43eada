"""Who: people, teams, what they are entitled to, what they may do, and what they did."""

from teams.models.access import ApiToken, AuditEvent, IdempotencyKey
from teams.models.people import Announcement, Membership, Role, StaffRole, Team, User
from teams.models.quotas import AllocationRequest, Budget, BudgetPeriod, BudgetUnit, Quota

__all__ = [
    "AllocationRequest",
    "Announcement",
    "ApiToken",
    "AuditEvent",
    "Budget",
    "BudgetPeriod",
    "BudgetUnit",
    "IdempotencyKey",
    "Membership",
    "Quota",
    "Role",
    "StaffRole",
    "Team",
    "User",
]
