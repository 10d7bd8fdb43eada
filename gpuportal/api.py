"""The frame of the REST API: errors as RFC 9457 problem details."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404
from rest_framework import exceptions, status
from rest_framework.response import Response
from rest_framework.views import exception_handler

from scheduling.services.errors import Conflict, InvalidRequest

PROBLEM = "application/problem+json"


def problem(code: int, title: str, detail: str, errors: list[dict[str, Any]] | None = None, **more: Any) -> Response:
    body = {"type": "about:blank", "title": title, "status": code, "detail": detail, **more}
    if errors:
        body["errors"] = errors
    return Response(body, status=code, content_type=PROBLEM)


def _flatten(detail: Any, path: str = "") -> list[dict[str, Any]]:
    if isinstance(detail, dict):
        return [row for key, value in detail.items() for row in _flatten(value, f"{path}.{key}" if path else str(key))]
    if isinstance(detail, list):
        rows: list[dict[str, Any]] = []
        for at, value in enumerate(detail):
            nested = isinstance(value, dict | list)
            rows += _flatten(value, f"{path}[{at}]" if nested else path)
        return rows
    return [{"field": path or "body", "message": str(detail)}]


def problem_details(error: Exception, context: dict[str, Any]) -> Response | None:
    """DRF's exception handler: every error names field, value and what is allowed."""
    if isinstance(error, InvalidRequest):
        rows = [{"field": field, "message": text} for field, texts in error.errors.items() for text in texts]
        return problem(422, "Invalid request", "Some fields cannot be accepted.", rows)
    if isinstance(error, Conflict):
        return problem(409, "Conflict", str(error))
    if isinstance(error, PermissionDenied):
        return problem(403, "Forbidden", str(error) or "You may not do this.")
    if isinstance(error, Http404):
        return problem(404, "Not found", str(error) or "There is no such object.")
    if isinstance(error, exceptions.ValidationError):
        return problem(400, "Bad request", "Some fields are not valid.", _flatten(error.detail))
    answer = exception_handler(error, context)
    if answer is None:
        return None
    title = {
        401: "Not signed in",
        403: "Forbidden",
        404: "Not found",
        405: "Method not allowed",
        429: "Too many requests",
    }
    detail = answer.data.get("detail", "") if isinstance(answer.data, dict) else str(answer.data)
    made = problem(answer.status_code, title.get(answer.status_code, "Error"), str(detail))
    for name in ("WWW-Authenticate", "Retry-After", "Allow"):
        if name in answer:
            made[name] = answer[name]
    return made


def not_found(name: str, value: object) -> exceptions.NotFound:
    return exceptions.NotFound(f"There is no {name} {value}.")


assert status.HTTP_422_UNPROCESSABLE_ENTITY == 422
