from __future__ import annotations

import pytest

from tests.reports.ledger import Ledger


@pytest.fixture
def ledger(db: None) -> Ledger:
    return Ledger()
