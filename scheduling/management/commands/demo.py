"""``manage.py demo``: a demonstration out of a real trace, in an empty database."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from scheduling.services.demo import Options, load_demo
from scheduling.services.errors import Conflict


class Command(BaseCommand):
    help = (
        "Fill an empty database with a demonstration: a simulated cluster, teams with quotas, weeks of history and a "
        "live feed out of Microsoft's Philly trace (licence and citation: scheduling/demo_data/README.md)."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--nodes", type=int, default=20, help="nodes of 8 GPUs (default 20)")
        parser.add_argument("--weeks", type=int, default=3, help="weeks of history, 1 to 4 (default 3)")
        parser.add_argument("--speed", type=float, default=60, help="trace seconds per second of the live feed (60)")
        parser.add_argument("--thin", type=int, default=5, help="use one of so many of the trace's jobs (5)")
        parser.add_argument(
            "--reset",
            action="store_true",
            help="throw away a demonstration that is loaded, with all that was added to it",
        )
        parser.add_argument("--yes", action="store_true", help="do not ask")

    def handle(self, *args: Any, **options: Any) -> None:
        for name, low, high in (("nodes", 4, 2000), ("weeks", 1, 4), ("speed", 1, 1000), ("thin", 1, 100)):
            if not low <= options[name] <= high:
                raise CommandError(f"--{name}: {options[name]} is not from {low} to {high}")
        if options["reset"] and not options["yes"] and not sys.stdin.isatty():
            raise CommandError("--reset throws everything away; confirm it with --yes")
        if not options["yes"] and sys.stdin.isatty():
            what = "Throw away everything in this database and load" if options["reset"] else "Load"
            answer = input(f"{what} the demonstration{'' if options['reset'] else ' into this database'}? [y/N] ")
            if answer.strip().lower() not in ("y", "yes"):
                self.stdout.write("Nothing was changed.")
                return
        wanted = Options(options["nodes"], options["weeks"], options["speed"], options["thin"])
        try:
            accounts = load_demo(wanted, lambda text: self.stdout.write(text), reset=options["reset"])
        except Conflict as error:
            raise CommandError(str(error)) from None
        self.stdout.write(self.style.SUCCESS("\nThe demonstration is ready. Sign in with (each password works once):"))
        for account in accounts:
            self.stdout.write(f"  {account.role:14} {account.username:6} {account.password}")
        self.stdout.write("")
