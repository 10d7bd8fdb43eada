"""What every page shows besides its own matter."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.functional import SimpleLazyObject

from gpuportal import __version__

MENU = (
    ("Overview", "overview", "/"),
    ("Queue", "queue", "/queue/"),
    ("New job", "submit", "/jobs/new/"),
    ("Cluster", "cluster-map", "/clusters/"),
    ("Reports", "reports:index", "/reports/"),
)


def portal(request: HttpRequest) -> dict[str, Any]:
    """Lazy where it costs a query: error pages of a broken database still show."""
    user = getattr(request, "user", None)
    now = timezone.localtime()
    signed_in = user is not None and user.is_authenticated
    return {
        "portal": {
            "menu": _menu(request) if signed_in else [],
            "scheme": getattr(user, "color_scheme", "auto"),
            "zone": timezone.get_current_timezone_name(),
            "offset": f"UTC{now:%z}",
            "version": __version__,
            "notices": SimpleLazyObject(_notices) if signed_in else [],
        }
    }


def _menu(request: HttpRequest) -> list[dict[str, Any]]:
    items = []
    for name, view, path in MENU:
        try:
            url = reverse(view)
        except NoReverseMatch:
            continue
        current = request.path == path if path == "/" else request.path.startswith(path)
        items.append({"name": name, "url": url, "current": current})
    return items


@dataclass(frozen=True, slots=True)
class Notice:
    """A line on top of every page: a cluster that cannot be reached (its name as ``text``), or an announcement."""

    text: str
    level: str
    since: datetime | None


def _notices() -> list[Notice]:
    """What is wrong first, then what was announced: one query for every page."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            (SELECT name, 'trouble', unreachable_since FROM scheduling_cluster
             WHERE enabled AND NOT reachable ORDER BY name LIMIT 10)
            UNION ALL
            (SELECT text, level, begins_at FROM teams_announcement
             WHERE begins_at <= %(now)s AND ends_at > %(now)s ORDER BY begins_at DESC, id DESC LIMIT 5)
            """,
            {"now": timezone.now()},
        )
        return [Notice(*row) for row in cursor.fetchall()]
