"""What the documents and the deployment files name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from django.conf import settings
from django.utils.module_loading import import_string

from gpuportal import env
from gpuportal.management.commands import up
from tests.gpuportal.portal import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))


def test_every_setting_is_in_the_reference_and_the_reference_names_no_other() -> None:
    table = (ROOT / "docs" / "reference" / "settings.md").read_text()
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", table)) - {"INFO", "DEBUG", "WARNING", "ERROR", "EUR"}
    assert settings.configured
    # DEBUG is a setting and a log level.
    read = {name for name in env.known() if name != "DEBUG"}
    oidc = {"OIDC_NAME", "OIDC_CLIENT_ID", "OIDC_CLIENT_SECRET"}  # read when OIDC_SERVER_URL is set
    assert named - oidc == read - oidc


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_links_to_files_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def _queues(command: str) -> set[str]:
    found = re.search(r"--queues[\s\",]+([a-z,]+)", command)
    return set(found.group(1).split(",")) if found else set()


WANTED = {*up.LOOP_QUEUES.split(","), *up.OTHER_QUEUES.split(","), up.OUTSIDE_QUEUES}


def test_every_deployment_serves_all_queues_that_tasks_go_to() -> None:
    routed = {route["queue"] for route in settings.CELERY_TASK_ROUTES.values()} | {settings.CELERY_TASK_DEFAULT_QUEUE}
    assert routed <= WANTED
    units = set().union(*(_queues(unit.read_text()) for unit in UNITS))
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    composed = set().union(*(_queues(" ".join(row.get("command", []))) for row in compose["services"].values()))
    kubernetes = set()
    for row in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "portal.yaml").read_text()):
        for container in row["spec"].get("template", {}).get("spec", {}).get("containers", []):
            kubernetes |= _queues(" ".join(container["command"]))
    assert units == composed == kubernetes == WANTED


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_program_of_the_environment(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=(\S+)", unit.read_text(), re.MULTILINE)
    program = Path(line).name
    assert program in ("granian", "celery")
    assert re.search(rf"^{program}==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert callable(import_string(settings.WSGI_APPLICATION))


def test_beat_wakes_tasks_that_exist() -> None:
    from gpuportal.celery import app

    app.loader.import_default_modules()
    for name, row in settings.CELERY_BEAT_SCHEDULE.items():
        assert row["task"] in app.tasks, name


def test_requirements_are_pinned_and_name_no_host() -> None:
    for name in ("requirements.txt", "requirements-test.txt"):
        for line in (ROOT / name).read_text().splitlines():
            line = line.split("#")[0].strip()
            if line and line != "-r requirements.txt":
                assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), f"{name}: {line}"
