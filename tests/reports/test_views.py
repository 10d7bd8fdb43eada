"""Report pages and files over HTTP: scopes, formats, wrong questions, frozen reports."""

from __future__ import annotations

import csv
import io

import pytest
from django.core import mail
from django.test import Client
from openpyxl import load_workbook

from scheduling.models import FrozenReport, ReportMail
from scheduling.reports.exports import guarded
from scheduling.reports.pages import REPORTS
from scheduling.services import report_mails, rollup
from teams.models import Membership, Team, User
from tests.reports.ledger import Ledger, at
from tests.reports.test_rollup import mixed_month

MONTH = "since=2025-01-01&until=2025-01-31"


@pytest.fixture
def month(ledger: Ledger) -> Ledger:
    mixed_month(ledger)
    rollup.roll_up(at("02-01 00:00"))
    return ledger


def signed_in(**fields: object) -> Client:
    user = User.objects.create(username=f"person-{User.objects.count()}", email="p@example.org", **fields)
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    client.user = user  # type: ignore[attr-defined]
    return client


@pytest.fixture
def manager(month: Ledger) -> Client:
    return signed_in(staff_role="manager", time_zone="Europe/Berlin")


@pytest.fixture
def speech_member(month: Ledger) -> Client:
    client = signed_in()
    Membership.objects.create(user=client.user, team=Team.objects.get(name="speech"), role="member")
    return client


def text(response) -> str:
    return b"".join(response.streaming_content).decode() if response.streaming else response.content.decode()


def test_the_index_answers_the_four_questions(manager: Client) -> None:
    page = text(manager.get(f"/reports/?{MONTH}"))
    for question in ("sits idle?", "new experiment wait?", "fail and restart?", "produces nothing?"):
        assert question in page


@pytest.mark.parametrize("slug", REPORTS)
def test_a_manager_sees_every_report_with_definition_and_text_alternative(manager: Client, slug: str) -> None:
    response = manager.get(f"/reports/{slug}/?{MONTH}&compare=1")
    page = text(response)
    assert response.status_code == 200
    assert "What this means" in page and "Europe/Berlin (UTC+01:00)" in page and "2026.1" in page
    assert 'role="img"' in page


@pytest.mark.parametrize("slug", [slug for slug in REPORTS if not REPORTS[slug].whole_only])
@pytest.mark.parametrize("kind", ["", "csv", "xlsx"])
def test_a_member_of_one_team_meets_no_other_team_on_any_page_or_file(
    speech_member: Client, slug: str, kind: str
) -> None:
    response = speech_member.get(f"/reports/{slug}/?{MONTH}&format={kind}")
    assert response.status_code == 200
    if kind == "xlsx":
        book = load_workbook(io.BytesIO(response.content))
        body = str([[cell.value for cell in row] for sheet in book for row in sheet])
    else:
        body = text(response)
    assert "vision" not in body


def test_another_team_is_unknown_to_a_member(speech_member: Client) -> None:
    response = speech_member.get(f"/reports/cost/?{MONTH}&team=vision")
    assert response.status_code == 400 and "that you may see" in text(response)


def test_a_report_about_all_teams_is_not_there_for_a_member(speech_member: Client) -> None:
    assert speech_member.get(f"/reports/capacity/?{MONTH}").status_code == 404


def test_somebody_without_a_team_gets_no_reports(month: Ledger) -> None:
    assert signed_in().get("/reports/").status_code == 403


def test_nobody_gets_reports_without_signing_in(month: Ledger) -> None:
    assert Client().get("/reports/").status_code == 302


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("since=yesterday&until=2025-01-31", "since: “yesterday” is not allowed; give a day as YYYY-MM-DD"),
        ("since=2025-02-01&until=2025-01-31", "a day not before 2025-02-01"),
        ("since=2015-02-01&until=2025-01-31", "at most three years"),
        ("range=28", "a number of days such as 28d"),
        ("pool=nowhere", "the name of a pool"),
        ("class=fun", "one of training, batch, interactive, inference"),
        ("since=2199-02-01&until=2199-02-02", "a day that has begun"),
        ("range=\x00", "28d"),
    ],
)
def test_a_wrong_question_names_field_value_and_what_is_allowed(manager: Client, query: str, said: str) -> None:
    response = manager.get(f"/reports/idle/?{query}")
    if response.status_code == 200:
        assert query == "range=\x00"
        return
    assert response.status_code == 400 and said in text(response)


