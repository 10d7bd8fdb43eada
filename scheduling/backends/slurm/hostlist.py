"""Slurm's host list expressions: ``gpu[01-03,7],login`` names five hosts."""

from __future__ import annotations

from itertools import product

#: A list longer than this is taken for a mistake.
LONGEST = 100_000


def expand(text: str) -> list[str]:
    """Names in the order written. Raises ``ValueError`` when brackets or ranges make no sense."""
    hosts: list[str] = []
    for part in _split(text):
        hosts.extend(_expand_one(part))
        if len(hosts) > LONGEST:
            raise ValueError(f"host list {text[:80]!r} names more than {LONGEST} hosts")
    return hosts


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, current = [], 0, ""
    for letter in text.strip():
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        if depth not in (0, 1):
            raise ValueError(f"brackets do not match in host list {text!r}")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    if depth:
        raise ValueError(f"brackets do not match in host list {text!r}")
    return [part for part in (*parts, current) if part]


def _expand_one(part: str) -> list[str]:
    pieces: list[list[str]] = []
    rest = part
    while "[" in rest:
        before, _, after = rest.partition("[")
        inside, _, rest = after.partition("]")
        pieces.append([before])
        pieces.append([name for item in inside.split(",") for name in _range(item, part)])
    pieces.append([rest])
    return ["".join(combination) for combination in product(*pieces)]


def _range(item: str, whole: str) -> list[str]:
    low, dash, high = item.partition("-")
    if not dash:
        high = low
    if not (low.isdigit() and high.isdigit()) or int(high) < int(low):
        raise ValueError(f"{item!r} is no range in host list {whole!r}")
    if int(high) - int(low) >= LONGEST:
        raise ValueError(f"host list {whole!r} names more than {LONGEST} hosts")
    width = len(low)
    return [f"{number:0{width}d}" for number in range(int(low), int(high) + 1)]
