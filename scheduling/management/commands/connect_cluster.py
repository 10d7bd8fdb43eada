"""``manage.py connect_cluster``: test a connection, show what would change, save."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from django.core.management.base import BaseCommand, CommandError

from scheduling.models import ClusterKind
from scheduling.services.connect import discover, save_cluster
from scheduling.services.errors import InvalidRequest
from teams.actors import Actor


class Command(BaseCommand):
    help = "Connect a cluster, or bring a connected one up to date: tests it, shows the differences, then saves."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", help="how it is called here, for example main")
        parser.add_argument("kind", choices=ClusterKind.values)
        parser.add_argument("--config", help="settings as YAML or JSON, or @FILE", default="{}")
        parser.add_argument("--secret", help="secrets as YAML or JSON, or @FILE; encrypted at rest", default="{}")
        parser.add_argument("--yes", action="store_true", help="save without asking")
        parser.add_argument("--dry-run", action="store_true", help="show the differences and save nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        config, secret = self._mapping("config", options["config"]), self._mapping("secret", options["secret"])
        try:
            found = discover(options["name"], options["kind"], config, secret)
        except InvalidRequest as error:
            raise CommandError(str(error)) from None
        self.stdout.write(
            f"{options['name']} answers ({found.description.version}): "
            f"{len(found.description.nodes)} nodes, {found.gpus} GPUs."
        )
        for warning in found.description.warnings:
            self.stdout.write(self.style.WARNING(f"note: {warning}"))
        for row in found.differences[:200]:
            self.stdout.write(f"  {row.what:7} {row.kind:10} {row.name}  {row.detail}")
        if len(found.differences) > 200:
            self.stdout.write(f"  … and {len(found.differences) - 200} more")
        if not found.differences:
            self.stdout.write("Nothing would change but the settings.")
        if options["dry_run"] or not (options["yes"] or self._confirmed()):
            self.stdout.write("Nothing was saved.")
            return
        save_cluster(
            actor=Actor.system("connect_cluster"),
            name=options["name"],
            kind=options["kind"],
            config=config,
            secret=secret,
            description=found.description,
        )
        self.stdout.write(self.style.SUCCESS("Saved."))

    def _mapping(self, option: str, text: str) -> dict[str, Any]:
        try:
            if text.startswith("@"):
                text = Path(text[1:]).read_text()
            value = yaml.safe_load(text) or {}
        except (OSError, yaml.YAMLError) as error:
            raise CommandError(f"--{option}: cannot be read: {error}") from None
        if not isinstance(value, dict):
            raise CommandError(f"--{option}: a mapping is expected, not {json.dumps(value)}")
        return value

    def _confirmed(self) -> bool:
        if not sys.stdin.isatty():
            raise CommandError("Nobody to ask: give --yes to save or --dry-run to look.")
        return input("Save this? [y/N] ").strip().lower() in ("y", "yes")
