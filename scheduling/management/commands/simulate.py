"""``manage.py simulate FILE…``: what would happen, told by the live engine on a virtual clock. No database is used."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from scheduling.engine.scenario import Scenario, ScenarioError, read_scenario
from scheduling.engine.scenario_result import Difference, check, result, totals
from scheduling.engine.simulation import Livelock, Run, Simulation

#: A run that takes longer shows a bar on a terminal.
BAR_AFTER = 2.0


def load_file(path: Path) -> Scenario:
    """Files that the scenario names are looked for beside it."""

    def open_file(name: str) -> str:
        target = (path.parent / name).expanduser()
        if target.suffix == ".gz":
            import gzip

            with gzip.open(target, "rt", newline="") as file:
                return file.read()
        return target.read_text()

    return read_scenario(path.read_text(), str(path), open_file)


class _Bar:
    """A progress bar on standard error, only for people."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.told = 0.0
        self.shown = False

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self.began < BAR_AFTER or now - self.told < 0.2:
            return
        self.told, self.shown = now, True
        sys.stderr.write(f"\r  [{'#' * int(40 * share):40}] {100 * share:5.1f} % of the jobs are done")
        sys.stderr.flush()

    def end(self) -> None:
        if self.shown:
            sys.stderr.write("\r" + " " * 80 + "\r")


class Command(BaseCommand):
    help = "Simulate scenario files with the live engine; --check compares with what they expect."
    requires_system_checks: list[str] = []
    requires_migrations_checks = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "files", nargs="+", metavar="FILE", help="scenario file (docs/reference/scenario-format.md)"
        )
        parser.add_argument("--until", type=float, help="stop after so many seconds of the scenario")
        parser.add_argument("--format", choices=["text", "json"], default="text")
        parser.add_argument("--check", action="store_true", help="verify 'expect'; exit 1 on a difference")

    def handle(self, *args: Any, **options: Any) -> None:
        failed = bad = 0
        for name in options["files"]:
            try:
                scenario = load_file(Path(name))
            except ScenarioError as error:
                self.stderr.write(str(error))
                bad += 1
                continue
            except (OSError, UnicodeDecodeError) as error:
                self.stderr.write(f"{name}: cannot be read: {error}")
                bad += 1
                continue
            failed += self._one(name, scenario, options)
        if bad:
            raise CommandError(f"{bad} of {len(options['files'])} files cannot be used.", returncode=2)
        if failed:
            raise CommandError(f"{failed} of {len(options['files'])} scenarios differ from what they expect.")

    def _one(self, name: str, scenario: Scenario, options: dict[str, Any]) -> int:
        bar = _Bar()
        text = options["format"] == "text"
        try:
            simulation = Simulation(
                scenario, until=options["until"], clock=time.perf_counter, timeline=text and len(scenario.jobs) <= 2000
            )
            run = simulation.run(bar)
        except Livelock as error:
            self.stderr.write(f"{name}: {error}")
            return 1
        finally:
            bar.end()
        differences = check(run) if options["check"] else []
        if text:
            self._text(name, run, differences, checked=options["check"])
        else:
            self.stdout.write(json.dumps(result(run, differences), indent=1))
        return 1 if differences else 0

    def _text(self, name: str, run: Run, differences: list[Difference], *, checked: bool) -> None:
        self.stdout.write(f"{name}: {run.scenario.name}")
        if not checked:
            for at, what, detail in run.timeline:
                self.stdout.write(f"  {at:>10.0f} s  {what:9} {detail}")
            for key, value in totals(run).items():
                shown = "—" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")
                self.stdout.write(f"  {key:20} {shown}")
        for difference in differences:
            self.stdout.write(self.style.ERROR(f"  {run.scenario.file}: {difference}"))
        if checked and not differences:
            self.stdout.write(self.style.SUCCESS(f"  as expected ({len(run.scenario.expect)} rows)"))
