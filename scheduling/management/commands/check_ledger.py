"""``manage.py check_ledger``: is the ledger consistent? Exit 1 with every problem when it is not."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from scheduling.models import Allocation, Attempt
from scheduling.services.ledger import CHECKS, check_ledger


class Command(BaseCommand):
    help = "Check every guarantee of the ledger: nothing held twice, nothing lost, states and intervals in step."

    def handle(self, *args: Any, **options: Any) -> None:
        problems = check_ledger()
        for problem in problems:
            self.stderr.write(str(problem))
        if problems:
            raise CommandError(f"The ledger is not consistent: {len(problems)} problems.", returncode=1)
        self.stdout.write(
            f"The ledger is consistent: {len(CHECKS)} checks over {Attempt.objects.count():,} attempts "
            f"and {Allocation.objects.count():,} allocations."
        )
