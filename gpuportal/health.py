"""``/healthz``: the process answers. ``/readyz``: what it needs is there, and the loop turns."""

from __future__ import annotations

from datetime import timedelta

import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone

#: A loop that has not turned for so long is stuck.
LOOP_AGE = timedelta(seconds=60)


def healthz(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok\n", content_type="text/plain")


def readyz(request: HttpRequest) -> HttpResponse:
    checks = {"database": _database(), "migrations": "", "redis": _redis(), "loop": ""}
    if not checks["database"]:
        checks["migrations"] = _migrations()
        checks["loop"] = _loop() if not checks["migrations"] else "not looked at"
    good = not any(checks.values())
    return JsonResponse(
        {"ready": good, "checks": {name: text or "ok" for name, text in checks.items()}}, status=200 if good else 503
    )


def _database() -> str:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError as error:
        return str(error).splitlines()[0]
    return ""


def _migrations() -> str:
    executor = MigrationExecutor(connection)
    missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    return f"{len(missing)} migrations are missing: run manage.py migrate" if missing else ""


def _redis() -> str:
    try:
        client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=2, socket_connect_timeout=2)
        client.ping()
    except (redis.RedisError, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def _loop() -> str:
    from scheduling.models import Cycle

    latest = Cycle.objects.order_by("-id").values_list("started_at", flat=True).first()
    if latest is None:
        return "no cycle has run yet"
    age = timezone.now() - latest
    return f"the last cycle was {age.total_seconds():.0f} s ago" if age > LOOP_AGE else ""
