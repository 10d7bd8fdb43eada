"""Filters of the queue that a person keeps under a name."""

from __future__ import annotations

from django.db import transaction

from scheduling.models import SavedView
from scheduling.services.errors import InvalidRequest
from teams.actors import Actor
from teams.models import User

MOST = 30


def of(actor: Actor) -> list[SavedView]:
    """The views of the person, by name; none for a robot."""
    return list(SavedView.objects.filter(user=actor.user)[:MOST]) if actor.user is not None else []


@transaction.atomic
def save(*, actor: Actor, name: str, query: str) -> SavedView:
    """Keep ``query`` as ``name``; an older one of that name is replaced. Raises ``InvalidRequest``."""
    name = name.strip()
    if actor.user is None:
        raise InvalidRequest({"name": ["Views are kept for people, not for robot tokens."]})
    if not name or len(name) > 60:
        raise InvalidRequest({"name": [f"{name[:80]!r} is not a name of 1 to 60 characters."]})
    if len(query) > 1000:
        raise InvalidRequest(
            {"query": [f"{len(query)} characters of filters are too many; at most 1,000 are allowed."]}
        )
    User.objects.select_for_update().get(pk=actor.user.pk)
    others = SavedView.objects.filter(user=actor.user).exclude(name=name).count()
    if others >= MOST:
        raise InvalidRequest({"name": [f"There are {others} saved views; delete one first, {MOST} are allowed."]})
    row, _ = SavedView.objects.update_or_create(user=actor.user, name=name, defaults={"query": query})
    return row


def delete(*, actor: Actor, number: int) -> None:
    """Remove one of the person's own views; another's is not touched."""
    if actor.user is not None:
        SavedView.objects.filter(user=actor.user, pk=number).delete()
