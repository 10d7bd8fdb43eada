"""The queue: places, filters, views of one's own, and polls that cost little."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from scheduling.models import Estimate, Job, QueueOrder, SavedView
from scheduling.selectors import queue as selectors
from scheduling.services.jobs import cancel_job
from tests.factories import House, house

pytestmark = pytest.mark.django_db


@pytest.fixture
def place() -> House:
    made = house()
    made.submit(name="whole", gpus=8, workers=2, interruptible=True, simulation={"runs": 1e7})
    made.step()
    return made


def as_(username: str, place: House) -> Client:
    client = Client()
    client.force_login(place.users[username])
    return client


def rows_of(client: Client, query: str = "") -> list[tuple[int, int | None]]:
    answer = client.get(f"/queue/?{query}")
    assert answer.status_code == 200
    return [(row.job.pk, row.position) for row, _, _ in answer.context["rows"]]


def many(place: House, count: int) -> list[Job]:
    jobs = [place.submit(name=f"job-{n}", gpus=8, interruptible=True) for n in range(count)]
    place.step()
    return jobs


def test_pages_follow_one_another_in_the_order_of_the_queue(place: House, monkeypatch: Any) -> None:
    monkeypatch.setattr(selectors, "PAGE", 4)
    jobs = [job.pk for job in many(place, 10)]
    client = as_("ann", place)
    found = [row for page in (1, 2, 3) for row in rows_of(client, f"page={page}")]
    assert found == [(number, at) for at, number in enumerate(jobs, start=1)]
    assert rows_of(client, "page=99") == found[8:]


def test_a_filtered_page_keeps_the_places_of_the_whole_queue(place: House) -> None:
    jobs = many(place, 3)
    theirs = place.submit("bob", "nlp", name="theirs", gpus=8, workers=2, interruptible=True)
    place.step()
    order = list(selectors.current_order().jobs)
    assert rows_of(as_("mara", place), "team=nlp") == [(theirs.pk, order.index(theirs.pk) + 1)]
    assert [number for number, _ in rows_of(as_("ann", place), "owner=ann")] == [job.pk for job in jobs]
    assert rows_of(as_("ann", place), "name=job-1") == [(jobs[1].pk, order.index(jobs[1].pk) + 1)]


def test_a_job_that_no_cycle_has_seen_stands_at_the_end_as_new(place: House) -> None:
    old = many(place, 2)
    new = place.submit(name="just now", gpus=8)
    for query in ("", "owner=ann"):
        assert rows_of(as_("ann", place), query) == [(old[0].pk, 1), (old[1].pk, 2), (new.pk, None)]


def test_a_job_that_left_since_the_cycle_is_not_shown_though_the_order_names_it(place: House) -> None:
    jobs = many(place, 3)
    client = as_("ann", place)
    assert len(rows_of(client, "team=vision")) == 3
    cancel_job(actor=place.actor("ann"), job_id=jobs[1].pk)
    for query in ("", "team=vision"):
        assert [number for number, _ in rows_of(client, query)] == [jobs[0].pk, jobs[2].pk]


def test_an_old_order_is_not_trusted_about_who_waits(place: House, monkeypatch: Any) -> None:
    monkeypatch.setattr(selectors, "PAGE", 2)
    jobs = many(place, 3)
    cancel_job(actor=place.actor("ann"), job_id=jobs[0].pk)
    QueueOrder.objects.update(worked_out_at=timezone.now() - timedelta(hours=1))
    answer = as_("ann", place).get("/queue/")
    assert answer.context["page"].total == 2
    assert [row.job.pk for row, _, _ in answer.context["rows"]] == [jobs[1].pk, jobs[2].pk]


def test_the_number_of_queries_does_not_grow_with_the_queue(place: House) -> None:
    client = as_("ann", place)
    client.get("/queue/")
    costs = []
    for count in (3, 40):
        many(place, count)
        with CaptureQueriesContext(connection) as queries:
            client.get("/queue/?team=vision")
        costs.append(len(queries))
    assert costs[0] == costs[1] <= 14


def test_a_poll_of_an_unchanged_queue_is_answered_with_304_and_few_queries(place: House) -> None:
    many(place, 3)
    client = as_("ann", place)
    first = client.get("/queue/?team=vision", headers={"HX-Request": "true"})
    assert first.status_code == 200 and b"<html" not in first.content
    assert "HX-Request" in first["Vary"]
    with CaptureQueriesContext(connection) as queries:
        again = client.get("/queue/?team=vision", headers={"HX-Request": "true", "If-None-Match": first["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert len(queries) <= 7
    place.submit(name="another")
    changed = client.get("/queue/?team=vision", headers={"HX-Request": "true", "If-None-Match": first["ETag"]})
    assert changed.status_code == 200 and b"another" in changed.content


def test_the_tag_of_one_viewer_or_filter_is_no_good_for_another(place: House) -> None:
    many(place, 2)
    tags = {
        as_(username, place).get(path, headers={"HX-Request": "true"})["ETag"]
        for username in ("ann", "bob")
        for path in ("/queue/", "/queue/?team=vision", "/queue/?page=2")
    }
    assert len(tags) == 6


def test_the_row_tells_the_share_of_its_team_and_the_estimate(place: House) -> None:
    (job,) = many(place, 1)
    at = timezone.now() + timedelta(minutes=5)
    Estimate.objects.create(job=job, made_at=timezone.now(), p50_at=at, p90_at=at + timedelta(days=3))
    page = as_("ann", place).get("/queue/").content.decode()
    assert "holds 16 of its share of 16" in page
    assert "in 9 of 10 cases" in page


def test_a_person_saves_views_and_nobody_else_sees_or_deletes_them(place: House) -> None:
    ann, bob = as_("ann", place), as_("bob", place)
    form = {"name": "stuck <b>", "query": "team=vision&reason=limit&page=7&evil=1"}
    assert ann.post("/queue/views/", form).status_code == 302
    view = SavedView.objects.get()
    assert view.query == "team=vision&reason=limit"
    assert "stuck &lt;b&gt;" in ann.get("/queue/").content.decode()
    assert "stuck" not in bob.get("/queue/").content.decode()
    bob.post(f"/queue/views/{view.pk}/delete/")
    assert SavedView.objects.count() == 1
    ann.post("/queue/views/", {"name": "stuck <b>", "query": "team=nlp"})
    assert SavedView.objects.get().query == "team=nlp"
    ann.post(f"/queue/views/{view.pk}/delete/")
    assert not SavedView.objects.exists()


@pytest.mark.parametrize("name", ["", "   ", "x" * 61])
def test_a_view_needs_a_name_of_sensible_length(place: House, name: str) -> None:
    page = as_("ann", place).post("/queue/views/", {"name": name, "query": ""}, follow=True).content.decode()
    assert "is not a name of 1 to 60 characters" in page
    assert not SavedView.objects.exists()


def test_hold_release_and_priority_work_on_many_jobs_with_a_result_each(place: House) -> None:
    mine, theirs = many(place, 2), place.submit("bob", "nlp")
    client = as_("ann", place)
    ids = [*(job.pk for job in mine), theirs.pk]
    for action, said in (("hold", "2 done, 1 refused"), ("hold", "0 done, 3 refused"), ("release", "2 done, 1 refused"),
                         ("priority-high", "2 done, 1 refused"), ("priority-urgent", "0 done, 3 refused")):  # fmt: skip
        assert said in client.post("/queue/", {"action": action, "job": ids}).content.decode(), action
    assert set(Job.objects.filter(pk__in=ids[:2]).values_list("priority", "held")) == {(2, False)}
    assert "urgent" in as_("lea", place).get("/queue/").content.decode()


def test_more_jobs_than_are_allowed_at_once_are_refused_and_none_is_touched(place: House) -> None:
    (job,) = many(place, 1)
    form = {"action": "hold", "job": [job.pk, *range(10_000, 10_500)]}
    page = as_("ann", place).post("/queue/", form, follow=True).content.decode()
    assert "501 jobs are too many at once; at most 500 are allowed." in page
    assert not Job.objects.get(pk=job.pk).held
