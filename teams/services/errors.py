"""Errors that callers of the team services can act on."""

from __future__ import annotations


class Invalid(ValueError):
    """Bad input: messages by field, each naming the value and what is allowed."""

    def __init__(self, errors: dict[str, list[str]]) -> None:
        self.errors = errors
        super().__init__("; ".join(f"{field}: {' '.join(messages)}" for field, messages in errors.items()))
