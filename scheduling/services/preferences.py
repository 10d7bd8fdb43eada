"""What a person wants to hear of and how, and the inbox."""

from __future__ import annotations

from collections.abc import Mapping

from django.core import signing
from django.db import transaction
from django.utils import timezone

from scheduling.models import Channel, Event, Notification, Preference
from scheduling.services.errors import InvalidRequest
from scheduling.services.happenings import DEFAULTS, forget_listeners
from scheduling.services.mails import why_no_mail
from teams.models import User

_SALT = "gpuportal.unsubscribe"


def preferences_of(user: User) -> dict[str, str]:
    """Event to channel, for every event."""
    chosen = dict(Preference.objects.filter(user=user).values_list("event", "channel"))
    return {event.value: chosen.get(event.value, DEFAULTS[event]) for event in Event}


@transaction.atomic
def set_preferences(*, user: User, channels: Mapping[str, str]) -> dict[str, str]:
    """Change some; the rest stays. Raises ``InvalidRequest``: for unknown names, and for mail that cannot be sent."""
    errors: dict[str, list[str]] = {}
    before = preferences_of(user)
    no_mail = why_no_mail(user)
    for event, channel in channels.items():
        if event not in Event.values:
            errors[event] = [f"{event!r} is not one of {', '.join(Event.values)}."]
        elif channel not in Channel.values:
            errors[event] = [f"{channel!r} is not one of {', '.join(Channel.values)}."]
        elif channel == Channel.EMAIL and before[event] != Channel.EMAIL and no_mail:
            errors[event] = [no_mail]
    if errors:
        raise InvalidRequest(errors)
    Preference.objects.bulk_create(
        [Preference(user=user, event=event, channel=channel) for event, channel in channels.items()],
        update_conflicts=True,
        unique_fields=["user", "event"],
        update_fields=["channel"],
    )
    forget_listeners()
    return preferences_of(user)


def unsubscribe_token(user: User) -> str:
    """For the link in every mail: says who, and can do nothing else."""
    return signing.dumps(user.pk, salt=_SALT)


def user_of_token(token: str) -> User | None:
    try:
        number = signing.loads(token, salt=_SALT)
    except signing.BadSignature:
        return None
    return User.objects.filter(pk=number).first()


@transaction.atomic
def unsubscribe(user: User) -> int:
    """No more mails of this kind: what came by mail comes into the inbox only. Returns how many choices changed."""
    Notification.objects.filter(user=user, mail_due_at__isnull=False).update(mail_due_at=None)
    return Preference.objects.filter(user=user, channel=Channel.EMAIL).update(channel=Channel.INBOX)


def mark_read(*, user: User, ids: list[int] | None = None) -> int:
    """The named lines of one's own inbox, or all of them; returns how many were unread. A mail that waits for a line
    that has been read is not needed."""
    rows = Notification.objects.filter(user=user, read_at=None)
    if ids is not None:
        rows = rows.filter(pk__in=ids)
    return rows.update(read_at=timezone.now(), mail_due_at=None)


def unread(user: User, most: int = 100) -> int:
    """Unread lines, counted up to ``most``."""
    return Notification.objects.filter(user=user, read_at=None)[:most].count()
