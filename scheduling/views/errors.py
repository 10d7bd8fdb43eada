"""Error pages that help: what happened, and where to go on. Scripts get problem details instead."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render


def _answer(request: HttpRequest, code: int, title: str, text: str) -> HttpResponse:
    if request.path.startswith("/api/"):
        body = {"type": "about:blank", "title": title, "status": code, "detail": text}
        return JsonResponse(body, status=code, content_type="application/problem+json")
    return render(request, "errors/error.html", {"code": code, "title": title, "text": text}, status=code)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return _answer(request, 400, "Bad request", "The address or the form was not complete. Please try again.")


def forbidden(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    text = str(exception or "") or "Your role does not allow this. The lead of your team or an administrator can help."
    return _answer(request, 403, "Not allowed", text)


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return _answer(request, 404, "Not found", "There is no such page or object, or it belongs to another team.")


def server_error(request: HttpRequest) -> HttpResponse:
    name = getattr(request, "request_id", "")
    text = f"Something went wrong on our side. Tell an administrator this number: {name}"
    return _answer(request, 500, "Internal error", text)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return _answer(request, 403, "The form has expired", "Go back, reload the page and send it again.")
