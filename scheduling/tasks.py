"""Celery tasks: wake-ups and nothing else. Each reads the state, moves one step, and may be lost or doubled."""

from __future__ import annotations

from celery import shared_task

from scheduling.services import (
    activity,
    clock,
    delivery,
    idle,
    lab,
    mails,
    pool_states,
    prometheus,
    report_mails,
    telling,
)
from scheduling.services import cycle as cycle_service
from scheduling.services import demo as demo_service
from scheduling.services import dispatch as dispatch_service
from scheduling.services import reconcile as reconcile_service
from scheduling.services import rollup as rollup_service
from scheduling.services import watch as watch_service
from scheduling.services.housekeeping import housekeeping as do_housekeeping
from scheduling.services.wait_history import note_wait_reasons


@shared_task(name="scheduling.tasks.run_cycle", ignore_result=True)
def run_cycle(asked_at: float | None = None) -> None:
    """Schedule until nothing changes; ask again when the engine says so."""
    outcome = cycle_service.run_cycle(asked_at=asked_at)
    if not outcome.locked_out:
        pool_states.record_pool_states()
    if outcome.locked_out:
        run_cycle.apply_async(kwargs={"asked_at": asked_at}, countdown=1, expires=30)
    elif outcome.wake_in is not None and outcome.wake_in < 5:
        run_cycle.apply_async(countdown=outcome.wake_in, expires=outcome.wake_in + 30)


@shared_task(name="scheduling.tasks.dispatch", ignore_result=True)
def dispatch(asked_at: float | None = None) -> None:
    dispatch_service.dispatch()


@shared_task(name="scheduling.tasks.reconcile", ignore_result=True)
def reconcile(asked_at: float | None = None) -> None:
    reconcile_service.reconcile()


@shared_task(name="scheduling.tasks.housekeeping", ignore_result=True)
def housekeeping() -> None:
    do_housekeeping()


@shared_task(name="scheduling.tasks.feed_demo", ignore_result=True)
def feed_demo() -> None:
    demo_service.feed()


@shared_task(name="scheduling.tasks.rollup", ignore_result=True)
def rollup() -> None:
    """Measurements, spans, hours; then what is judged by them."""
    prometheus.collect()
    activity.build_spans()
    rollup_service.roll_up()
    idle.watch_idle()
    report_mails.send_due(clock.now())


@shared_task(name="scheduling.tasks.run_lab", ignore_result=True)
def run_lab(number: int) -> None:
    lab.run(number)


@shared_task(name="scheduling.tasks.note_waits", ignore_result=True)
def note_waits() -> None:
    note_wait_reasons()


@shared_task(name="scheduling.tasks.watch", ignore_result=True)
def watch() -> None:
    """Long waits, budgets."""
    now = clock.now()
    watch_service.watch_waits(now)
    watch_service.watch_budgets(now)


@shared_task(name="scheduling.tasks.tell", ignore_result=True)
def tell(asked_at: float | None = None) -> None:
    telling.tell()


@shared_task(name="scheduling.tasks.deliver", ignore_result=True)
def deliver(asked_at: float | None = None) -> None:
    delivery.deliver()


@shared_task(name="scheduling.tasks.send_mails", ignore_result=True)
def send_mails() -> None:
    mails.send_mails(clock.now())
