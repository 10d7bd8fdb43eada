"""Reports as files: CSV (streamed), Excel, PDF. Every file carries the definition of what it holds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.template.loader import render_to_string
from openpyxl import Workbook
from openpyxl.cell import WriteOnlyCell
from openpyxl.styles import Font

from scheduling.reports.page import Cell, Page, Table
from scheduling.reports.svg import svg

#: A cell that begins with one of these is a formula to a spreadsheet.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
BOM = "\ufeff"


def guarded(value: Cell) -> Any:
    """Text that a spreadsheet would run gets a quote in front; numbers stay numbers."""
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return "'" + value
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def _lines(page: Page) -> Iterator[list[Any]]:
    yield [page.question, page.answer, page.sentence]
    for label, value in about(page):
        yield [label, value]
    for number in page.numbers:
        yield [number.label, number.text, number.hint]
    for table in page.tables:
        yield []
        yield [table.title]
        yield list(table.columns)
        yield from (list(row) for row in table.rows)


def about(page: Page) -> list[tuple[str, str]]:
    """Formula, idle rule, zone, coverage, cut-off, version: on every export and page."""
    kept = page.definition
    return [
        ("Formula", kept.formula),
        ("Idle rule", kept.idle_rule),
        ("Time zone", kept.zone),
        (
            "Coverage",
            "–" if kept.coverage is None else f"{kept.coverage * 100:.1f} % of the allocated time was measured",
        ),
        ("Data up to", f"{kept.cut_off:%Y-%m-%d %H:%M:%S}Z"),
        ("Definition", kept.version),
        *(("Note", note) for note in kept.notes),
        *(("Warning", warning) for warning in page.warnings),
    ]


def csv_rows(page: Page) -> Iterator[str]:
    """Line by line, for a streamed answer; with a byte order mark, so that spreadsheets read umlauts."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    yield BOM
    for line in _lines(page):
        writer.writerow([guarded(value) for value in line])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def excel(page: Page) -> bytes:
    """A sheet a table, and one with the answer and the definition."""
    book = Workbook(write_only=True)
    first = book.create_sheet("Answer")
    first.append([_bold(first, page.question)])
    first.append([page.answer, page.sentence])
    for number in page.numbers:
        first.append([guarded(number.label), guarded(number.text), guarded(number.hint)])
    for label, value in about(page):
        first.append([label, guarded(value)])
    for place, table in enumerate(page.tables, 1):
        _sheet(book, f"{place} {table.title}", table)
    stream = io.BytesIO()
    book.save(stream)
    return stream.getvalue()


def _sheet(book: Workbook, title: str, table: Table) -> None:
    clean = "".join(character for character in title if character not in "[]:*?/\\")[:31]
    sheet = book.create_sheet(clean)
    sheet.append([_bold(sheet, guarded(table.title))])
    sheet.append([_bold(sheet, column) for column in table.columns])
    for row in table.rows:
        sheet.append([float(value) if isinstance(value, Decimal) else guarded(value) for value in row])


def _bold(sheet: Any, text: str) -> WriteOnlyCell:
    cell = WriteOnlyCell(sheet, text)
    cell.font = Font(bold=True)
    return cell


def pdf(page: Page, title: str, period: str) -> bytes:
    """On paper: the same question, number, charts and tables."""
    from weasyprint import HTML  # slow to load, and needed only here

    html = render_to_string(
        "reports/paper.html",
        {
            "page": page,
            "title": title,
            "period": period,
            "about": about(page),
            "figures": [(figure, svg(figure)) for figure in page.figures],
        },
    )
    return HTML(string=html, url_fetcher=_nothing_from_outside).write_pdf()


def _nothing_from_outside(url: str, *_: object, **__: object) -> dict[str, Any]:
    raise ValueError(f"{url}: a report on paper loads nothing")
