"""Health, request names, errors of the API and the files of pages."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from gpuportal import staticfiles
from scheduling.models import Cycle


def test_healthz_answers_without_a_database(client: Client) -> None:
    answer = client.get("/healthz")
    assert (answer.status_code, answer.content) == (200, b"ok\n")


@pytest.mark.django_db
def test_readyz_says_that_no_cycle_has_run(client: Client) -> None:
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"] == {
        "database": "ok",
        "migrations": "ok",
        "redis": "ok",
        "loop": "no cycle has run yet",
    }


@pytest.mark.django_db
@pytest.mark.parametrize(("age", "status"), [(5, 200), (600, 503)])
def test_readyz_tells_a_turning_loop_from_a_stuck_one(client: Client, age: int, status: int) -> None:
    Cycle.objects.create(started_at=timezone.now() - timedelta(seconds=age))
    answer = client.get("/readyz")
    assert answer.status_code == status, answer.json()
    assert (answer.json()["checks"]["loop"] == "ok") is (status == 200)


def test_readyz_names_a_redis_that_is_away(client: Client, db: None, settings: object) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"  # type: ignore[attr-defined]
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "nowhere" in answer.json()["checks"]["redis"]


@pytest.mark.parametrize(
    ("given", "kept"), [("ab-12.x_Y", True), ("", False), ("a b", False), ("x" * 65, False), ("<script>", False)]
)
def test_a_request_id_is_kept_if_it_is_harmless(client: Client, given: str, kept: bool) -> None:
    answered = client.get("/healthz", headers={"x-request-id": given})["X-Request-ID"]
    assert (answered == given) is kept
    assert 1 <= len(answered) <= 64


def test_pages_allow_no_foreign_and_no_inline_script(client: Client, db: None) -> None:
    policy = client.get("/accounts/login/")["Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";") if rule.strip())
    assert rules["script-src"] == "'self'"
    assert rules["default-src"] == "'self'"
    assert rules["object-src"] == rules["frame-ancestors"] == "'none'"


def test_static_files_are_collected_once_and_again_after_a_change(settings: object, tmp_path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "page.css").write_text("body { color: red }" * 50)
    settings.STATICFILES_DIRS = [source]  # type: ignore[attr-defined]
    settings.STATICFILES_FINDERS = ["django.contrib.staticfiles.finders.FileSystemFinder"]  # type: ignore[attr-defined]
    settings.STATIC_ROOT = target  # type: ignore[attr-defined]
    settings.STORAGES = {  # type: ignore[attr-defined]
        **settings.STORAGES,  # type: ignore[attr-defined]
        "staticfiles": {"BACKEND": "gpuportal.staticfiles.Storage"},
    }
    assert staticfiles.collect() is True
    assert {path.suffix for path in target.glob("page.*")} == {".css", ".gz"}
    assert staticfiles.collect() is False
    (source / "page.css").write_text("body { color: blue }" * 50)
    assert staticfiles.collect() is True
