"""Frozen reports: kept with parameters, result and definition version, so that they can be shown and made again."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.db.models import Q, QuerySet

from scheduling.models import FrozenReport
from scheduling.reports.exports import BOM, guarded
from scheduling.reports.page import Names, Report, payload, rule
from scheduling.reports.pages import REPORTS
from scheduling.reports.query import Query
from scheduling.reports.scope import Scope
from scheduling.reports.spend import spend
from teams.actors import Actor
from teams.permissions import Permission, allowed
from teams.services import audit


def visible(actor: Actor) -> QuerySet[FrozenReport]:
    """Own ones; managers see all."""
    rows = FrozenReport.objects.select_related("created_by")
    if allowed(actor, Permission.VIEW_ALL_REPORTS):
        return rows
    return rows.filter(Q(created_by=actor.user) if actor.user is not None else Q(pk=None))


def readable(kept: FrozenReport, seen: set[int] | None) -> bool:
    """Whether somebody who sees the teams ``seen`` (``None`` = all) may still see what was kept."""
    teams = kept.parameters["teams"]
    return seen is None or (not kept.parameters["whole"] and teams is not None and seen.issuperset(teams))


def freeze(*, actor: Actor, report: Report, query: Query, name: str) -> FrozenReport:
    """Keep the report as it is now; the name defaults to title and period."""
    result = payload(report.make(query.scope))
    kept = FrozenReport.objects.create(
        name=(name.strip().replace("\x00", "") or f"{report.title}, {query.period}")[:200],
        report=report.slug,
        parameters=scope_json(query.scope),
        result=result,
        definition_version=result["definition"]["version"],
        digest=digest(result),
        cut_off=query.scope.end,
        created_by=actor.user,
    )
    audit.record(actor, "report.freeze", kept, after={"report": report.slug, "digest": kept.digest})
    return kept


def scope_json(scope: Scope) -> dict[str, Any]:
    def ids(values: frozenset[Any] | None) -> list[Any] | None:
        return None if values is None else sorted(values)

    return {
        "since": scope.since.isoformat(),
        "until": scope.until.isoformat(),
        "now": scope.now.isoformat(),
        "zone": scope.zone.key,
        "teams": ids(scope.teams),
        "pools": ids(scope.pools),
        "classes": ids(scope.classes),
        "whole": scope.whole,
    }


def scope_of(kept: dict[str, Any]) -> Scope:
    def ids(values: list[Any] | None) -> frozenset[Any] | None:
        return None if values is None else frozenset(values)

    return Scope(
        datetime.fromisoformat(kept["since"]),
        datetime.fromisoformat(kept["until"]),
        datetime.fromisoformat(kept["now"]),
        ZoneInfo(kept["zone"]),
        ids(kept["teams"]),
        ids(kept["pools"]),
        ids(kept["classes"]),
        kept["whole"],
    )


def digest(result: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def intact(kept: FrozenReport) -> bool:
    return digest(kept.result) == kept.digest


def differences(kept: FrozenReport) -> list[str]:
    """Make the report again with the same parameters and cut-off; what differs, in words. None = reproduced."""
    again = payload(REPORTS[kept.report].make(scope_of(kept.parameters)))
    found = []
    if again["definition"]["version"] != kept.definition_version:
        found.append(f"definition {kept.definition_version} then, {again['definition']['version']} now")
    for name in ("answer", "sentence", "numbers", "tables", "warnings"):
        if again[name] != kept.result[name]:
            found.append(f"{name} differ: the ledger was corrected, or a price or rule was changed, since")
    return found


def invoice_lines(scope: Scope) -> Iterator[str]:
    """CSV, one line a team and pool: period, team, pool, GPU-hours, price, amount, currency."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    names, currency = Names(), rule().currency
    first, last = (f"{at.astimezone(scope.zone):%Y-%m-%dT%H:%M:%S%z}" for at in (scope.since, scope.end))
    yield BOM
    lines: list[list[Any]] = [["from", "to", "team", "pool", "gpu_hours", "price_per_gpu_hour", "amount", "currency"]]
    for row in spend(scope).bills:
        hours = f"{row.gpu_hours:.6f}"
        lines.append([first, last, names.team(row.team), names.pool(row.pool), hours, row.price, row.money, currency])
    for line in lines:
        writer.writerow([guarded(value) for value in line])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
