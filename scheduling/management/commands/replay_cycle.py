"""``manage.py replay_cycle ID``: decide a past cycle again and compare."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from scheduling.models import Cycle
from scheduling.services.replay import ReplayError, replay


class Command(BaseCommand):
    help = "Decide a stored cycle again from what it read, and say whether the plan is the same."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("cycle", type=int, help="number of the cycle, as on a job's decisions")

    def handle(self, *args: Any, **options: Any) -> None:
        cycle = Cycle.objects.filter(pk=options["cycle"]).first()
        if cycle is None:
            raise CommandError(f"There is no cycle {options['cycle']}.")
        try:
            plan = replay(cycle)
        except ReplayError as error:
            raise CommandError(str(error)) from None
        self.stdout.write(
            f"Cycle {cycle.pk} of {cycle.started_at:%Y-%m-%d %H:%M:%S} UTC gives the same plan: "
            f"{len(plan.starts)} starts, {len(plan.evictions)} evictions, {len(plan.holds)} holds."
        )
        for start in plan.starts[:50]:
            self.stdout.write(f"  start job {start.job} in pool {start.pool}: {start.because}")
        for eviction in plan.evictions[:50]:
            self.stdout.write(f"  evict attempt {eviction.attempt} for job {eviction.for_job}: {eviction.because}")
