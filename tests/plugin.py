"""Real servers for the tests: loaded before Django reads its settings.

The controller starts one embedded PostgreSQL and one Redis in a temporary folder; pytest-xdist's workers find their
addresses in the environment and have a database each.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from gpuportal.embedded import Postgres, Redis, Service

_services: list[Service] = []
_folder: Path | None = None

os.environ.setdefault("PYTEST_VERSION", pytest.__version__)


def _start() -> None:
    global _folder
    if os.environ.get("GPUPORTAL_TEST_SERVICES") == "1":
        return
    _folder = Path(tempfile.mkdtemp(prefix="gpuportal-test-"))
    _folder.chmod(0o755)
    postgres, redis = Postgres(_folder, durable=False), Redis(_folder)
    for service in (postgres, redis):
        service.start()
        _services.append(service)
    os.environ["GPUPORTAL_DATA"] = str(_folder)
    os.environ["DATABASE_URL"] = postgres.address("gpuportal")
    os.environ["REDIS_URL"] = f"redis+socket://{redis.socket}"
    os.environ["GPUPORTAL_TEST_SERVICES"] = "1"
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"


_start()


def pytest_unconfigure(config: pytest.Config) -> None:
    for service in reversed(_services):
        service.stop()
    _services.clear()
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)


GROUPS = ("slurm", "browser", "prometheus", "faults")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", action="append", default=[], choices=GROUPS, help="leave out a group of tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(config.getoption("--without"))
    if left_out:
        gone = [item for item in items if left_out & {mark.name for mark in item.iter_markers()}]
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.getoption("--without")
    if left_out:
        terminalreporter.write_line(f"LEFT OUT by --without: {', '.join(sorted(set(left_out)))}")
