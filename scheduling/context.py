"""What every page shows besides its own matter."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest


def portal(request: HttpRequest) -> dict[str, Any]:
    return {}