def test_csv_carries_the_definition_and_begins_with_a_byte_order_mark(manager: Client) -> None:
    body = text(manager.get(f"/reports/idle/?{MONTH}&format=csv"))
    assert body.startswith("\ufeff")
    lines = list(csv.reader(io.StringIO(body[1:])))
    labels = {line[0] for line in lines if line}
    assert {"Formula", "Idle rule", "Time zone", "Coverage", "Data up to", "Definition"} <= labels


@pytest.mark.parametrize("text_", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_text_that_a_spreadsheet_would_run_is_quoted(text_: str) -> None:
    assert guarded(text_) == "'" + text_
    assert guarded(-1.5) == -1.5 and guarded("Müller") == "Müller"


def test_a_team_with_a_formula_for_a_title_stays_text_in_the_file(manager: Client) -> None:
    Team.objects.filter(name="vision").update(name="=cmd")
    body = text(manager.get(f"/reports/cost/?{MONTH}&format=csv"))
    assert "'=cmd" in body and ",=cmd" not in body and "\n=cmd" not in body


def test_a_pdf_is_made_without_loading_anything(manager: Client) -> None:
    response = manager.get(f"/reports/idle/?{MONTH}&format=pdf")
    assert response.content.startswith(b"%PDF") and len(response.content) > 5000


def test_an_unknown_report_or_format_is_not_there(manager: Client) -> None:
    assert manager.get("/reports/nothing/").status_code == 404
    assert manager.get(f"/reports/idle/?{MONTH}&format=exe").status_code == 404


def test_the_invoice_has_a_line_a_team_and_pool(manager: Client) -> None:
    lines = list(csv.DictReader(io.StringIO(text(manager.get(f"/reports/invoice.csv?{MONTH}"))[1:])))
    assert {(line["team"], line["pool"]) for line in lines} == {
        ("vision", "a100"), ("speech", "a100"), ("speech", "h100"),
    }  # fmt: skip
    assert all(float(line["amount"]) == pytest.approx(float(line["gpu_hours"]) * 2, abs=0.01) for line in lines)


def test_a_frozen_report_is_the_same_when_made_again_and_says_when_the_ledger_was_corrected(
    manager: Client, month: Ledger
) -> None:
    response = manager.post(f"/reports/cost/freeze/?{MONTH}", {"name": "January"})
    kept = FrozenReport.objects.get()
    assert response.headers["Location"] == f"/reports/frozen/{kept.pk}/"
    assert "every number is the same" in text(manager.get(f"/reports/frozen/{kept.pk}/?again=1"))
    month.run(Team.objects.get(name="vision"), month_pool(), "01-28 00:00", "01-29 00:00", gpus=1, first=7, node=1)
    rollup.roll_up(at("02-01 00:00"))
    assert "it differs" in text(manager.get(f"/reports/frozen/{kept.pk}/?again=1"))
    assert kept.result["answer"] in text(manager.get(f"/reports/frozen/{kept.pk}/"))


def month_pool():
    from scheduling.models import Pool

    return Pool.objects.get(name="a100")


def test_a_frozen_report_of_a_manager_is_not_there_for_others(manager: Client, speech_member: Client) -> None:
    manager.post(f"/reports/cost/freeze/?{MONTH}", {"name": "January"})
    number = FrozenReport.objects.get().pk
    assert speech_member.get(f"/reports/frozen/{number}/").status_code == 404
    assert "January" not in text(speech_member.get("/reports/frozen/"))


def test_a_mail_goes_out_once_when_it_is_due(manager: Client) -> None:
    manager.post(f"/reports/cost/mail/?{MONTH}", {"period": "month"})
    row = ReportMail.objects.get()
    assert report_mails.send_due(row.next_at) == 1
    assert report_mails.send_due(row.next_at) == 0
    (sent,) = mail.outbox
    assert "produces nothing" in sent.body and sent.attachments[0][0] == "cost.pdf"


def test_a_mail_is_not_sent_to_somebody_who_left_all_teams(speech_member: Client) -> None:
    speech_member.post(f"/reports/cost/mail/?{MONTH}", {"period": "week"})
    Membership.objects.all().delete()
    row = ReportMail.objects.get()
    assert report_mails.send_due(row.next_at) == 0
    row.refresh_from_db()
    assert not mail.outbox and "active member" in row.last_error
