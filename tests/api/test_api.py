"""The REST API: what it does, whom it lets, and what it says when it does not."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import get_resolver

from scheduling.models import Job
from teams.models import ApiToken, AuditEvent, Quota, Team
from teams.services.tokens import create_token
from tests.factories import SYSTEM, House, house

pytestmark = pytest.mark.django_db
JOB = {"name": "train", "team": "vision", "command": "true", "gpus": 2, "walltime": 3600}


class Api:
    """A client with a token, JSON in and out."""

    def __init__(self, made: House, username: str, scopes: tuple[str, ...] = ("admin",)) -> None:
        actor = made.actor(username)
        _, secret = create_token(actor=actor, name="t", scopes=list(scopes), expires_at=None, user=actor.user)
        self.client = Client(raise_request_exception=False)
        self.headers = {"Authorization": f"Bearer {secret}"}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        data = body if isinstance(body, str) else json.dumps(body if body is not None else {})
        return self.client.generic(
            method, f"/api/v1/{path}", "" if method == "GET" else data, content_type="application/json",
            headers={**self.headers, **headers},
        )  # fmt: skip


@pytest.fixture
def made() -> House:
    return house()


def test_a_job_is_submitted_read_held_released_changed_and_cancelled(made: House) -> None:
    ann = Api(made, "ann")
    answer = ann("POST", "jobs/", JOB)
    assert answer.status_code == 201, answer.content
    number = answer.json()["jobs"][0]["id"]
    read = ann("GET", f"jobs/{number}/")
    assert (read.json()["team"], read.json()["walltime"], read["ETag"]) == ("vision", 3600, '"1"')
    assert ann("POST", f"jobs/{number}/hold/").json()["held"] is True
    assert ann("POST", f"jobs/{number}/hold/").status_code == 409
    assert ann("POST", f"jobs/{number}/release/").json()["held"] is False
    assert ann("PATCH", f"jobs/{number}/", {"priority": "high"}).status_code == 428
    assert ann("PATCH", f"jobs/{number}/", {"priority": "high"}, **{"If-Match": '"1"'}).status_code == 409
    changed = ann("PATCH", f"jobs/{number}/", {"priority": "high"}, **{"If-Match": '"3"'})
    assert (changed.status_code, changed.json()["priority"]) == (200, "high")
    assert ann("POST", f"jobs/{number}/cancel/", {"reason": "typo"}).json()["state"] == "cancelled"
    kinds = [row["kind"] for row in ann("GET", f"jobs/{number}/events/").json()["results"]]
    assert kinds[-1] == "submitted" and {"held", "released", "changed"} <= set(kinds)


def test_errors_are_problem_details_that_name_field_and_what_is_allowed(made: House) -> None:
    answer = Api(made, "ann")("POST", "jobs/", {**JOB, "gpus": 63, "prio": 1, "pools": ["nope"]})
    assert answer.status_code == 400 and answer["Content-Type"] == "application/problem+json"
    assert "prio" in [row["field"] for row in answer.json()["errors"]]
    answer = Api(made, "ann")("POST", "jobs/", {**JOB, "pools": ["nope"]})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "pools" and "sim" in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize(
    "body",
    ["[]", "null", '"x"', "{", '{"name": "\\u0000"}', '{"name": "\\ud800"}', '{"gpus": 1' + "0" * 5000 + "}",
     "[" * 100_000, '{"gpus": 1e999}', '{"team": {"a": 1}}', '{"environment": {"\\u0000": "x"}}', '{"after": [1e30]}'],
)  # fmt: skip
def test_no_body_gives_a_500(made: House, body: str) -> None:
    ann = Api(made, "ada")
    for path in ("jobs/", "jobs/bulk/", "quotas/", "budgets/", "requests/", "tokens/", "teams/", "what-if/"):
        assert 400 <= ann("POST", path, body).status_code < 500, path


def test_pages_go_through_all_jobs_once(made: House) -> None:
    ann = Api(made, "ann")
    ann("POST", "jobs/", {**JOB, "count": 7})
    seen: list[int] = []
    cursor = ""
    while True:
        answer = ann("GET", f"jobs/?limit=3&state=waiting&cursor={cursor}" if cursor else "jobs/?limit=3").json()
        seen += [row["id"] for row in answer["results"]]
        cursor = answer["next_cursor"]
        if cursor is None:
            break
    assert seen == sorted(Job.objects.values_list("pk", flat=True), reverse=True)
    for bad in ("limit=0", "limit=x", "cursor=-1", "state=gone", "submitted_after=x", "team=%00"):
        assert ann("GET", f"jobs/?{bad}").status_code == 400, bad


def test_a_list_of_jobs_takes_at_most_12_queries(made: House, django_assert_max_num_queries: Any) -> None:
    ann = Api(made, "ann")
    ann("POST", "jobs/", {**JOB, "count": 100})
    with django_assert_max_num_queries(12):
        assert len(ann("GET", "jobs/?limit=100").json()["results"]) == 100


def test_bulk_tells_a_result_for_each_job(made: House) -> None:
    ann, other = Api(made, "ann"), made.submit("bob", "nlp")
    mine = made.submit()
    answer = ann("POST", "jobs/bulk/", {"jobs": [mine.pk, other.pk, 10**12], "action": "cancel"}).json()["results"]
    assert [row["done"] for row in answer] == [True, False, False]
    assert "There is no job" in answer[1]["message"]


def test_the_same_key_gives_the_same_answer_and_another_body_is_refused(made: House) -> None:
    ann = Api(made, "ann")
    first = ann("POST", "jobs/", JOB, **{"Idempotency-Key": "k1"})
    again = ann("POST", "jobs/", JOB, **{"Idempotency-Key": "k1"})
    assert first.json() == again.json() and again["Idempotent-Replayed"] == "true"
    assert ann("POST", "jobs/", {**JOB, "name": "b"}, **{"Idempotency-Key": "k1"}).status_code == 422
    assert ann("POST", "jobs/", {**JOB, "gpus": 60}, **{"Idempotency-Key": "k2"}).status_code == 422
    assert ann("POST", "jobs/", JOB, **{"Idempotency-Key": "k2"}).status_code == 201
    assert Job.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_the_same_key_at_the_same_time_submits_once() -> None:
    ann = Api(house(), "ann")
    gate, answers = threading.Barrier(8), []

    def send() -> None:
        gate.wait()
        try:
            answers.append(ann("POST", "jobs/", JOB, **{"Idempotency-Key": "same"}))
        finally:
            connection.close()

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {201} and len(answers) == 8
    assert len({answer.json()["jobs"][0]["id"] for answer in answers}) == 1
    assert Job.objects.count() == 1


def test_another_teams_objects_are_not_found_not_listed_not_changed(made: House) -> None:
    theirs = made.submit("bob", "nlp")
    made.step()
    attempt = theirs.attempts.get()
    create_token(actor=SYSTEM, name="robot", scopes=["jobs"], expires_at=None, team=made.teams["nlp"])
    robot = ApiToken.objects.get(name="robot")
    for username in ("ann", "lea"):
        api = Api(made, username)
        for path in ("", "log/", "events/", "blockers/", "estimate/"):
            assert api("GET", f"jobs/{theirs.pk}/{path}").status_code == 404, path
        for path in ("cancel/", "hold/", "release/", "clone/"):
            assert api("POST", f"jobs/{theirs.pk}/{path}").status_code == 404, path
        assert api("PATCH", f"jobs/{theirs.pk}/", {"priority": "low"}, **{"If-Match": "*"}).status_code == 404
        assert api("GET", f"attempts/{attempt.pk}/").status_code == 404
        assert api("DELETE", f"tokens/{robot.pk}/").status_code == 404
        for path in ("teams/nlp/", "teams/nlp/members/", "quotas/?team=nlp", "budgets/?team=nlp"):
            assert api("GET", path).status_code == 404, path
        assert api("PUT", "teams/nlp/members/ann/", {"role": "lead"}).status_code == 404
        assert api("DELETE", "teams/nlp/").status_code == 404
        for path in ("jobs/", "attempts/", "teams/", "quotas/", "requests/", "holds/", "reservations/", "tokens/"):
            listed = json.dumps(api("GET", path).json())
            assert '"nlp"' not in listed and f'"job": {theirs.pk},' not in listed, path
        assert api("GET", "audit/").status_code == 403
    theirs.refresh_from_db()
    assert theirs.state == "running"


def test_every_operation_asks_who_it_is() -> None:
    client = Client()
    paths = [str(pattern.pattern) for pattern in get_resolver("scheduling.api.urls").url_patterns]
    assert len(paths) > 35
    for path in paths:
        if "marks" in path:
            continue
        concrete = path.replace("<number:pk>", "1").replace("<name:name>", "vision").replace("<slug:slug>", "idle")
        concrete = concrete.replace("<username:username>", "ann")
        answer = client.get(f"/api/v1/{concrete}")
        assert answer.status_code in (401, 405) and answer.status_code == (401 if answer.status_code != 405 else 405), (
            path
        )
        if answer.status_code == 405:
            assert client.post(f"/api/v1/{concrete}").status_code == 401, path


def test_a_read_token_changes_nothing(made: House) -> None:
    api = Api(made, "lea", scopes=("read",))
    job = made.submit()
    assert api("GET", f"jobs/{job.pk}/").status_code == 200
    assert api("POST", f"jobs/{job.pk}/cancel/").status_code == 403
    assert api("POST", "jobs/", JOB).status_code == 403
    assert api("POST", "tokens/", {"name": "more", "scopes": ["admin"]}).status_code == 422
    assert Api(made, "lea", scopes=("jobs",))("POST", "jobs/", JOB).status_code == 201


def test_quotas_that_exceed_the_pool_are_refused_with_both_numbers(made: House) -> None:
    mara, body = Api(made, "mara"), {"team": "vision", "pool": made.pool.name, "guaranteed": "9"}
    refused = mara("POST", "quotas/", body)
    assert refused.status_code == 422
    assert "17" in refused.json()["errors"][0]["message"] and "16" in refused.json()["errors"][0]["message"]
    assert mara("POST", "quotas/", {**body, "guaranteed": "7.5"}).status_code == 201
    assert Quota.objects.filter(team__name="vision", during__endswith=None).get().guaranteed == 7.5
    assert Api(made, "lea")("POST", "quotas/", body).status_code == 403
    assert AuditEvent.objects.filter(action="quota.set", actor_label="mara").count() == 1


def test_an_approved_request_changes_the_quota_until_it_expires(made: House) -> None:
    from datetime import UTC, datetime, timedelta

    now = datetime.now(UTC)
    Api(made, "mara")("POST", "quotas/", {"team": "nlp", "pool": made.pool.name, "guaranteed": "4"})
    body = {
        "team": "vision", "pool": made.pool.name, "guaranteed": "12", "justification": "Paper deadline",
        "begins_at": now.isoformat(), "expires_at": (now + timedelta(days=7)).isoformat(),
    }  # fmt: skip
    assert Api(made, "ann")("POST", "requests/", body).status_code == 403
    asked = Api(made, "lea")("POST", "requests/", body)
    assert asked.status_code == 201, asked.content
    path = f"requests/{asked.json()['id']}/"
    assert Api(made, "lea")("POST", path, {"decision": "approve", "reason": "me"}).status_code == 403
    done = Api(made, "mara")("POST", path, {"decision": "approve", "reason": "agreed"})
    assert (done.status_code, done.json()["state"]) == (200, "approved"), done.content
    rows = Quota.objects.filter(team__name="vision", during__startswith__gte=now).order_by("during")
    assert [row.guaranteed for row in rows] == [12, 8]
    assert Api(made, "mara")("POST", path, {"decision": "decline", "reason": "late"}).status_code == 422


def test_the_last_lead_stays(made: House) -> None:
    lea = Api(made, "lea")
    assert lea("DELETE", "teams/vision/members/lea/").status_code == 422
    assert lea("PUT", "teams/vision/members/ann/", {"role": "lead"}).status_code == 200
    assert lea("DELETE", "teams/vision/members/lea/").status_code == 204


def test_a_team_with_open_jobs_is_not_archived(made: House) -> None:
    job, ada = made.submit(), Api(made, "ada")
    assert ada("DELETE", "teams/vision/").status_code == 422
    ada("POST", f"jobs/{job.pk}/cancel/")
    assert ada("DELETE", "teams/vision/").status_code == 200
    assert Team.objects.get(name="vision").archived_at is not None


def test_what_if_gives_a_result_and_names_the_line_of_a_mistake(made: House) -> None:
    text = """
