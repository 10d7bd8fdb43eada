"""What all operations of the REST API share: strict JSON, keyset pages, exactly-once requests, ETags."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from django.db import connection, transaction
from django.db.models import QuerySet
from rest_framework import exceptions, serializers
from rest_framework.parsers import JSONParser
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from gpuportal.api import problem
from scheduling.services.errors import Conflict
from teams.actors import Actor
from teams.models import IdempotencyKey

PAGE, LARGEST_PAGE = 50, 500
_BAD = re.compile("[\x00\ud800-\udfff]")
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class StrictJSONParser(JSONParser):
    """Texts that no database can keep (NUL, half characters), and bottomless nesting, are refused as bad JSON."""

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        try:
            data = super().parse(stream, media_type, parser_context)
            _refuse_bad_text(data)
        except RecursionError:
            raise exceptions.ParseError("The JSON is nested too deeply.") from None
        return data


def _refuse_bad_text(value: Any) -> None:
    if isinstance(value, str):
        if _BAD.search(value):
            raise exceptions.ParseError("NUL and unpaired surrogates are not allowed in texts.")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _refuse_bad_text(key)
            _refuse_bad_text(inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_bad_text(inner)


class StrictSerializer(serializers.Serializer):  # type: ignore[type-arg]
    """Unknown fields are refused: a mistyped name must not be lost in silence."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            unknown = [key for key in data if key not in self.fields]
            if unknown:
                names = ", ".join(name for name, known in self.fields.items() if not known.read_only)
                raise serializers.ValidationError(
                    {str(key)[:100]: [f"Unknown field; allowed are {names}."] for key in unknown}
                )
        return super().to_internal_value(data)


class ApiView(APIView):
    """Who acts, and the body as checked values."""

    parser_classes = [StrictJSONParser]

    @property
    def actor(self) -> Actor:
        return Actor.of(self.request)  # type: ignore[arg-type]

    def body(self, kind: type[serializers.Serializer]) -> dict[str, Any]:  # type: ignore[type-arg]
        made = kind(data=self.request.data)
        made.is_valid(raise_exception=True)
        return made.validated_data  # type: ignore[no-any-return]


def number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A whole number of the query string. Raises a 400 that says what is allowed."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or not low <= int(text) <= high:
        raise exceptions.ValidationError({name: [f"{text[:40]!r} is not a whole number from {low} to {high:,}."]})
    return int(text)


def page(request: Request, rows: QuerySet[Any], show: Callable[[list[Any]], list[dict[str, Any]]]) -> Response:
    """Newest first, from below ``cursor``: constant in cost however far one goes."""
    limit = number(request, "limit", PAGE, 1, LARGEST_PAGE)
    cursor = number(request, "cursor", 0, 0, 10**18)
    if cursor:
        rows = rows.filter(pk__lt=cursor)
    found = list(rows.order_by("-pk")[: limit + 1])
    more = len(found) > limit
    found = found[:limit]
    return Response({"results": show(found), "next_cursor": str(found[-1].pk) if more else None})


def owner_of(actor: Actor) -> str:
    return f"token:{actor.token.pk}" if actor.token is not None else f"user:{actor.user.pk if actor.user else ''}"


def once(request: Request, actor: Actor, make: Callable[[], tuple[int, Any]]) -> Response:
    """``make`` at most once for the same ``Idempotency-Key``, also when both requests come at the same time.

    The key is written in the transaction of the work: a second request waits at the unique index until the first
    one has committed, and then gives its answer again; if the first fails, nothing of it stays.
    """
    key = request.headers.get("Idempotency-Key")
    if key is None:
        code, data = make()
        return Response(data, status=code)
    if not _KEY.fullmatch(key):
        raise exceptions.ValidationError({"Idempotency-Key": ["1 to 255 visible ASCII characters are allowed."]})
    said = json.dumps([request.path, request.data], sort_keys=True, default=str)
    fingerprint = hashlib.sha256(said.encode()).hexdigest()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(
                """
                INSERT INTO teams_idempotencykey (owner, key, fingerprint, status, created_at)
                VALUES (%s, %s, %s, 0, now()) ON CONFLICT (owner, key) DO NOTHING RETURNING id
                """,
                [owner_of(actor), key, fingerprint],
            )
            mine = cursor.fetchone()
        if mine is None:
            kept = IdempotencyKey.objects.get(owner=owner_of(actor), key=key)
            if kept.fingerprint != fingerprint:
                return problem(
                    422, "Key used before", "This Idempotency-Key came with another request before; take a new one.",
                    [{"field": "Idempotency-Key", "value": key, "message": "Already used for another request."}],
                )  # fmt: skip
            answer = Response(kept.body, status=kept.status)
            answer["Idempotent-Replayed"] = "true"
            return answer
        code, data = make()
        IdempotencyKey.objects.filter(pk=mine[0]).update(status=code, body=json.loads(JSONRenderer().render(data)))
    return Response(data, status=code)


def wanted_version(request: Request, *, required: bool = False) -> int | None:
    """The version of ``If-Match``; ``*`` and nothing mean any. Raises ``Conflict`` for what was never an ETag here."""
    given = request.headers.get("If-Match")
    if given is None and required:
        raise PreconditionRequired
    if given is None or given.strip() == "*":
        return None
    match = re.fullmatch(r'"([0-9]{1,9})"', given.strip(), re.ASCII)
    if match is None:
        raise Conflict(f"{given[:60]!r} is not the ETag of any version.")
    return int(match[1])


class PreconditionRequired(exceptions.APIException):
    status_code = 428
    default_detail = "Send If-Match with the ETag that you have read, or * for any, so that no change is lost."


def rows_of(serializer: type[serializers.Serializer], rows: Iterable[Any]) -> list[dict[str, Any]]:  # type: ignore[type-arg]
    return [dict(serializer(row).data) for row in rows]
