"""The Celery application. Messages are only wake-ups: beat wakes the loop regularly, events wake it at once."""

from __future__ import annotations

from celery import Celery
from celery.signals import setup_logging

app = Celery("gpuportal")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["scheduling", "teams"])


@setup_logging.connect
def _logging(**_: object) -> None:
    """Django's logging settings hold for the workers too."""
    import logging.config

    from django.conf import settings

    logging.config.dictConfig(settings.LOGGING)
