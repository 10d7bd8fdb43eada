"""A person's way through the pages, in a real Chromium; every page without accessibility violations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from scheduling.models import Job
from tests.factories import House, house

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.xdist_group("browser")]

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
PASSWORD = "a-good-password-1"


@pytest.fixture
def place() -> House:
    return house(speed=3600)


@pytest.fixture
def loop(place: House) -> Iterator[None]:
    """The loop turns while the browser looks, as worker and beat make it turn."""
    over = threading.Event()

    def turn() -> None:
        from django.db import connection

        while not over.wait(0.2):
            place.step()
        connection.close()

    thread = threading.Thread(target=turn)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.fixture
def portal(page: Page, live_server: Any) -> Page:
    page.set_default_timeout(20_000)
    page.goto(f"{live_server.url}/")
    return page


def sign_in(page: Page, username: str) -> None:
    page.get_by_label("User name or e-mail address").fill(username)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("main").get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def violations(page: Page) -> list[str]:
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})")
    return [f"{row['id']}: {row['nodes'][0]['html'][:160]}" for row in found["violations"]]


def test_a_job_submitted_in_the_browser_starts_finishes_and_shows_its_log(portal: Page, loop: None) -> None:
    sign_in(portal, "ann")
    portal.get_by_role("link", name="New job").click()
    portal.get_by_label("Name", exact=True).fill("first steps")
    portal.get_by_label("Command").fill("python train.py")
    portal.get_by_label("GPUs per worker").fill("2")
    portal.get_by_role("button", name="Submit").click()
    expect(portal.get_by_role("heading", name="first steps")).to_be_visible()
    state = portal.locator("#state")
    expect(state.get_by_text("succeeded").first).to_be_visible(timeout=30_000)
    job = Job.objects.get(name="first steps")
    assert (job.first_started_at - job.submitted_at).total_seconds() < 5
    portal.reload()
    expect(portal.get_by_label("Log", exact=True)).to_contain_text("starting first steps")


def test_a_refused_job_says_why_at_the_field(portal: Page, place: House) -> None:
    sign_in(portal, "ann")
    portal.get_by_role("link", name="New job").click()
    portal.get_by_label("Name", exact=True).fill("too wide")
    portal.get_by_label("GPUs per worker").fill("9")
    portal.get_by_label("Walltime").fill("a while")
    portal.get_by_role("button", name="Submit").click()
    expect(portal.get_by_text("“a while” is not a duration")).to_be_visible()
    portal.get_by_label("Walltime").fill("2h")
    portal.get_by_role("button", name="Submit").click()
    expect(portal.get_by_text("the largest node has 8")).to_be_visible()
    assert not Job.objects.exists()


def test_the_queue_tells_the_reason_and_cancelling_asks_first(portal: Page, place: House) -> None:
    place.submit(name="whole", gpus=8, workers=2, interruptible=True, simulation={"runs": 1e7})
    place.submit(name="behind", gpus=8, interruptible=True)
    place.step()
    sign_in(portal, "ann")
    portal.get_by_role("link", name="Queue").click()
    expect(portal.get_by_text("It asks for 8 GPUs in a100-sim; 0 are free.")).to_be_visible()
    portal.get_by_role("link", name="behind").click()
    portal.get_by_role("button", name="Cancel …").click()
    expect(portal.get_by_role("heading", name="Cancel job")).to_be_visible()
    assert Job.objects.get(name="behind").state == "waiting"
    portal.get_by_role("button", name="Cancel the job").click()
    expect(portal.locator("#state").get_by_text("cancelled").first).to_be_visible()


def test_another_teams_job_is_not_found(portal: Page, place: House, live_server: Any) -> None:
    theirs = place.submit("bob", "nlp", name="secret plan")
    sign_in(portal, "ann")
    portal.goto(f"{live_server.url}/jobs/{theirs.pk}/")
    expect(portal.get_by_role("heading", name="Not found")).to_be_visible()
    portal.goto(f"{live_server.url}/queue/")
    expect(portal.get_by_text("secret plan")).to_have_count(0)


def test_names_and_commands_of_others_are_only_text(portal: Page, place: House, live_server: Any) -> None:
    nasty = "<script>document.title='owned'</script>\u202egnp"
    job = place.submit(name=nasty, command=f"echo '{nasty}'\x07")
    sign_in(portal, "ann")
    for path in ("/", "/queue/", f"/jobs/{job.pk}/"):
        portal.goto(live_server.url + path)
        expect(portal.get_by_text("<script>document.title").first).to_be_visible()
        assert "owned" not in portal.title()
        assert "\u202e" not in portal.content()


def test_a_one_time_password_is_changed_before_anything_else(portal: Page, place: House, live_server: Any) -> None:
    user = place.users["ann"]
    user.must_change_password = True
    user.save()
    portal.get_by_label("User name or e-mail address").fill("ann")
    portal.get_by_label("Password").fill(PASSWORD)
    portal.get_by_role("main").get_by_role("button", name="Sign in").click()
    expect(portal.get_by_role("heading", name="Choose your own password")).to_be_visible()
    portal.goto(f"{live_server.url}/queue/")
    expect(portal.get_by_role("heading", name="Choose your own password")).to_be_visible()
    portal.locator("input[name=oldpassword]").fill(PASSWORD)
    portal.locator("input[name=password1]").fill("my-very-own-words-9")
    portal.locator("input[name=password2]").fill("my-very-own-words-9")
    portal.get_by_role("button", name="Save").click()
    portal.goto(f"{live_server.url}/queue/")
    expect(portal.get_by_role("heading", name="Queue")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_an_accessibility_violation(portal: Page, place: House, live_server: Any, scheme: Any) -> None:
    job = place.submit(name="one", gpus=8, workers=2, interruptible=True, simulation={"runs": 1e7})
    place.submit(name="two", gpus=8, interruptible=True)
    place.step()
    portal.emulate_media(color_scheme=scheme)
    assert violations(portal) == []
    sign_in(portal, "ann")
    for path in ("/", "/queue/", "/queue/?state=running", "/jobs/new/", f"/jobs/{job.pk}/", "/clusters/", "/me/"):
        portal.goto(live_server.url + path)
        assert violations(portal) == [], path


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_pages_do_not_scroll_sideways(portal: Page, place: House, live_server: Any, width: int) -> None:
    place.submit(name="one")
    portal.set_viewport_size({"width": width, "height": 800})
    sign_in(portal, "ann")
    for path in ("/", "/queue/", "/jobs/new/", "/clusters/", "/me/"):
        portal.goto(live_server.url + path)
        assert portal.evaluate("document.documentElement.scrollWidth") <= width, path
