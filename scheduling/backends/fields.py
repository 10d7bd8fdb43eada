"""Settings of a cluster connection: what a back end asks for, and how bad input is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scheduling.backends.base import BackendError

Kind = Literal["text", "choice", "integer", "boolean", "list", "multiline"]


class ConfigError(BackendError):
    """A setting is missing or wrong. ``errors`` maps the field to what is wrong with it."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        self.errors = dict(errors)
        super().__init__("; ".join(f"{field}: {message}" for field, message in self.errors.items()))


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One setting, as the connect page and ``connect_cluster`` ask for it."""

    name: str
    label: str
    help: str
    kind: Kind = "text"
    #: Stored encrypted and never shown again.
    secret: bool = False
    required: bool = False
    choices: tuple[str, ...] = ()
    default: str | int | bool | tuple[str, ...] | None = None
    minimum: int | None = None
    maximum: int | None = None


#: Read by the dispatch service, the same for every kind of cluster.
DISPATCH_PARALLEL = ConfigField(
    "dispatch_parallel",
    "Commands at once",
    "How many commands are sent at the same time.",
    kind="integer",
    minimum=1,
    maximum=32,
    default=1,
)


class _Wrong(Exception):
    """One value is not what its field wants."""


Value = str | int | bool | tuple[str, ...] | None


def read_settings(
    fields: Sequence[ConfigField], config: Mapping[str, object], secret: Mapping[str, object] | None
) -> dict[str, Value]:
    """Values by field name, defaults filled in. Raises ``ConfigError`` naming every wrong or unknown field at once."""
    given: dict[str, object] = dict(config)
    errors: dict[str, str] = {}
    for name, value in (secret or {}).items():
        given[name] = value
    known = {field.name for field in fields}
    for name in given:
        if name not in known:
            errors[name] = f"unknown setting; allowed are {', '.join(sorted(known))}"
    values: dict[str, Value] = {}
    for field in fields:
        try:
            values[field.name] = _read(field, given.get(field.name))
        except _Wrong as error:
            errors[field.name] = str(error)
        if field.secret and field.name in config:
            errors[field.name] = "is secret: it belongs to the secret settings, which are stored encrypted"
    if errors:
        raise ConfigError(errors)
    return values


def _read(field: ConfigField, raw: object) -> Value:
    if raw is None or raw == "" or raw == []:
        if field.required:
            raise _Wrong("is required")
        return field.default
    shown = "the value given" if field.secret else repr(raw)
    if field.kind == "boolean":
        if isinstance(raw, bool):
            return raw
        if str(raw).lower() in ("true", "yes", "on", "1"):
            return True
        if str(raw).lower() in ("false", "no", "off", "0"):
            return False
        raise _Wrong(f"{shown} is not yes or no")
    if field.kind == "integer":
        return _integer(field, raw, shown)
    if field.kind == "list":
        items = raw if isinstance(raw, (list, tuple)) else str(raw).replace(",", "\n").splitlines()
        return tuple(str(item).strip() for item in items if str(item).strip())
    if not isinstance(raw, str):
        raise _Wrong(f"{shown} is not a text")
    if field.kind == "choice" and raw not in field.choices:
        raise _Wrong(f"{shown} is not one of {', '.join(field.choices)}")
    return raw if field.kind == "multiline" else raw.strip()


def _integer(field: ConfigField, raw: object, shown: str) -> int:
    if isinstance(raw, bool):
        raise _Wrong(f"{shown} is not a whole number")
    try:
        number = int(str(raw).strip())
    except ValueError:
        raise _Wrong(f"{shown} is not a whole number") from None
    low, high = field.minimum, field.maximum
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = " and ".join(
            text
            for text in (
                f"at least {low}" if low is not None else "",
                f"at most {high}" if high is not None else "",
            )
            if text
        )
        raise _Wrong(f"{number} is not allowed; it must be {bounds}")
    return number
