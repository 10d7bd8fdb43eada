from __future__ import annotations

import pytest

from tests.reports.ledger import Ledger


@pytest.fixture
def ledger(db: None) -> Ledger:
    return Ledger()


@pytest.fixture(autouse=True)
def _plain_static_files(settings) -> None:
    """Pages name their files without a manifest: nothing is collected for a test."""
    settings.STORAGES = {
        **settings.STORAGES,
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    }
