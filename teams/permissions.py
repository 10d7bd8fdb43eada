"""Who may see and do what: one table, used by pages, API and services alike.

A role counts in its team and in every team below it. Managers and administrators are global. A robot token has the
role ``member`` in its team, a token of a person that person's roles; both are narrowed by the token's scopes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from django.core.exceptions import PermissionDenied
from django.db import connection

from teams.actors import Actor
from teams.models import Role, Team


class Permission(StrEnum):
    VIEW_TEAM = "view-team"
    VIEW_JOBS = "view-jobs"
    SUBMIT_JOBS = "submit-jobs"
    MANAGE_OWN_JOBS = "manage-own-jobs"
    MANAGE_TEAM_JOBS = "manage-team-jobs"
    SET_URGENT = "set-urgent"
    MANAGE_MEMBERS = "manage-members"
    MANAGE_TOKENS = "manage-tokens"
    REQUEST_ALLOCATION = "request-allocation"
    VIEW_REPORTS = "view-reports"
    VIEW_ALL_REPORTS = "view-all-reports"
    DECIDE_ALLOCATION = "decide-allocation"
    MANAGE_QUOTAS = "manage-quotas"
    MANAGE_BUDGETS = "manage-budgets"
    MANAGE_TEAMS = "manage-teams"
    MANAGE_POLICY = "manage-policy"
    USE_LAB = "use-lab"
    VIEW_CLUSTERS = "view-clusters"
    MANAGE_CLUSTERS = "manage-clusters"
    MANAGE_USERS = "manage-users"
    VIEW_AUDIT = "view-audit"
    ANNOUNCE = "announce"
    MANAGE_WEBHOOKS = "manage-webhooks"
    MANAGE_ALL_WEBHOOKS = "manage-all-webhooks"
    VIEW_NOTIFICATIONS = "view-notifications"
    MANAGE_NOTIFICATIONS = "manage-notifications"


VIEWER, MEMBER, LEAD, MANAGER, ADMIN = "viewer", "member", "lead", "manager", "admin"

_ALL = frozenset({VIEWER, MEMBER, LEAD, MANAGER, ADMIN})
_STAFF = frozenset({MANAGER, ADMIN})

#: The table: which roles grant a permission.
GRANTED_BY: Mapping[Permission, frozenset[str]] = {
    Permission.VIEW_TEAM: _ALL,
    Permission.VIEW_JOBS: _ALL,
    Permission.VIEW_REPORTS: _ALL,
    Permission.SUBMIT_JOBS: frozenset({MEMBER, LEAD, ADMIN}),
    Permission.MANAGE_OWN_JOBS: frozenset({MEMBER, LEAD, ADMIN}),
    Permission.MANAGE_TEAM_JOBS: frozenset({LEAD, ADMIN}),
    Permission.SET_URGENT: frozenset({LEAD, ADMIN}),
    Permission.MANAGE_MEMBERS: frozenset({LEAD, ADMIN}),
    Permission.MANAGE_TOKENS: frozenset({LEAD, ADMIN}),
    Permission.REQUEST_ALLOCATION: frozenset({LEAD, MANAGER, ADMIN}),
    Permission.VIEW_ALL_REPORTS: _STAFF,
    Permission.DECIDE_ALLOCATION: _STAFF,
    Permission.MANAGE_QUOTAS: _STAFF,
    Permission.MANAGE_BUDGETS: _STAFF,
    Permission.USE_LAB: _STAFF,
    Permission.ANNOUNCE: _STAFF,
    Permission.MANAGE_TEAMS: frozenset({ADMIN}),
    Permission.MANAGE_POLICY: frozenset({ADMIN}),
    Permission.VIEW_CLUSTERS: _ALL,
    Permission.MANAGE_CLUSTERS: frozenset({ADMIN}),
    Permission.MANAGE_USERS: frozenset({ADMIN}),
    Permission.VIEW_AUDIT: frozenset({ADMIN}),
    Permission.MANAGE_WEBHOOKS: frozenset({LEAD, ADMIN}),
    Permission.MANAGE_ALL_WEBHOOKS: frozenset({ADMIN}),
    Permission.VIEW_NOTIFICATIONS: _ALL,
    Permission.MANAGE_NOTIFICATIONS: _ALL,
}

#: Held by everybody who is signed in, whatever the team. Notifications: only the own ones.
FOR_EVERYBODY = frozenset({Permission.VIEW_CLUSTERS, Permission.VIEW_NOTIFICATIONS, Permission.MANAGE_NOTIFICATIONS})

#: Scopes of tokens and the permissions that each lets through.
SCOPES: Mapping[str, frozenset[Permission]] = {
    "read": frozenset(
        {
            Permission.VIEW_TEAM,
            Permission.VIEW_JOBS,
            Permission.VIEW_REPORTS,
            Permission.VIEW_ALL_REPORTS,
            Permission.VIEW_CLUSTERS,
            Permission.VIEW_AUDIT,
            Permission.VIEW_NOTIFICATIONS,
        }
    ),
    "jobs": frozenset(
        {
            Permission.VIEW_TEAM,
            Permission.VIEW_JOBS,
            Permission.VIEW_CLUSTERS,
            Permission.SUBMIT_JOBS,
            Permission.MANAGE_OWN_JOBS,
            Permission.MANAGE_TEAM_JOBS,
            Permission.SET_URGENT,
        }
    ),
    "admin": frozenset(Permission),
}


def allowed(actor: Actor, permission: Permission, team: Team | None = None) -> bool:
    """Whether ``actor`` has ``permission``, for ``team`` where the permission is about one."""
    if actor.is_system:
        return True
    if not _in_scope(actor, permission):
        return False
    if permission in FOR_EVERYBODY:
        return actor.user is not None or actor.token is not None
    granting = GRANTED_BY[permission]
    if _global_roles(actor) & granting:
        return True
    if team is None:
        return bool(_roles_anywhere(actor) & granting) and permission in _WITHOUT_TEAM
    return bool(_roles_in(actor, team) & granting)


#: Permissions that may be asked about without a team: "in any team".
_WITHOUT_TEAM = frozenset({Permission.SUBMIT_JOBS, Permission.VIEW_REPORTS, Permission.VIEW_JOBS, Permission.VIEW_TEAM})


def require(actor: Actor, permission: Permission, team: Team | None = None) -> None:
    """Raises ``PermissionDenied``, naming what is missing."""
    if not allowed(actor, permission, team):
        where = f" in team {team.name}" if team is not None else ""
        raise PermissionDenied(f"{actor.label} lacks the permission {permission.value}{where}.")


def visible_team_ids(actor: Actor, permission: Permission) -> set[int] | None:
    """Teams for which ``actor`` has ``permission``; ``None`` = all of them. The scope of every list."""
    if actor.is_system:
        return None
    if not _in_scope(actor, permission):
        return set()
    granting = GRANTED_BY[permission]
    if _global_roles(actor) & granting:
        return None
    roots = [team for team, role in _memberships(actor) if role in granting]
    return below(roots)


def below(team_ids: list[int]) -> set[int]:
    """The teams themselves and everything below them."""
    if not team_ids:
        return set()
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH RECURSIVE tree AS (
                SELECT id FROM teams_team WHERE id = ANY(%s)
                UNION SELECT t.id FROM teams_team t JOIN tree ON t.parent_id = tree.id
            ) SELECT id FROM tree
            """,
            [team_ids],
        )
        return {row[0] for row in cursor.fetchall()}


