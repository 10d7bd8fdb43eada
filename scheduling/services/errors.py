"""Errors that callers of the services can act on."""

from __future__ import annotations

from teams.services.errors import Invalid as InvalidRequest


class Conflict(Exception):
    """The object is not (any more) in a state that allows this, or was changed meanwhile."""


__all__ = ["Conflict", "InvalidRequest"]
