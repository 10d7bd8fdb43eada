"""Every report makes a page from a mixed ledger, from an empty one, and for a team alone."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from scheduling.reports.figures import plotly
from scheduling.reports.page import payload
from scheduling.reports.pages import REPORTS
from scheduling.reports.svg import svg
from scheduling.services import rollup
from teams.models import Team
from tests.reports.ledger import Ledger
from tests.reports.ledger import at as at
from tests.reports.test_hours import scope
from tests.reports.test_rollup import mixed_month


@pytest.fixture
def month(ledger: Ledger) -> Ledger:
    mixed_month(ledger)
    rollup.roll_up(at("02-01 00:00"))
    return ledger


@pytest.mark.parametrize("slug", REPORTS)
def test_a_report_of_a_month_can_be_drawn_printed_and_kept(month: Ledger, slug: str) -> None:
    page = REPORTS[slug].make(scope("01-01 00:00", "02-01 00:00", zone="Europe/Berlin"))
    assert page.answer and page.sentence and page.definition.formula and page.definition.version
    assert "Europe/Berlin (UTC+01:00)" in page.definition.zone
    for figure in page.figures:
        assert figure.alt
        json.dumps(plotly(figure), allow_nan=False)
        ElementTree.fromstring(svg(figure))
    json.dumps(payload(page), allow_nan=False)
    for table in page.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.parametrize("slug", REPORTS)
def test_a_report_of_an_empty_portal_says_so_without_failing(db: None, slug: str) -> None:
    page = REPORTS[slug].make(scope("01-01 00:00", "02-01 00:00"))
    for figure in page.figures:
        json.dumps(plotly(figure), allow_nan=False)
        ElementTree.fromstring(svg(figure))
    assert page.answer


@pytest.mark.parametrize("slug", [slug for slug in REPORTS if not REPORTS[slug].whole_only])
def test_a_report_for_one_team_names_no_other_team(month: Ledger, slug: str) -> None:
    speech = Team.objects.get(name="speech")
    page = REPORTS[slug].make(scope("01-01 00:00", "02-01 00:00", teams=frozenset({speech.pk}), whole=False))
    assert "vision" not in json.dumps(payload(page))


@pytest.mark.parametrize("slug", REPORTS)
def test_a_report_takes_a_bounded_number_of_queries(month: Ledger, slug: str, django_assert_max_num_queries) -> None:
    with django_assert_max_num_queries(14):
        REPORTS[slug].make(scope("01-01 00:00", "02-01 00:00"))
