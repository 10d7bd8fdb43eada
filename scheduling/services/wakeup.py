"""Waking the loop after a commit. Messages are only wake-ups: beat does the same a moment later, so a broker that is
away never fails the request that wanted to wake it, nor holds it up."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from celery import current_app
from django.db import connection, transaction
from kombu.exceptions import OperationalError

log = structlog.get_logger(__name__)

#: After a failure this process sends nothing for so many seconds: connecting to a host that drops packets takes long.
PAUSE = 5.0


class _Broker:
    """Whether it is worth trying."""

    quiet_until = 0.0


def _send(task: str, expires: int) -> None:
    if time.monotonic() < _Broker.quiet_until:
        return
    try:
        current_app.send_task(task, kwargs={"asked_at": time.time()}, expires=expires, retry=False)
    except (OperationalError, OSError, TimeoutError) as error:
        _Broker.quiet_until = time.monotonic() + PAUSE
        log.warning("wakeup.not_sent", task=task, error=str(error), pause=PAUSE)


def _cycle() -> None:
    _send("scheduling.tasks.run_cycle", 30)


def _dispatch() -> None:
    _send("scheduling.tasks.dispatch", 30)


def _reconcile() -> None:
    _send("scheduling.tasks.reconcile", 30)


def _tell() -> None:
    _send("scheduling.tasks.tell", 30)


def _deliver() -> None:
    _send("scheduling.tasks.deliver", 30)


def _after_commit(send: Callable[[], None]) -> None:
    """Once per transaction, however many of its steps ask."""
    if not any(waiting is send for _, waiting, *_ in connection.run_on_commit):
        transaction.on_commit(send, robust=True)


def wake_cycle() -> None:
    _after_commit(_cycle)


def wake_dispatch() -> None:
    _after_commit(_dispatch)


def wake_reconcile() -> None:
    _after_commit(_reconcile)


def wake_tell() -> None:
    _after_commit(_tell)


def wake_deliver() -> None:
    _after_commit(_deliver)
