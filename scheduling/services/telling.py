"""From the outbox to whom it concerns: deliveries for webhooks, lines for inboxes, in one transaction with the end of
the outbox row, so that nothing is lost and nothing doubled by a crash in between.

Per batch the number of queries is constant, however many happenings, webhooks and people there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db import transaction

from scheduling.models import Channel, Delivery, Event, Happening, Notification, Preference, Webhook
from scheduling.services import clock
from scheduling.services.happenings import DEFAULTS
from scheduling.services.mails import can_mail
from scheduling.services.wakeup import wake_deliver
from scheduling.services.webhooks import message
from scheduling.services.words import Words, data_of, words_of
from teams.models import Membership, Role, StaffRole, Team, User

BATCH = 1000
#: So many of one event for one person in a batch are one line.
GROUP_FROM = 5
#: Lines that such a line names.
NAMED = 10
#: A mail waits so long for what else happens.
DIGEST = timedelta(seconds=60)


def tell() -> int:
    """Empty the outbox; returns how many happenings were told."""
    told = 0
    while True:
        count = _batch()
        told += count
        if count < BATCH:
            return told


@transaction.atomic
def _batch() -> int:
    rows = list(
        Happening.objects.select_for_update(of=("self",), skip_locked=True)
        .select_related("team", "job_event__job__team", "job_event__job__owner", "job_event__attempt")
        .order_by("id")[:BATCH]
    )
    if not rows:
        return 0
    now = clock.now()
    tree = _Tree()
    deliveries = list(_deliveries(rows, tree, now))
    if deliveries:
        Delivery.objects.bulk_create(deliveries, batch_size=1000)
        wake_deliver()
    Notification.objects.bulk_create(_notifications(rows, tree, now), batch_size=1000)
    Happening.objects.filter(pk__in=[row.pk for row in rows]).delete()
    return len(rows)


class _Tree:
    """The teams above each team, itself first."""

    def __init__(self) -> None:
        self._parents = dict(Team.objects.values_list("id", "parent_id"))

    def path(self, team: int | None) -> list[int]:
        found = []
        while team is not None:
            found.append(team)
            team = self._parents.get(team)
        return found


def _deliveries(rows: list[Happening], tree: _Tree, now: datetime) -> Iterable[Delivery]:
    """A webhook hears of its team and those below; one without a team, of everything."""
    listening: dict[tuple[int | None, str], list[Webhook]] = {}
    for hook in Webhook.objects.filter(enabled=True):
        for event in hook.events:
            listening.setdefault((hook.team_id, event), []).append(hook)
    if not listening:
        return
    for row in rows:
        scopes = [None, *tree.path(row.team_id)]
        hooks = [hook for scope in scopes for hook in listening.get((scope, row.event), ())]
        if hooks:
            body = message(row.event, row.at, data_of(row), number=str(row.uuid))
            for hook in hooks:
                yield Delivery(webhook=hook, event=row.event, body=body, due_at=now, created_at=now)


def _notifications(rows: list[Happening], tree: _Tree, now: datetime) -> list[Notification]:
    audience = _Audience(rows, tree)
    found: dict[tuple[int, str], list[Happening]] = {}
    for row in rows:
        for user in audience.of(row):
            found.setdefault((user, row.event), []).append(row)
    made = []
    for (user, event), happenings in found.items():
        channel = audience.channel(user, event)
        if channel == Channel.OFF:
            continue
        due = now + DIGEST if channel == Channel.EMAIL and audience.mailable(user) else None
        made += [
            Notification(
                user_id=user, event=event, at=at, title=words.title, text=words.text, path=words.path, count=count,
                mail_due_at=due,
            )
            for words, at, count in _lines(event, happenings)
        ]  # fmt: skip
    return made


def _lines(event: str, happenings: list[Happening]) -> list[tuple[Words, datetime, int]]:
    """One line each, or one for all when they are many."""
    if len(happenings) < GROUP_FROM:
        return [(words_of(row), row.at, 1) for row in happenings]
    texts = [words_of(row).title for row in happenings[:NAMED]]
    if len(happenings) > NAMED:
        texts.append(f"… and {len(happenings) - NAMED} more")
    what = {
        Event.JOB_STARTED: "jobs started",
        Event.JOB_ENDED: "jobs succeeded or were cancelled",
        Event.JOB_FAILED: "jobs failed",
        Event.JOB_EVICTED: "jobs were evicted",
        Event.JOB_WAITING_LONG: "jobs have waited for long",
    }.get(Event(event), "happenings: " + Event(event).label.lower())
    path = "/me/" if event.startswith("job.") else ""
    words = Words(f"{len(happenings)} {what}", "\n".join(texts), path)
    return [(words, max(row.at for row in happenings), len(happenings))]


class _Audience:
    """Who is told of what, and how. A job's happenings go to its owner, for as long as the owner may see the team;
    those of a team to the leads of it and above it and to managers; the rest to administrators."""

    def __init__(self, rows: list[Happening], tree: _Tree) -> None:
        self._tree = tree
        owners = {row.job_event.job.owner_id for row in rows if row.job_event is not None}
        teams = {team for row in rows if row.job_event is None for team in tree.path(row.team_id)}
        self._seen: dict[int, set[int]] = {}
        for user, team in Membership.objects.filter(user_id__in=owners).values_list("user_id", "team_id"):
            self._seen.setdefault(user, set()).add(team)
        self._leads: dict[int, set[int]] = {}
        if teams:
            leads = Membership.objects.filter(team_id__in=teams, role=Role.LEAD).values_list("team_id", "user_id")
            for team, user in leads:
                self._leads.setdefault(team, set()).add(user)
        staff = User.objects.exclude(staff_role=StaffRole.NONE) | User.objects.filter(is_superuser=True)
        self._staff = {user.pk: user for user in staff}
        everybody = owners.union(self._staff, *self._leads.values())
        self._people = {user.pk: user for user in User.objects.filter(pk__in=everybody, is_active=True)}
        self._channels = {
            (user, event): channel
            for user, event, channel in Preference.objects.filter(user_id__in=everybody).values_list(
                "user_id", "event", "channel"
            )
        }

    def of(self, row: Happening) -> list[int]:
        if row.job_event is not None:
            owner = row.job_event.job.owner
            seen = self._seen.get(owner.pk, set())
            may_see = owner.pk in self._staff or any(team in seen for team in self._tree.path(row.team_id))
            itself = row.job_event.actor_label == owner.username  # who did it knows
            return [owner.pk] if owner.pk in self._people and may_see and not itself else []
        path = self._tree.path(row.team_id)
        found = {user for team in path for user in self._leads.get(team, ())}
        if row.event != Event.WEBHOOK_DISABLED:
            found |= {user for user, person in self._staff.items() if person.staff_role == StaffRole.MANAGER}
        elif row.team_id is None:
            found |= {user for user, person in self._staff.items() if person.is_portal_admin}
        return sorted(user for user in found if user in self._people)

    def channel(self, user: int, event: str) -> str:
        return self._channels.get((user, event), DEFAULTS[event])

    def mailable(self, user: int) -> bool:
        return can_mail(self._people[user])