scenario: one job
clusters: {c: {pools: {p: {nodes: n1, gpus: 8}}}}
teams: {a: {quota: {p: 8}}}
jobs: [{name: j, team: a, gpus: 1, runs: 60s}]
"""
    mara = Api(made, "mara")
    answer = mara("POST", "what-if/", {"scenario": text})
    wrong = mara("POST", "what-if/", {"scenario": "scenario: x\nclusters: 3\n"})
    assert wrong.status_code == 422 and "scenario" in wrong.json()["errors"][0]["message"]
    assert answer.status_code in (200, 422), answer.content
    assert Api(made, "ann")("POST", "what-if/", {"scenario": text}).status_code == 403


def test_reports_come_as_json_and_csv_within_the_own_scope(made: House) -> None:
    ann = Api(made, "ann")
    assert ann("GET", "reports/waits/").json()["definition"]["formula"]
    csv = ann("GET", "reports/waits/?export=csv")
    assert b"".join(csv.streaming_content).startswith(b"\xef\xbb\xbf")
    assert ann("GET", "reports/capacity/").status_code == 404
    assert ann("GET", "reports/waits/?team=nlp").status_code == 400
    assert ann("GET", "reports/waits/?export=exe").status_code == 400


def test_the_document_describes_every_operation_once(made: House, client: Client) -> None:
    client.force_login(made.users["ann"])
    document = client.get("/api/schema/?format=json").json()
    assert document["openapi"].startswith("3.1")
    ids = [op["operationId"] for path in document["paths"].values() for op in path.values() if "operationId" in op]
    assert len(ids) == len(set(ids)) and {"jobs_submit", "whatif_run", "gpus_list", "requests_decide"} <= set(ids)
