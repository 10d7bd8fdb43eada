"""The tree of teams and who belongs to them."""

from __future__ import annotations

from django.db import connection, transaction
from django.utils import timezone

from teams.actors import Actor
from teams.models import Membership, Role, Team, User
from teams.models.people import slug_validator
from teams.permissions import Permission, below, require
from teams.services import audit
from teams.services.errors import Invalid
from teams.services.quotas import LOCK, quotas_at

#: Deeper trees would make every check of a permission slow, and nobody could read them.
DEEPEST = 8


def _lock_tree() -> None:
    """Changes of the tree and of quotas exclude one another: sums are checked over both."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])


def _depth(team: Team | None) -> int:
    depth = 0
    while team is not None:
        depth, team = depth + 1, team.parent
    return depth


def _check_parent(parent: Team | None) -> None:
    if parent is None:
        return
    if parent.archived_at is not None:
        raise Invalid({"parent": [f"{parent.name} is archived."]})
    if parent.jobs.exists():
        raise Invalid({"parent": [f"{parent.name} owns jobs; only teams without jobs can have teams below them."]})


@transaction.atomic
def create_team(*, actor: Actor, name: str, title: str = "", parent: Team | None = None) -> Team:
    """A new leaf. Raises ``Invalid`` and ``PermissionDenied``."""
    require(actor, Permission.MANAGE_TEAMS)
    _lock_tree()
    errors: dict[str, list[str]] = {}
    if len(name) > 64 or slug_validator.regex.fullmatch(name) is None:  # type: ignore[union-attr]
        errors["name"] = [f"{name[:80]!r}: {slug_validator.message} At most 64 characters are allowed."]
    elif Team.objects.filter(name=name).exists():
        errors["name"] = [f"{name!r} is taken."]
    if len(title) > 200:
        errors["title"] = [f"{len(title)} characters are too many; at most 200 are allowed."]
    if _depth(parent) >= DEEPEST:
        errors["parent"] = [f"Teams can be nested {DEEPEST} levels deep, not deeper."]
    if errors:
        raise Invalid(errors)
    _check_parent(parent)
    team = Team.objects.create(name=name, title=title, parent=parent)
    audit.record(actor, "team.create", team, after={"name": name, "parent": parent and parent.name}, team=team)
    return team


@transaction.atomic
def move_team(*, actor: Actor, team: Team, parent: Team | None, reason: str = "") -> Team:
    """Under another parent. Refused while the team or a team below it holds a guarantee: the sums would break."""
    require(actor, Permission.MANAGE_TEAMS)
    _lock_tree()
    under = below([team.pk])
    if parent is not None and parent.pk in under:
        raise Invalid({"parent": [f"{parent.name} is {team.name} itself or below it."]})
    if _depth(parent) + _height(team) > DEEPEST:
        raise Invalid({"parent": [f"Teams can be nested {DEEPEST} levels deep, not deeper."]})
    _check_parent(parent)
    now = timezone.now()
    held = quotas_at(now).filter(team=team, guaranteed__gt=0) | team.quotas.filter(
        during__startswith__gt=now, guaranteed__gt=0
    )
    if held.exists():
        raise Invalid({"parent": [f"{team.name} has guarantees now or planned; set them to 0 before it moves."]})
    before = team.parent.name if team.parent else None
    team.parent = parent
    team.save(update_fields=["parent"])
    after = {"parent": parent.name if parent else None}
    audit.record(actor, "team.move", team, before={"parent": before}, after=after, reason=reason, team=team)
    return team


def _height(team: Team) -> int:
    return 1 + max((_height(child) for child in team.children.all()), default=0)


@transaction.atomic
def archive_team(*, actor: Actor, team: Team, reason: str = "") -> Team:
    """Takes no more jobs. Refused while jobs wait or run, or while teams below it are in use."""
    require(actor, Permission.MANAGE_TEAMS)
    _lock_tree()
    if team.archived_at is not None:
        return team
    if team.children.filter(archived_at=None).exists():
        raise Invalid({"team": [f"{team.name} has teams below it; archive them first."]})
    waiting = team.jobs.filter(state__in=["waiting", "running"]).count()
    if waiting:
        raise Invalid({"team": [f"{team.name} has {waiting} jobs that wait or run; they end first."]})
    team.archived_at = timezone.now()
    team.save(update_fields=["archived_at"])
    team.robot_tokens.filter(revoked_at=None).update(revoked_at=team.archived_at)
    audit.record(actor, "team.archive", team, reason=reason, team=team)
    return team


@transaction.atomic
def set_member(*, actor: Actor, team: Team, user: User, role: str) -> Membership:
    """Adds a person or changes the role. The last lead stays one."""
    require(actor, Permission.MANAGE_MEMBERS, team)
    if role not in Role.values:
        raise Invalid({"role": [f"{role!r} is not one of {', '.join(Role.values)}."]})
    Team.objects.select_for_update().get(pk=team.pk)
    row = Membership.objects.filter(team=team, user=user).first()
    if row is None:
        row = Membership.objects.create(team=team, user=user, role=role)
        audit.record(actor, "member.add", row, after={"user": user.username, "role": role}, team=team)
        return row
    if row.role != role:
        _keep_a_lead(team, row)
        before = {"user": user.username, "role": row.role}
        row.role, row.from_groups = role, False
        row.save(update_fields=["role", "from_groups"])
        audit.record(actor, "member.change", row, before=before, after={**before, "role": role}, team=team)
    return row


@transaction.atomic
def remove_member(*, actor: Actor, team: Team, user: User) -> None:
    """Their jobs stay with the team. Raises ``Membership.DoesNotExist``; refused for the last lead."""
    if actor.user != user:
        require(actor, Permission.MANAGE_MEMBERS, team)
    Team.objects.select_for_update().get(pk=team.pk)
    row = Membership.objects.get(team=team, user=user)
    _keep_a_lead(team, row)
    audit.record(actor, "member.remove", row, before={"user": user.username, "role": row.role}, team=team)
    row.delete()


def _keep_a_lead(team: Team, row: Membership) -> None:
    if row.role == Role.LEAD and not team.memberships.filter(role=Role.LEAD).exclude(pk=row.pk).exists():
        raise Invalid({"role": [f"{row.user.username} is the last lead of {team.name}; name another one first."]})
