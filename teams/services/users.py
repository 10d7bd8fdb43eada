"""Accounts: made by administrators, with a password that works once."""

from __future__ import annotations

import secrets

from django.db import transaction

from teams.actors import Actor
from teams.models import StaffRole, User
from teams.permissions import Permission, require
from teams.services import audit
from teams.services.errors import Invalid

#: Without letters and digits that look alike.
ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"


def one_time_password() -> str:
    """About 78 bits, easy to read out: xxxx-xxxx-xxxx-xxxx."""
    return "-".join("".join(secrets.choice(ALPHABET) for _ in range(4)) for _ in range(4))


@transaction.atomic
def create_user(
    *, actor: Actor, username: str, email: str = "", staff_role: str = "", first_name: str = "", last_name: str = ""
) -> tuple[User, str]:
    """The account and its one-time password, which must be changed at the first sign-in."""
    require(actor, Permission.MANAGE_USERS)
    errors: dict[str, list[str]] = {}
    user = User(
        username=username.strip(),
        email=email.strip(),
        staff_role=staff_role,
        first_name=first_name,
        last_name=last_name,
        must_change_password=True,
    )
    if staff_role not in StaffRole.values:
        errors["staff_role"] = [f"{staff_role!r} is not one of {', '.join(filter(None, StaffRole.values))} or empty."]
    try:
        user.username_validator(user.username)
    except Exception as error:
        errors["username"] = [f"{username!r}: {' '.join(getattr(error, 'messages', [str(error)]))}"]
    if User.objects.filter(username=user.username).exists():
        errors["username"] = [f"{username!r} is taken."]
    if errors:
        raise Invalid(errors)
    password = one_time_password()
    user.set_password(password)
    user.is_staff = user.is_superuser = False
    user.save()
    audit.record(actor, "user.create", user, after={"username": user.username, "staff_role": staff_role})
    return user, password


@transaction.atomic
def reset_password(*, actor: Actor, user: User) -> str:
    """A new one-time password; the old one and all sessions end."""
    require(actor, Permission.MANAGE_USERS)
    password = one_time_password()
    user.set_password(password)
    user.must_change_password = True
    user.save(update_fields=["password", "must_change_password"])
    audit.record(actor, "user.reset-password", user)
    return password
