"""Reading YAML with an error that names file, line and key for everything that is not as it should be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import yaml

T = TypeVar("T")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "GB": 10**9, "MB": 10**6, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|TiB|GB|MB|TB)")
_RANGE = re.compile(r"^(.*)\[(\d+)-(\d+)\](.*)$")


class ScenarioError(ValueError):
    """A scenario file that cannot be used: where, which key, and what is allowed."""

    def __init__(self, message: str, *, file: str, line: int, key: str) -> None:
        self.file, self.line, self.key, self.message = file, line, key, message
        super().__init__(f"{file}:{line}: {key}: {message}" if key else f"{file}:{line}: {message}")


class Value:
    """A YAML node with its place in the file."""

    def __init__(self, node: yaml.Node, file: str, path: str = "") -> None:
        self.node, self.file, self.path = node, file, path

    @property
    def line(self) -> int:
        return int(self.node.start_mark.line) + 1

    def error(self, message: str) -> ScenarioError:
        return ScenarioError(message, file=self.file, line=self.line, key=self.path)

    @property
    def raw(self) -> Any:
        """The scalar as YAML reads it; raises for lists and mappings."""
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.error(f"a single value is expected here, not {self.kind}")
        return _construct(self.node)

    @property
    def kind(self) -> str:
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list"
        return f"{self.node.value!r}"

    # -- containers --------------------------------------------------------------------------------------------

    def is_mapping(self) -> bool:
        return isinstance(self.node, yaml.MappingNode)

    def is_list(self) -> bool:
        return isinstance(self.node, yaml.SequenceNode)

    def items(self) -> Iterator[tuple[str, Value]]:
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"a mapping (key: value) is expected here, not {self.kind}")
        seen: set[str] = set()
        for key_node, value_node in self.node.value:
            key = str(key_node.value)
            path = f"{self.path}.{key}" if self.path else key
            if key in seen:
                raise ScenarioError(
                    "the key is given twice", file=self.file, line=key_node.start_mark.line + 1, key=path
                )
            seen.add(key)
            yield key, Value(value_node, self.file, path)

    def fields(self, *allowed: str) -> dict[str, Value]:
        """A mapping with known keys only."""
        found = {}
        for key, value in self.items():
            if key not in allowed:
                raise value.error(f"unknown key; allowed are {', '.join(allowed)}")
            found[key] = value
        return found

    def elements(self) -> list[Value]:
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"a list is expected here, not {self.kind}")
        return [Value(node, self.file, f"{self.path}[{at}]") for at, node in enumerate(self.node.value)]

    # -- scalars -----------------------------------------------------------------------------------------------

    def text(self) -> str:
        raw = self.raw
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise self.error(f"a text is expected, not {raw!r}")
        return str(self.node.value)

    def integer(self, least: int = 0, most: int | None = None) -> int:
        raw = self.raw
        if isinstance(raw, bool) or not isinstance(raw, int):
            raise self.error(f"a whole number is expected, not {self.kind}")
        return int(self._within(raw, least, most))

    def number(self, least: float = 0, most: float | None = None) -> float:
        raw = self.raw
        if isinstance(raw, bool) or not isinstance(raw, int | float):
            raise self.error(f"a number is expected, not {self.kind}")
        return float(self._within(raw, least, most))

    def _within(self, raw: float, least: float, most: float | None) -> float:
        if raw < least or (most is not None and raw > most) or raw != raw:
            bounds = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise self.error(f"{raw!r} is out of range: {bounds}")
        return raw

    def boolean(self) -> bool:
        raw = self.raw
        if not isinstance(raw, bool):
            raise self.error(f"true or false is expected, not {self.kind}")
        return raw

    def choice(self, allowed: type[T]) -> T:
        """A member of a StrEnum."""
        text = self.text()
        try:
            return allowed(text)  # type: ignore[call-arg]
        except ValueError:
            names = ", ".join(str(member.value) for member in allowed)  # type: ignore[attr-defined]
            raise self.error(f"{text!r} is not one of {names}") from None

    def duration(self, least: float = 0) -> float:
        """Seconds: a number, or "90s", "5m", "2h", "7d", "1h30m"."""
        raw = self.raw
        if not isinstance(raw, bool) and isinstance(raw, int | float):
            return float(self._within(raw, least, None))
        text = str(raw).replace(" ", "")
        parts = _DURATION.findall(text)
        if not parts or "".join(n + u for n, u in parts) != text:
            raise self.error(f'a duration is expected (seconds, or for example "90m", "2h", "7d"), not {self.kind}')
        return float(self._within(sum(float(n) * _UNITS[u] for n, u in parts), least, None))

    def size(self) -> int:
        """Bytes, for example 80GiB."""
        raw = self.raw
        if isinstance(raw, int) and not isinstance(raw, bool) and raw > 0:
            return raw
        match = _SIZE.fullmatch(str(raw))
        if match is None:
            raise self.error(f"a size is expected, for example 80GiB, not {self.kind}")
        return int(float(match[1]) * _SIZES[match[2]])

    def instant(self) -> datetime:
        raw = self.raw
        if isinstance(raw, datetime):
            return raw.replace(tzinfo=UTC) if raw.tzinfo is None else raw.astimezone(UTC)
        try:
            parsed = datetime.fromisoformat(str(raw))
        except ValueError:
            raise self.error(f"an instant like 2026-03-02T09:00:00Z is expected, not {self.kind}") from None
        return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)

    def names(self) -> list[str]:
        """A name, a range "a[1-4]", or a list of either."""
        if self.is_list():
            return [name for element in self.elements() for name in element.names()]
        return expand(self)

    def each(self, read: Callable[[Value], T]) -> list[T]:
        return [read(element) for element in self.elements()]


def expand(value: Value) -> list[str]:
    """``a[1-4]`` -> a1, a2, a3, a4 (leading zeros are kept)."""
    text = value.text()
    match = _RANGE.match(text)
    if match is None:
        if not text:
            raise value.error("a name is expected")
        return [text]
    first, last = int(match[2]), int(match[3])
    if last < first or last - first > 99_999:
        raise value.error(f"the range {text!r} runs backwards or is longer than 100,000")
    width = len(match[2]) if match[2].startswith("0") else 0
    return [f"{match[1]}{number:0{width}d}{match[4]}" for number in range(first, last + 1)]


def _construct(node: yaml.ScalarNode) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError):
        return node.value
    finally:
        loader.dispose()


def load(text: str, file: str) -> Value:
    """The document of a file; syntax errors name their line too."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ScenarioError(f"not YAML: {problem}", file=file, line=line, key="") from None
    if node is None:
        raise ScenarioError("the file is empty", file=file, line=1, key="")
    return Value(node, file)
