"""Reading the environment: values checked, unknown names refused."""

from __future__ import annotations

import base64
import contextlib
import difflib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from gpuportal.errors import SetupError

T = TypeVar("T")

#: Every GPUPORTAL_ name that is read anywhere.
_read: set[str] = {"GPUPORTAL_TRACEBACK", "GPUPORTAL_SUPERVISED", "GPUPORTAL_BIND"}

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def text(name: str, default: str = "") -> str:
    _read.add(name)
    return os.environ.get(name, default)


def boolean(name: str, default: bool = False) -> bool:
    value = text(name, "1" if default else "0").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SetupError(f"{name}={os.environ[name]!r} is not one of true, false (or 1, 0, yes, no)")


def integer(name: str, default: int, low: int, high: int) -> int:
    value = text(name, str(default))
    try:
        number = int(value)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise SetupError(f"{name}={value!r} is not a whole number from {low} to {high}")
    return number


def choice(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = text(name, default)
    if value not in allowed:
        raise SetupError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value


def names(name: str, default: str = "") -> list[str]:
    return [part.strip() for part in text(name, default).split(",") if part.strip()]


def url(name: str, schemes: tuple[str, ...]) -> str:
    """An address, or "" when it is not set."""
    value = text(name)
    if value and urlsplit(value).scheme not in schemes:
        raise SetupError(f"{name}={value!r} does not begin with {' or '.join(s + '://' for s in schemes)}")
    return value


def folder(name: str, default: Path) -> Path:
    """A folder that can be written to; it is made."""
    path = Path(text(name, str(default))).expanduser().resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise SetupError(f"{name}: the folder {path} cannot be written to: {error.strerror or error}") from None
    return path


def kept_secret(name: str, path: Path, make: Callable[[], str], check: Callable[[str], bool] = bool) -> str:
    """From the environment, else from a file in the data folder that is made once, readable by its owner only."""
    value = text(name)
    if value:
        if not check(value):
            raise SetupError(f"{name} is not a key of the right form; leave it unset to have one made in {path}")
        return value
    try:
        if not path.exists():
            _write_once(path, make())
        value = path.read_text().strip()
    except OSError as error:
        raise SetupError(f"{name}: {path} cannot be read: {error.strerror or error}") from None
    if not check(value):
        raise SetupError(f"{name}: {path} holds no usable key; restore it, or remove it to have a new one made")
    return value


def _write_once(path: Path, value: str) -> None:
    """The whole file or none, and the first of several at the same time wins."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink()


def groups(name: str) -> str:
    """A JSON object from names to words, as text."""
    value = text(name, "{}")
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise SetupError(f"{name}={value!r} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise SetupError(f'{name}={value!r} is not a JSON object such as {{"ml-leads": "vision:lead"}}')
    return value


def is_fernet_key(value: str) -> bool:
    try:
        return len(base64.urlsafe_b64decode(value.encode())) == 32
    except ValueError:
        return False


def random_key() -> str:
    return secrets.token_urlsafe(50)


def fernet_key() -> str:
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()


def known() -> frozenset[str]:
    """Every name that has been read so far."""
    return frozenset(_read)


def refuse_unknown(prefix: str = "GPUPORTAL_") -> None:
    """A typo in a name would be a setting that is silently not there."""
    for name in sorted(os.environ):
        if name.startswith(prefix) and name not in _read:
            near = difflib.get_close_matches(name, sorted(_read), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SetupError(f"the environment variable {name} is not known{hint}")
