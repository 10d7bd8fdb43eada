"""The database's clock: one time for all workers, whatever their own clocks say."""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import connection


def now() -> datetime:
    """Aware UTC; the wall clock of the database, not the beginning of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        found: datetime = cursor.fetchone()[0]
    return found.astimezone(UTC)


def seconds(instant: datetime) -> float:
    """POSIX seconds for the engine."""
    return instant.timestamp()


def instant(value: float) -> datetime:
    """The other way round; microseconds are exact up to the year 2100."""
    return datetime.fromtimestamp(value, UTC)
