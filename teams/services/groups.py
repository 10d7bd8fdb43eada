"""Groups of the identity provider -> memberships and staff roles, at each sign-in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db import transaction

from teams.actors import Actor
from teams.models import Membership, Role, StaffRole, Team, User
from teams.services import audit

_RANK = {Role.VIEWER.value: 0, Role.MEMBER.value: 1, Role.LEAD.value: 2}


@transaction.atomic
def apply_groups(user: User, groups: Iterable[str], mapping: Mapping[str, str]) -> None:
    """``mapping``: group -> "TEAM:ROLE" or "staff:ROLE". What came from groups before and does so no longer is taken
    away; memberships given by hand stay."""
    wanted: dict[str, str] = {}
    staff = StaffRole.NONE.value
    for group in groups:
        name, _, role = mapping.get(group, "").partition(":")
        if name == "staff" and role in (StaffRole.MANAGER, StaffRole.ADMIN):
            staff = role if staff != StaffRole.ADMIN else staff
        elif role in _RANK and _RANK[role] >= _RANK.get(wanted.get(name, "viewer"), 0):
            wanted[name] = role
    actor = Actor.system("identity provider")
    teams = {team.name: team for team in Team.objects.filter(name__in=wanted, archived_at=None)}
    for row in Membership.objects.filter(user=user, from_groups=True).select_related("team"):
        if row.team.name not in wanted:
            audit.record(actor, "member.remove", row, before={"role": row.role}, team=row.team)
            row.delete()
    for name, team in teams.items():
        row, created = Membership.objects.get_or_create(
            user=user, team=team, defaults={"role": wanted[name], "from_groups": True}
        )
        if created:
            audit.record(actor, "member.add", row, after={"role": row.role}, team=team)
        elif row.from_groups and row.role != wanted[name]:
            audit.record(
                actor, "member.change", row, before={"role": row.role}, after={"role": wanted[name]}, team=team
            )
            row.role = wanted[name]
            row.save(update_fields=["role"])
    mapped_staff = any(value.startswith("staff:") for value in mapping.values())
    if mapped_staff and user.staff_role != staff:
        audit.record(actor, "user.staff-role", user, before={"role": user.staff_role}, after={"role": staff})
        user.staff_role = staff
        user.save(update_fields=["staff_role"])
