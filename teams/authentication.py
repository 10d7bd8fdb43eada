"""Signing in to the API with a token: ``Authorization: Bearer gpu_…``."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import authentication, exceptions
from rest_framework.request import Request

from teams.models import ApiToken, User
from teams.services.tokens import find_token


class RobotUser:
    """Stands for a team's robot where Django wants a user."""

    is_authenticated = True
    is_active = True
    is_anonymous = False
    must_change_password = False
    time_zone = "UTC"

    def __init__(self, token: ApiToken) -> None:
        self.token = token
        self.pk = f"robot-{token.pk}"

    def get_username(self) -> str:
        return f"robot {self.token.name}"


class TokenAuthentication(authentication.BaseAuthentication):
    """A person's or a team robot's token; revoked and expired ones are refused."""

    keyword = "Bearer"

    def authenticate(self, request: Request) -> tuple[User | RobotUser, ApiToken] | None:
        header = authentication.get_authorization_header(request).decode("latin-1")
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer":
            return None
        token = find_token(secret.strip(), address=request.META.get("REMOTE_ADDR"))
        if token is None:
            raise exceptions.AuthenticationFailed("The token is unknown, expired or revoked.")
        if token.user is not None:
            if not token.user.is_active:
                raise exceptions.AuthenticationFailed("The account of this token is closed.")
            return token.user, token
        return RobotUser(token), token

    def authenticate_header(self, request: Request) -> str:
        return self.keyword


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = TokenAuthentication
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer"}
