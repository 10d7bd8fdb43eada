"""Parts of pages that ask again and again: unchanged ones are answered with 304 and cost two or three small queries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils import timezone
from django.utils.cache import get_conditional_response, patch_vary_headers


def poll(request: HttpRequest, version: str, make: Callable[[], HttpResponse]) -> HttpResponseBase:
    """The answer to a poll. ``version`` changes whenever what ``make`` renders would.

    The address, the viewer and the viewer's time zone are part of the tag, so a tag never fits another page.
    """
    parts = (version, request.get_full_path(), str(request.user.pk), timezone.get_current_timezone_name())
    tag = f'W/"{hashlib.blake2b(chr(0).join(parts).encode(), digest_size=16).hexdigest()}"'
    response = get_conditional_response(request, etag=tag) or make()
    response["ETag"] = tag
    return alike(response)


def alike(response: HttpResponseBase) -> HttpResponseBase:
    """For a whole page whose address also answers polls: caches keep the two apart and ask before each use."""
    patch_vary_headers(response, ["HX-Request", "Cookie"])
    response["Cache-Control"] = "private, no-cache"
    return response