def _in_scope(actor: Actor, permission: Permission) -> bool:
    if actor.token is None:
        return True
    return any(permission in SCOPES.get(scope, frozenset()) for scope in actor.token.scopes)


def _global_roles(actor: Actor) -> set[str]:
    user = actor.user
    if user is None or not user.is_active:
        return set()
    if user.is_portal_admin:
        return {ADMIN, MANAGER}
    return {MANAGER} if user.is_manager else set()


def _memberships(actor: Actor) -> list[tuple[int, str]]:
    if actor.token is not None and actor.token.team_id is not None:
        return [(actor.token.team_id, MEMBER)]
    if actor.user is None:
        return []
    cached = getattr(actor.user, "_membership_roles", None)
    if cached is None:
        cached = list(actor.user.memberships.values_list("team_id", "role"))
        actor.user._membership_roles = cached  # type: ignore[attr-defined]
    return cached


def roles_of(actor: Actor) -> dict[int, str]:
    """The roles that the actor was given, by team; not those that come from above."""
    return dict(_memberships(actor))


def _roles_anywhere(actor: Actor) -> set[str]:
    return {role for _, role in _memberships(actor)}


def _roles_in(actor: Actor, team: Team) -> set[str]:
    held = dict(_memberships(actor))
    if not held:
        return set()
    roles = set()
    walk: Team | None = team
    while walk is not None:
        if walk.pk in held:
            roles.add(str(held[walk.pk]))
        walk = walk.parent
    return roles


assert {role.value for role in Role} == {VIEWER, MEMBER, LEAD}
