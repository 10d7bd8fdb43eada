"""What has to be done now and then, none of it urgent."""

from __future__ import annotations

from datetime import timedelta

from scheduling.models import Command, Cycle, Delivery, Job, Notification, ReasonGroup
from scheduling.services import clock
from scheduling.services.replay import forget_old_snapshots
from teams.models import IdempotencyKey
from teams.services.requests import expire_requests

#: Cycles that decided nothing are kept this long: enough for a chart of cycle times.
KEEP_EMPTY_CYCLES = timedelta(days=2)
KEEP_GROUPS = timedelta(days=1)
KEEP_COMMANDS = timedelta(days=30)
KEEP_KEYS = timedelta(days=2)
KEEP_DELIVERIES = timedelta(days=14)
KEEP_NOTIFICATIONS = timedelta(days=90)


def housekeeping() -> None:
    now = clock.now()
    forget_old_snapshots()
    expire_requests()
    newest = Cycle.objects.order_by("-id").values_list("id", flat=True).first() or 0
    Cycle.objects.filter(
        started_at__lt=now - KEEP_EMPTY_CYCLES, starts=0, evictions=0, decisions=None, id__lt=newest
    ).delete()
    used = Job.objects.filter(state="waiting", reason_group__isnull=False).values("reason_group_id")
    ReasonGroup.objects.filter(worked_out_at__lt=now - KEEP_GROUPS).exclude(pk__in=used).delete()
    Command.objects.filter(done_at__lt=now - KEEP_COMMANDS).exclude(state=Command.State.PENDING).delete()
    IdempotencyKey.objects.filter(created_at__lt=now - KEEP_KEYS).delete()
    Delivery.objects.filter(created_at__lt=now - KEEP_DELIVERIES).delete()
    Notification.objects.filter(at__lt=now - KEEP_NOTIFICATIONS).delete()
