"""Filters of the pages: amounts, durations, states in words, and text of users made harmless to read."""

from __future__ import annotations

import unicodedata
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django import template
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from scheduling.glossary import TERMS

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


@register.simple_tag
def term(anchor: str, text: str = "") -> SafeString:
    """A word of the glossary with its meaning at hand: for the pointer as a title, for everybody as a link."""
    name, meaning = TERMS[anchor]
    return format_html(
        '<a class="term" href="{}#{}" title="{}">{}</a>', reverse("glossary"), anchor, meaning, text or name.lower()
    )


@register.filter
def moment(value: datetime | None) -> str:
    """An instant in the viewer's zone: the time today, with the day otherwise."""
    if value is None:
        return "—"
    local, today = timezone.localtime(value), timezone.localdate()
    return f"{local:%H:%M}" if local.date() == today else f"{local.day} {local:%b %H:%M}"


@register.filter
def start_range(estimate: Any) -> str:
    """A start estimate in words; it may know only one end of its range, or none."""
    if estimate.p50_at is None and estimate.p90_at is None:
        return "not within the time looked at"
    if estimate.p90_at is None:
        return f"about {moment(estimate.p50_at)}, perhaps much later"
    if estimate.p50_at is None:
        return f"by {moment(estimate.p90_at)}"
    if estimate.p50_at == estimate.p90_at:
        return f"about {moment(estimate.p50_at)}"
    return f"about {moment(estimate.p50_at)}, by {moment(estimate.p90_at)} in 9 of 10 cases"
