"""Fair shares of the latest cycle in words that the pages use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from scheduling.models import Job
from scheduling.selectors.queue import Order
from scheduling.selectors.reasons import Names

_GPU = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class TeamShare:
    """What a team's fair share of one pool was in the latest cycle, and what it held; in GPUs."""

    team: str
    pool: str
    share: Decimal
    held: Decimal
    #: Held and asked for together, at most its limit.
    want: Decimal


class Shares:
    """Shares by team and pool."""

    def __init__(self, order: Order, names: Names) -> None:
        self._rows = {
            (team, pool): TeamShare(
                names.team(team),
                names.pool(pool),
                (share / _GPU).quantize(Decimal("0.1")),
                (held / _GPU).normalize(),
                (want / _GPU).normalize(),
            )
            for team, pool, share, held, want in order.shares
        }

    def of_job(self, job: Job) -> TeamShare | None:
        """The share that matters to it: in the first of its pools for which one was worked out."""
        return next((row for pool in job.pools if (row := self._rows.get((job.team_id, pool))) is not None), None)

    def of(self, team: int, pool: int) -> TeamShare | None:
        return self._rows.get((team, pool))

    def rows_of(self, teams: Iterable[int]) -> list[TeamShare]:
        wanted = set(teams)
        return [row for (team, _), row in self._rows.items() if team in wanted]
