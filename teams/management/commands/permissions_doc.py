"""``manage.py permissions_doc``: the table of permissions as Markdown, from the code itself."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from teams.permissions import ADMIN, FOR_EVERYBODY, GRANTED_BY, LEAD, MANAGER, MEMBER, SCOPES, VIEWER, Permission

ROLES = (VIEWER, MEMBER, LEAD, MANAGER, ADMIN)

HEAD = """# Permissions

Who may see and do what. The table is `teams/permissions.py`; this page is printed from it with
`manage.py permissions_doc > docs/reference/permissions.md`.

A role in a team counts in every team below it. `manager` and `admin` are global. A team's robot token acts as a `member` of
its team, a person's token with that person's roles; both only as far as the token's scopes reach. Another team's object is
not found (404); with `GPUPORTAL_QUEUE=open` the queue shows of other teams' jobs their number, team, size and first reason.
"""


def document() -> str:
    """The whole page."""
    lines = [HEAD, "## By role", "", f"| permission | {' | '.join(ROLES)} |", f"| --- |{' :-: |' * len(ROLES)}"]
    for permission in Permission:
        granting = frozenset(ROLES) if permission in FOR_EVERYBODY else GRANTED_BY[permission]
        marks = " | ".join("✓" if role in granting else "" for role in ROLES)
        lines.append(f"| {permission.value} | {marks} |")
    lines += ["", "## By scope of a token", "", "| scope | lets through |", "| --- | --- |"]
    for scope, permissions in SCOPES.items():
        named = (
            "everything" if permissions == frozenset(Permission) else ", ".join(sorted(p.value for p in permissions))
        )
        lines.append(f"| {scope} | {named} |")
    return "\n".join(lines) + "\n"


class Command(BaseCommand):
    help = "Print the table of permissions as Markdown."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(document(), ending="")
