"""Who acts: a person, a team's robot token, or a part of the system. Every service takes one."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest

from teams.models import ApiToken, User


@dataclass(frozen=True, slots=True)
class Actor:
    """``user`` for people (also through their own token), ``token`` when one was used."""

    user: User | None
    label: str
    token: ApiToken | None = None
    via: str = "system"  # page, api, cli, system
    address: str | None = None
    request_id: str = ""

    @classmethod
    def system(cls, name: str) -> Actor:
        """A part of the portal itself: allowed everything, named in the audit log."""
        return cls(None, name)

    @classmethod
    def person(cls, user: User, via: str = "page") -> Actor:
        return cls(user, user.get_username(), via=via)

    @classmethod
    def of(cls, request: HttpRequest) -> Actor:
        """The person or token behind a request; the caller has made sure that somebody is signed in."""
        token = getattr(request, "auth", None)
        token = token if isinstance(token, ApiToken) else None
        user = request.user if request.user.is_authenticated else None
        if token is not None and token.team_id is not None:
            user = None
        label = user.get_username() if user is not None else f"robot {token.name}" if token is not None else "anonymous"
        return cls(
            user=user,  # type: ignore[arg-type]
            label=label,
            token=token,
            via="api" if request.path.startswith("/api/") else "page",
            address=request.META.get("REMOTE_ADDR") or None,
            request_id=getattr(request, "request_id", ""),
        )

    @property
    def is_system(self) -> bool:
        return self.user is None and self.token is None and self.label != "anonymous"
