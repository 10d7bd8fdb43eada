"""Filters of the pages: amounts, durations, states in words, and text of users made harmless to read."""

from __future__ import annotations

import unicodedata
from datetime import timedelta
from decimal import Decimal
from typing import Any

from django import template
from django.utils.safestring import SafeString, mark_safe

register = template.Library()

_STATES = {
    "waiting": ("info", "◔"),
    "running": ("good", "▶"),
    "starting": ("info", "◔"),
    "stopping": ("warn", "◼"),
    "succeeded": ("good", "✓"),
    "failed": ("bad", "✗"),
    "timed_out": ("bad", "⏱"),
    "cancelled": ("", "⊘"),
    "preempted": ("warn", "⇄"),
    "node_failed": ("bad", "⚠"),
    "lost": ("bad", "?"),
    "up": ("good", "✓"),
    "down": ("bad", "✗"),
    "drained": ("warn", "◌"),
}


@register.filter
def state(value: str) -> SafeString:
    """A state as mark, word and colour."""
    colour, sign = _STATES.get(str(value), ("", "•"))
    word = str(value).replace("_", " ")
    if str(value) not in _STATES:
        word = "unknown"
    return mark_safe(f'<span class="state {colour}"><span aria-hidden="true">{sign}</span> {word}</span>')


@register.filter
def plain(value: Any) -> str:
    """Control characters and direction overrides made visible: nobody's text changes how the rest reads."""
    text = str(value)
    return "".join(
        character if unicodedata.category(character) not in ("Cc", "Cf") or character in "\n\t" else "\ufffd"
        for character in text
    )


@register.filter
def gpus(value: Any) -> str:
    """GPUs without needless zeros."""
    if value is None:
        return "—"
    number = Decimal(str(value)).normalize()
    return f"{number:f}"


@register.filter
def millions(value: Any) -> str:
    """Millionths of a GPU as GPUs."""
    return gpus(round(Decimal(str(value)) / 1_000_000, 3))


@register.filter
def duration(value: Any) -> str:
    """1 d 3 h, 12 min, 45 s."""
    if value is None:
        return "—"
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    if hours < 48:
        return f"{hours:.1f} h"
    return f"{int(hours // 24)} d {int(hours % 24)} h"
