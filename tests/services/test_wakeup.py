"""Wake-ups are sent after the commit, once, and never hold up the request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from kombu.exceptions import OperationalError

from gpuportal.celery import app
from scheduling.services import wakeup

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    tasks: list[str] = []
    monkeypatch.setattr(wakeup._Broker, "quiet_until", 0.0)
    monkeypatch.setattr(app, "send_task", lambda task, **_: tasks.append(task))
    return tasks


def test_a_transaction_wakes_each_step_once_and_after_its_commit(sent: list[str]) -> None:
    with transaction.atomic():
        for _ in range(3):
            wakeup.wake_cycle()
            wakeup.wake_dispatch()
        assert sent == []
    assert sent == ["scheduling.tasks.run_cycle", "scheduling.tasks.dispatch"]


def test_what_is_rolled_back_wakes_nobody_and_what_comes_after_it_does(sent: list[str]) -> None:
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            wakeup.wake_cycle()
            raise ZeroDivisionError
        wakeup.wake_cycle()
    assert sent == ["scheduling.tasks.run_cycle"]


def test_after_a_failure_the_broker_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def fail(task: str, **_: Any) -> None:
        tries.append(task)
        raise OperationalError("connection refused")

    monkeypatch.setattr(wakeup._Broker, "quiet_until", 0.0)
    monkeypatch.setattr(app, "send_task", fail)
    wakeup.wake_cycle()
    wakeup.wake_cycle()
    assert len(tries) == 1
    monkeypatch.setattr(wakeup._Broker, "quiet_until", 0.0)
    wakeup.wake_cycle()
    assert len(tries) == 2


def test_a_broker_that_is_away_costs_the_request_less_than_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's own default is to try for six seconds."""
    with app.connection_for_write() as connection:
        options = connection.transport_options
    from celery import Celery

    away = Celery("away", broker="redis://127.0.0.1:1/0", set_as_current=False)
    away.conf.broker_transport_options = options
    monkeypatch.setattr(app, "send_task", away.send_task)
    monkeypatch.setattr(wakeup._Broker, "quiet_until", 0.0)
    began = time.monotonic()
    wakeup.wake_cycle()
    assert time.monotonic() - began < 2
    assert time.monotonic() < wakeup._Broker.quiet_until
