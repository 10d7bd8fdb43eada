"""Waking the loop after a commit. Messages are only wake-ups: beat does the same a moment later, so a broker that is
away never fails the request that wanted to wake it."""

from __future__ import annotations

import time
from functools import partial

import structlog
from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError

log = structlog.get_logger(__name__)


def _send(task: str, expires: int) -> None:
    try:
        current_app.send_task(task, kwargs={"asked_at": time.time()}, expires=expires, retry=False)
    except (OperationalError, OSError, TimeoutError) as error:
        log.warning("wakeup.not_sent", task=task, error=str(error))


def _after_commit(task: str, expires: int) -> None:
    transaction.on_commit(partial(_send, task, expires), robust=True)


def wake_cycle() -> None:
    _after_commit("scheduling.tasks.run_cycle", 30)


def wake_dispatch() -> None:
    _after_commit("scheduling.tasks.dispatch", 30)


def wake_reconcile() -> None:
    _after_commit("scheduling.tasks.reconcile", 30)
