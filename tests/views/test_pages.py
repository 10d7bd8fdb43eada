"""Pages as each role sees them: what they say, whom they refuse, and how many queries they cost."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from scheduling.models import Job, Node, NodeInterval, Window
from teams.models import AuditEvent
from tests.factories import House, house

pytestmark = pytest.mark.django_db

MOST_QUERIES = 12


@pytest.fixture
def place() -> House:
    return house()


def as_(username: str, place: House) -> Client:
    client = Client()
    client.force_login(place.users[username])
    return client


def test_every_page_asks_for_a_sign_in(client: Client, place: House) -> None:
    job, node = place.submit(), Node.objects.first()
    paths = ["/", "/queue/", "/jobs/new/", f"/jobs/{job.pk}/", f"/jobs/{job.pk}/log/1", "/clusters/", "/me/"]
    assert node is not None
    for path in [*paths, "/clusters/map.json", f"/nodes/{node.pk}/", f"/nodes/{node.pk}/drain/"]:
        answer = client.get(path)
        assert answer.status_code == 302, path
        assert answer["Location"].startswith("/accounts/login/"), path


@pytest.mark.parametrize("username", ["ann", "lea", "mara", "ada"])
def test_lists_and_maps_cost_at_most_12_queries_besides_the_tracking_of_sessions(place: House, username: str) -> None:
    place.submit(name="one", gpus=8, workers=2, interruptible=True, simulation={"runs": 1e7})
    place.step()
    for number in range(30):
        place.submit(name=f"job-{number}", gpus=8, interruptible=True)
    place.step()
    node = Node.objects.first()
    assert node is not None
    client = as_(username, place)
    client.get("/me/")  # the first request of a session also records the session
    paths = ["/", "/queue/", "/queue/?state=running", "/jobs/new/"]
    for path in [*paths, "/clusters/", "/clusters/map.json", f"/nodes/{node.pk}/", "/me/"]:
        with CaptureQueriesContext(
            connection,
        ) as queries:
            answer = client.get(path)
        assert answer.status_code == 200, path
        # USERSESSIONS_TRACK_ACTIVITY adds up to five to every request, whatever the page; they are not counted here.
        own = _without_session_tracking([" ".join(row["sql"].split()) for row in queries])
        assert len(own) <= MOST_QUERIES, path + "\n" + "\n".join(sql[:100] for sql in own)


def _without_session_tracking(statements: list[str]) -> list[str]:
    """What is left without the savepoint in which allauth notes when a session was last active."""
    touched = [at for at, sql in enumerate(statements) if "usersessions_usersession" in sql]
    if not touched:
        return statements
    begins = max((at for at in range(touched[0]) if statements[at].startswith("SAVEPOINT")), default=touched[0])
    ends = min(
        (at for at in range(touched[-1], len(statements)) if statements[at].startswith("RELEASE")), default=touched[-1]
    )
    return statements[:begins] + statements[ends + 1 :]


def test_another_teams_job_is_not_found_by_any_of_its_addresses(place: House) -> None:
    theirs = place.submit("bob", "nlp", name="secret plan")
    client = as_("ann", place)
    for path in ("", "cancel/", "log/1"):
        assert client.get(f"/jobs/{theirs.pk}/{path}").status_code == 404, path
    for path in ("cancel/", "hold/", "priority/"):
        assert client.post(f"/jobs/{theirs.pk}/{path}").status_code == 404, path
    assert b"secret plan" not in client.get("/queue/").content
    assert client.get(f"/jobs/new/?clone={theirs.pk}").status_code == 404
    assert Job.objects.get(pk=theirs.pk).state == "waiting"


def test_the_map_names_state_owner_and_share_of_every_gpu(place: House) -> None:
    place.submit(gpus=3, simulation={"runs": 1e7})
    place.step()
    Node.objects.filter(name="n2").update(state="down")
    data = as_("bob", place).get("/clusters/map.json").json()
    nodes = {row[1]: row for row in data["nodes"]}
    assert sorted(nodes) == ["n1", "n2"]
    assert data["teams"] == ["vision"]
    states = {name: data["states"][row[4]] for name, row in nodes.items()}
    assert states["n2"] == "down"
    held = [cell for row in nodes.values() for cell in row[5] if cell[0] >= 0]
    assert [cell[:2] for cell in held] == [[0, 1.0]] * 3
    assert sum(len(row[5]) for row in nodes.values()) == 16


def test_the_map_of_a_private_queue_hides_who_owns_what(place: House, settings: Any) -> None:
    settings.GPUPORTAL_QUEUE = "private"
    place.submit(gpus=3, simulation={"runs": 1e7})
    place.step()
    assert as_("bob", place).get("/clusters/map.json").json()["teams"] == ["another team"]
    assert as_("ann", place).get("/clusters/map.json").json()["teams"] == ["vision"]


def test_an_administrator_drains_a_node_with_a_reason_and_resumes_it(place: House) -> None:
    client, node = as_("ada", place), Node.objects.get(name="n1")
    assert client.post(f"/nodes/{node.pk}/drain/", {"reason": " "}).status_code == 422
    assert client.post(f"/nodes/{node.pk}/drain/", {"reason": "fan is loud"}).status_code == 302
    node.refresh_from_db()
    assert (node.state, node.drained_by_portal, node.state_reason) == ("drained", True, "fan is loud")
    page = client.get(f"/nodes/{node.pk}/").content.decode()
    assert "fan is loud" in page and "ada" in page
    place.submit(gpus=8)
    place.step()
    held_on = Job.objects.get().attempts.get().allocations.values_list("gpu__node__name", flat=True)
    assert set(held_on) == {"n2"}
    assert client.post(f"/nodes/{node.pk}/resume/").status_code == 302
    node.refresh_from_db()
    assert (node.state, node.drained_by_portal) == ("up", False)
    assert NodeInterval.objects.get(node=node).during.upper is not None
    assert list(
        AuditEvent.objects.filter(action__startswith="node.").order_by("pk").values_list("action", flat=True)
    ) == [
        "node.drain",
        "node.resume",
    ]


@pytest.mark.parametrize("username", ["ann", "lea", "mara"])
def test_nobody_else_drains_or_plans_maintenance(place: House, username: str) -> None:
    client, node = as_(username, place), Node.objects.get(name="n1")
    assert client.get(f"/nodes/{node.pk}/drain/").status_code == 403
    assert client.post(f"/nodes/{node.pk}/drain/", {"reason": "no"}).status_code == 403
    assert client.post(f"/nodes/{node.pk}/resume/").status_code == 403
    form = {"name": "x", "begins_at": "2030-01-01T10:00", "ends_at": "2030-01-01T12:00"}
    assert client.post(f"/nodes/{node.pk}/", form).status_code == 403
    assert not Window.objects.exists()
    assert b"Drain" not in client.get(f"/nodes/{node.pk}/").content


def test_maintenance_is_planned_in_the_viewers_zone_and_cancelled(place: House) -> None:
    place.users["ada"].time_zone = "America/New_York"
    place.users["ada"].save()
    client, node = as_("ada", place), Node.objects.get(name="n1")
    bad = client.post(
        f"/nodes/{node.pk}/", {"name": "x", "begins_at": "2030-01-02T10:00", "ends_at": "2030-01-01T12:00"}
    )
    assert bad.status_code == 422
    assert b"is not after the begin" in bad.content
    form = {"name": "firmware", "begins_at": "2030-01-01T10:00", "ends_at": "2030-01-01T12:00"}
    assert client.post(f"/nodes/{node.pk}/", form).status_code == 302
    window = Window.objects.get()
    assert window.begins_at.isoformat() == "2030-01-01T15:00:00+00:00"
    assert b"firmware" in client.get(f"/nodes/{node.pk}/").content
    other = Node.objects.get(name="n2")
    assert client.post(f"/nodes/{other.pk}/windows/{window.pk}/cancel/").status_code == 404
    assert client.post(f"/nodes/{node.pk}/windows/{window.pk}/cancel/").status_code == 302
    window.refresh_from_db()
    assert window.cancelled_at is not None


def test_control_and_direction_characters_are_made_visible(place: House) -> None:
    job = place.submit(name="a\u202egnp<b>", command="echo \x07\u2066hi")
    page = as_("ann", place).get(f"/jobs/{job.pk}/").content.decode()
    assert not {"\u202e", "\u2066", "\x07"} & set(page)
    assert "gnp&lt;b&gt;" in page


def test_bulk_cancel_asks_first_and_then_gives_a_result_for_each_job(place: House) -> None:
    mine, theirs = place.submit(), place.submit("bob", "nlp")
    client = as_("ann", place)
    form = {"action": "cancel", "job": [mine.pk, theirs.pk]}
    assert "<h1>" in client.post("/queue/", form).content.decode()
    assert Job.objects.filter(state="cancelled").count() == 0
    page = client.post("/queue/", {**form, "sure": "yes"}).content.decode()
    assert str(mine.pk) in page and str(theirs.pk) in page
    assert [Job.objects.get(pk=job.pk).state for job in (mine, theirs)] == ["cancelled", "waiting"]
