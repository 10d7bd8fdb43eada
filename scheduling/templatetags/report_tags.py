"""Cells of report tables."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

from django import template
from django.utils import timezone

from scheduling.reports.page import duration, percent

register = template.Library()


@register.filter
def cell(value: Any, decimals: int = 1) -> str:
    """Numbers with thousands separators and the table's decimals; nothing as a dash."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float | Decimal):
        return f"{value:,.{decimals}f}"
    if isinstance(value, datetime):
        return f"{timezone.localtime(value):%Y-%m-%d %H:%M}"
    return str(value)


@register.filter
def headings(table: Any) -> list[tuple[str, bool]]:
    """Columns, and whether they hold numbers: those stand to the right."""
    kept = isinstance(table, dict)
    columns, rows = (table["columns"], table["rows"]) if kept else (table.columns, table.rows)
    return [(column, bool(rows) and place > 0 and is_number(rows[0][place])) for place, column in enumerate(columns)]


@register.filter
def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


@register.filter
def seconds(value: Any) -> str:
    return "–" if value is None or value == "" else duration(float(value))


@register.filter
def share(value: Any) -> str:
    return percent(value) if isinstance(value, int | float) else "–"
