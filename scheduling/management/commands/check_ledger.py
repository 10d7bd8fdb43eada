"""``manage.py check_ledger``: is the ledger consistent? Exit 1 with every problem when it is not."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from scheduling.models import Allocation, Attempt
from scheduling.services.ledger import CHECKS, check_ledger
from scheduling.services.rollup import rolled_range, verify_rollups


class Command(BaseCommand):
    help = "Check every guarantee of the ledger: nothing held twice, nothing lost, states and intervals in step."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--days", type=int, default=35, help="compare the roll-ups of so many days with the ledger (default 35)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        problems: list[object] = [*check_ledger()]
        since, until = rolled_range()
        if since is not None and until is not None:
            problems += verify_rollups(max(since, until - timedelta(days=options["days"])), until)
        for problem in problems:
            self.stderr.write(str(problem))
        if problems:
            raise CommandError(f"The ledger is not consistent: {len(problems)} problems.", returncode=1)
        self.stdout.write(
            f"The ledger is consistent: {len(CHECKS)} checks over {Attempt.objects.count():,} attempts "
            f"and {Allocation.objects.count():,} allocations."
        )
