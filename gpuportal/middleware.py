"""Small middleware: a name for every request, the viewer's time zone, an own password after a one-time one."""

from __future__ import annotations

import re
import uuid
import zoneinfo
from collections.abc import Callable

import structlog
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone

Handler = Callable[[HttpRequest], HttpResponse]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id(get_response: Handler) -> Handler:
    """Takes over a sensible ``X-Request-ID`` or makes one; it is in the answer, the logs and the audit log."""

    def handle(request: HttpRequest) -> HttpResponse:
        given = request.headers.get("X-Request-ID", "")
        request.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex  # type: ignore[attr-defined]
        structlog.contextvars.bind_contextvars(request_id=request.request_id)  # type: ignore[attr-defined]
        try:
            response = get_response(request)
        finally:
            structlog.contextvars.unbind_contextvars("request_id")
        response["X-Request-ID"] = request.request_id  # type: ignore[attr-defined]
        return response

    return handle


def own_time_zone(get_response: Handler) -> Handler:
    """Pages show times in the zone that the viewer has chosen."""

    def handle(request: HttpRequest) -> HttpResponse:
        zone = getattr(request.user, "time_zone", "") or "UTC"
        try:
            with timezone.override(zoneinfo.ZoneInfo(zone)):
                return get_response(request)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError):
            return get_response(request)

    return handle


def own_password_first(get_response: Handler) -> Handler:
    """Who signed in with a one-time password chooses an own one before anything else."""

    def handle(request: HttpRequest) -> HttpResponse:
        if request.user.is_authenticated and getattr(request.user, "must_change_password", False):
            change = reverse("account_change_password")
            free = (change, reverse("account_logout"), "/static/", "/healthz", "/readyz")
            if not request.path.startswith(free):
                if request.path.startswith("/api/"):
                    return HttpResponse("Choose your own password in the portal first.", status=403)
                return redirect(change)
        return get_response(request)

    return handle
