"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

CHROMIUM_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser_type_launch_args() -> dict[str, Any]:
    """Debian's Chromium; a browser of Playwright's own is not downloaded."""
    return {"executable_path": os.environ.get("CHROMIUM", "/usr/bin/chromium"), "args": CHROMIUM_FLAGS}


@pytest.fixture(autouse=True)
def _plain_static_files(settings: Any) -> None:
    """Tests do not collect static files first, and send no message to a broker that nobody reads; passwords are hashed quickly."""
    settings.STORAGES = {
        **settings.STORAGES,
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    }
    settings.AXES_ENABLED = False
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(autouse=True)
def _own_simulated_stores(tmp_path: Path) -> Iterator[None]:
    """Simulated clusters of one test do not meet those of another."""
    before = settings.GPUPORTAL_DATA
    settings.GPUPORTAL_DATA = tmp_path
    yield
    settings.GPUPORTAL_DATA = before
