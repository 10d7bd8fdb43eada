"""What every page shows besides its own matter."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.functional import SimpleLazyObject

from gpuportal import __version__
from scheduling.models import Cluster
from teams.models import Announcement

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
            "troubles": SimpleLazyObject(_troubles) if signed_in else [],
            "announcements": SimpleLazyObject(_announcements) if signed_in else [],
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


def _troubles() -> list[Cluster]:
    return list(Cluster.objects.filter(enabled=True, reachable=False)[:10])


def _announcements() -> list[Announcement]:
    now = timezone.now()
    return list(Announcement.objects.filter(begins_at__lte=now, ends_at__gt=now)[:5])
