"""API tokens: made once, shown once, stored as a hash."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from teams.actors import Actor
from teams.models import ApiToken, Team, User
from teams.permissions import SCOPES, Permission, require
from teams.services import audit
from teams.services.errors import Invalid

PREFIX = "gpu_"
#: Writing down the last use more often than this would be a write per request.
USE_GRANULARITY = timedelta(minutes=1)
LONGEST_LIFE = timedelta(days=366)


@transaction.atomic
def create_token(
    *,
    actor: Actor,
    name: str,
    scopes: list[str],
    expires_at: datetime | None,
    user: User | None = None,
    team: Team | None = None,
) -> tuple[ApiToken, str]:
    """A token of a person (``user``) or of a team's robot (``team``), and its secret, which is never shown again."""
    errors: dict[str, list[str]] = {}
    if not name.strip() or len(name) > 100:
        errors["name"] = ["A name of 1 to 100 characters is needed."]
    unknown = sorted(set(scopes) - SCOPES.keys())
    if unknown or not scopes:
        errors["scopes"] = [f"{', '.join(unknown) or 'none'}: choose from {', '.join(SCOPES)}."]
    now = timezone.now()
    if expires_at is not None and not now < expires_at <= now + LONGEST_LIFE:
        errors["expires_at"] = [f"{expires_at:%Y-%m-%d} is not within the next {LONGEST_LIFE.days} days."]
    if (user is None) == (team is None):
        errors["user"] = ["A token belongs either to a person or to a team."]
    if errors:
        raise Invalid(errors)
    if team is not None:
        require(actor, Permission.MANAGE_TOKENS, team)
    elif actor.user != user:
        require(actor, Permission.MANAGE_USERS)
    prefix = secrets.token_hex(4)
    secret = f"{PREFIX}{prefix}_{secrets.token_urlsafe(32)}"
    token = ApiToken.objects.create(
        user=user,
        team=team,
        name=name.strip(),
        prefix=prefix,
        secret_hash=_hash(secret),
        scopes=sorted(set(scopes)),
        created_by=actor.user,
        expires_at=expires_at,
    )
    audit.record(actor, "token.create", token, after={"name": token.name, "scopes": token.scopes}, team=team)
    return token, secret


@transaction.atomic
def revoke_token(*, actor: Actor, token: ApiToken) -> None:
    if token.team is not None:
        require(actor, Permission.MANAGE_TOKENS, token.team)
    elif actor.user != token.user:
        require(actor, Permission.MANAGE_USERS)
    if token.revoked_at is None:
        token.revoked_at = timezone.now()
        token.save(update_fields=["revoked_at"])
        audit.record(actor, "token.revoke", token, team=token.team)


def find_token(secret: str, *, address: str | None = None) -> ApiToken | None:
    """The living token with this secret; notes its use."""
    parts = secret.split("_", 2)
    if len(parts) != 3 or f"{parts[0]}_" != PREFIX or len(parts[1]) > 12 or not parts[1].isalnum():
        return None
    token = ApiToken.objects.select_related("user", "team", "created_by").filter(prefix=parts[1]).first()
    if token is None or not hmac.compare_digest(token.secret_hash, _hash(secret)):
        return None
    now = timezone.now()
    if token.revoked_at is not None or (token.expires_at is not None and token.expires_at <= now):
        return None
    if token.last_used_at is None or now - token.last_used_at > USE_GRANULARITY:
        ApiToken.objects.filter(pk=token.pk).update(last_used_at=now, last_used_from=address)
    return token


def _hash(secret: str) -> str:
    """The secret is 256 random bits: a plain hash is enough, and quick."""
    return hashlib.sha256(secret.encode()).hexdigest()
