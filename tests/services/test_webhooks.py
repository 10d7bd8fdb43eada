"""Webhooks: what is sent, signed, retried, refused, given up, and never lost."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from ipaddress import ip_address
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from scheduling.models import Delivery, Event, Happening, Notification, Webhook
from scheduling.services import clock, delivery, outbound
from scheduling.services.cycle import run_cycle
from scheduling.services.delivery import deliver
from scheduling.services.errors import Conflict, InvalidRequest
from scheduling.services.happenings import forget_listeners
from scheduling.services.housekeeping import housekeeping
from scheduling.services.jobs import cancel_job
from scheduling.services.telling import tell
from scheduling.services.webhooks import change_webhook, create_webhook, delete_webhook, replay, send_test
from teams.models import AuditEvent, Membership, Role, Team
from tests.factories import House, house
from tests.receiver import Receiver, receiver

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _loopback_is_allowed(settings: Any) -> Iterator[None]:
    settings.GPUPORTAL_WEBHOOK_PRIVATE = True
    forget_listeners()
    yield
    forget_listeners()


@pytest.fixture
def place() -> House:
    return house()


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def hook(place: House, url: str, *events: str, team: str | None = "vision", by: str = "lea") -> tuple[Webhook, bytes]:
    made, secret = create_webhook(
        actor=place.actor(by), team=place.teams[team] if team else None, name="chat", url=url,
        events=events or ("job.ended",),
    )  # fmt: skip
    return made, base64.b64decode(secret.removeprefix("whsec_"))


def cancelled(place: House, name: str = "train") -> None:
    """A job that has ended."""
    cancel_job(actor=place.actor("ann"), job_id=place.submit(name=name).pk)


def due_now() -> None:
    Delivery.objects.filter(state="pending").update(due_at=clock.now() - timedelta(seconds=1))


def test_an_ended_job_is_told_signed_over_id_time_and_body(place: House, there: Receiver) -> None:
    _, key = hook(place, there.url, "job.ended")
    cancelled(place, "na\u00efve \u202e")
    assert (tell(), deliver()) == (1, 1)
    ((headers, body),) = there.got
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    wanted = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{wanted}"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 5
    told = json.loads(body)
    assert (told["type"], told["data"]["job"]["state"], told["data"]["team"]) == ("job.ended", "cancelled", "vision")
    assert told["data"]["job"]["name"] == "na\u00efve \u202e"
    row = Delivery.objects.get()
    assert (row.state, row.tries, row.response_code, row.log[0]["excerpt"]) == ("delivered", 1, 200, "thanks")
    assert (tell(), deliver()) == (0, 0)


def test_started_failed_evicted_and_succeeded_each_have_their_event(place: House, there: Receiver) -> None:
    hook(place, there.url, "job.started", "job.ended", "job.failed", "job.evicted")
    place.submit(name="good", simulation={"runs": 1})
    place.submit(name="bad", simulation={"runs": 1, "fails": [{"attempt": 1, "after": 0.5}]})
    deadline = time.monotonic() + 20
    while Happening.objects.count() < 4 and time.monotonic() < deadline:
        place.step()
    tell()
    deliver()
    told = sorted(
        (m["type"], m["data"]["job"]["name"], m["data"]["job"]["state"]) for _, b in there.got for m in [json.loads(b)]
    )
    assert told == [
        ("job.ended", "good", "succeeded"), ("job.failed", "bad", "failed"),
        ("job.started", "bad", "running"), ("job.started", "good", "running"),
    ]  # fmt: skip


def test_an_eviction_tells_why_and_how_much_was_lost(place: House, there: Receiver) -> None:
    hook(place, there.url, "job.evicted")
    victim = place.submit(gpus=8, workers=2, interruptible=True, simulation={"runs": 1e7})
    place.step()
    victim.attempts.update(started_at=timezone.now() - timedelta(hours=1))
    place.submit("bob", "nlp", gpus=8)
    deadline = time.monotonic() + 20
    while not Happening.objects.exists() and time.monotonic() < deadline:
        place.step()
    tell()
    deliver()
    told = json.loads(there.got[0][1])["data"]
    assert (told["attempt"]["outcome"], told["attempt"]["stop_reason"]) == ("preempted", "reclaim")
    assert told["attempt"]["lost_gpu_seconds"] > 3600
    line = Notification.objects.get()
    assert line.user == place.users["ann"] and "was evicted" in line.title and "GPU-hours" in line.text


def test_fifty_starts_cost_the_outbox_one_insert_and_nothing_when_nobody_listens(place: House) -> None:
    def cycle(count: int) -> list[str]:
        place.submit(gpus=0, share=Decimal("0.01"), interruptible=True, count=count)
        with CaptureQueriesContext(connection) as queries:
            run_cycle()
        return [row["sql"] for row in queries if "scheduling_happening" in row["sql"]]

    assert cycle(50) == []
    hook(place, "http://127.0.0.1:9/", "job.started")
    assert len(cycle(50)) == 1
    assert Happening.objects.filter(event="job.started").count() == 50


def test_telling_a_batch_takes_the_same_queries_for_5_as_for_50(place: House) -> None:
    hook(place, "http://127.0.0.1:9/", "job.ended")

    def queries(count: int) -> int:
        for _ in range(count):
            cancelled(place)
        with CaptureQueriesContext(connection) as captured:
            assert tell() == count
        return len(captured)

    assert queries(5) == queries(50)


def test_a_failed_try_is_repeated_later_and_later_under_the_same_id(place: House) -> None:
    with receiver(500, 503, 200) as there:
        hook(place, there.url)
        cancelled(place)
        tell()
        pauses = []
        for _ in range(2):
            deliver()
            row = Delivery.objects.get()
            assert row.state == "pending"
            pauses.append((row.due_at - clock.now()).total_seconds())
            due_now()
        deliver()
    assert 4 <= pauses[0] <= 10 < 2 * 10 and 9 <= pauses[1] <= 20
    row = Delivery.objects.get()
    assert (row.state, row.tries, [line["code"] for line in row.log]) == ("delivered", 3, [500, 503, 200])
    assert len({headers["webhook-id"] for headers, _ in there.got}) == 1
    assert len({body for _, body in there.got}) == 1
    assert Webhook.objects.get().failures == 0


def test_pauses_grow_to_an_hour_and_are_not_in_step() -> None:
    for tries, longest in ((1, 10), (5, 160), (9, 2560), (10, 3600), (30, 3600)):
        seconds = {delivery.pause_after(tries).total_seconds() for _ in range(20)}
        assert len(seconds) > 1 and all(longest / 2 <= second <= longest for second in seconds)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("hang", "No answer within 0.6 s"),
        ("drip", "No answer within 0.6 s"),
        ("redirect", "redirects are not followed"),
    ],
)
def test_a_receiver_that_hangs_drips_or_redirects_fails_in_time(
    place: House, monkeypatch: Any, answer: str, says: str
) -> None:
    send = outbound.post
    monkeypatch.setattr(delivery, "post", lambda *args, **more: send(*args, **more, deadline=0.6))
    with receiver(answer) as there:
        hook(place, there.url)
        cancelled(place)
        tell()
        began = time.monotonic()
        deliver()
        assert time.monotonic() - began < 3
        assert len(there.got) == 1
    row = Delivery.objects.get()
    assert row.state == "pending" and says in row.log[0]["error"], row.log


def test_a_slow_webhook_does_not_hold_up_the_others(place: House, monkeypatch: Any, there: Receiver) -> None:
    send = outbound.post
    monkeypatch.setattr(delivery, "post", lambda *args, **more: send(*args, **more, deadline=1))
    with receiver("hang") as slow:
        hook(place, slow.url)
        create_webhook(actor=place.actor("lea"), team=place.teams["vision"], name="quick", url=there.url, events=["job.ended"])  # fmt: skip
        for _ in range(20):
            cancelled(place)
        tell()
        monkeypatch.setattr(delivery, "LONGEST", 3.5)
        deliver()
    assert len(there.got) == 20


def test_a_crash_between_sending_and_noting_it_sends_again_under_the_same_id(place: House, there: Receiver, monkeypatch: Any) -> None:  # fmt: skip
    hook(place, there.url)
    cancelled(place)
    tell()

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(delivery, "_record", crash)
        deliver()
    assert Delivery.objects.get().state == "pending"
    assert deliver() == 0  # somebody else may still be at it
    due_now()  # the lease runs out
    deliver()
    assert len(there.got) == 2 and len({headers["webhook-id"] for headers, _ in there.got}) == 1
    assert Delivery.objects.get().state == "delivered"


def test_a_crash_while_telling_leaves_the_outbox_as_it_was(place: House, there: Receiver, monkeypatch: Any) -> None:
    hook(place, there.url)
    cancelled(place)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(Notification.objects, "bulk_create", lambda *_, **__: (_ for _ in ()).throw(RuntimeError()))
        tell()
    assert Happening.objects.count() == 1 and not Delivery.objects.exists()
    tell()
    assert not Happening.objects.exists() and Delivery.objects.count() == 1


def test_after_days_of_failure_it_is_switched_off_with_a_notice_and_goes_on_when_switched_on(place: House) -> None:
    with receiver(500) as there:
        made, _ = hook(place, there.url)
        Webhook.objects.update(failures=20, failing_since=timezone.now() - timedelta(days=2, hours=23))
        cancelled(place)
        tell()
        deliver()
        assert Webhook.objects.get().enabled
        Webhook.objects.update(failing_since=timezone.now() - timedelta(days=3, minutes=1))
        due_now()
        deliver()
        made.refresh_from_db()
        assert not made.enabled and "Nothing was taken since" in made.disabled_reason
        tell()
        line = Notification.objects.get(event="webhook.disabled")
        assert line.user == place.users["lea"] and "switched off" in line.title
        assert AuditEvent.objects.filter(action="webhook.disable").count() == 1
        due_now()
        assert deliver() == 0
        there.answers = [200]
        change_webhook(actor=place.actor("lea"), webhook_id=made.pk, enabled=True)
        assert deliver() == 1 and Delivery.objects.get().state == "delivered"


def test_it_is_given_up_after_the_last_try_and_a_replay_sends_it_again(place: House, monkeypatch: Any) -> None:
    with receiver(500) as there:
        hook(place, there.url)
        cancelled(place)
        tell()
        Delivery.objects.update(tries=delivery.MOST_TRIES - 1)
        deliver()
        row = Delivery.objects.get()
        assert row.state == "failed" and row.finished_at is not None
        there.answers = [204]
        with pytest.raises(Delivery.DoesNotExist):
            replay(actor=place.actor("bob"), delivery_id=row.pk)
        replay(actor=place.actor("lea"), delivery_id=row.pk)
        with pytest.raises(Conflict, match="still being tried"):
            replay(actor=place.actor("lea"), delivery_id=row.pk)
        deliver()
    row.refresh_from_db()
    assert row.state == "delivered" and len({headers["webhook-id"] for headers, _ in there.got}) == 1


def test_a_receiver_that_is_gone_is_asked_no_more(place: House) -> None:
    with receiver(410) as there:
        made, _ = hook(place, there.url)
        send_test(actor=place.actor("lea"), webhook_id=made.pk)
        deliver()
    made.refresh_from_db()
    assert not made.enabled and "410" in made.disabled_reason
    with pytest.raises(Conflict, match="switched off"):
        send_test(actor=place.actor("lea"), webhook_id=made.pk)


def test_a_team_hears_of_itself_and_those_below_and_the_organisation_of_all(place: House, there: Receiver) -> None:
    top = Team.objects.create(name="science")
    Team.objects.filter(name="vision").update(parent=top)
    Membership.objects.create(user=place.users["lea"], team=top, role=Role.LEAD)
    for team, by in ((top, "lea"), (place.teams["nlp"], "ada"), (None, "ada")):
        create_webhook(actor=place.actor(by), team=team, name="chat", url=there.url, events=["job.ended"])
    cancelled(place)
    tell()
    assert sorted(str(row.webhook.team) for row in Delivery.objects.select_related("webhook__team")) == ["None", "science"]  # fmt: skip


def test_the_secret_is_stored_encrypted_and_not_in_the_audit_log(place: House, there: Receiver) -> None:
    made, secret = create_webhook(actor=place.actor("lea"), team=place.teams["vision"], name="x", url=there.url, events=["job.ended"])  # fmt: skip
    bare = secret.removeprefix("whsec_").encode()
    assert bare not in bytes(made.secret) and base64.b64decode(bare) not in bytes(made.secret)
    assert secret not in str(list(AuditEvent.objects.values()))


def test_leads_manage_their_teams_webhooks_and_nobody_elses(place: House, there: Receiver) -> None:
    for actor, team in (("ann", "vision"), ("lea", "nlp"), ("lea", None), ("mara", None)):
        with pytest.raises(PermissionDenied):
            hook(place, there.url, team=team, by=actor)
    made, _ = hook(place, there.url, team="nlp", by="ada")
    for act in (
        lambda: change_webhook(actor=place.actor("lea"), webhook_id=made.pk, name="mine"),
        lambda: delete_webhook(actor=place.actor("lea"), webhook_id=made.pk),
        lambda: send_test(actor=place.actor("lea"), webhook_id=made.pk),
    ):
        with pytest.raises(Webhook.DoesNotExist):
            act()
    with pytest.raises(InvalidRequest, match="already"):
        hook(place, there.url, team="nlp", by="ada")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://example.org/", "begins with https://"), ("http://example.org/", "begins with https://"),
        ("https://", "begins with https://"), ("https://a:b@example.org/", "no user name"),
        ("https://10.0.0.1/", "10.0.0.1 is not an address"), ("https://[::1]/", "::1 is not"),
        ("https://[::ffff:127.0.0.1]/", "is not an address"), ("https://169.254.169.254/latest", "169.254.169.254"),
        ("https://example.org:99999/", "not an address"), ("https://exämple.org/", "ASCII"),
        ("https://example.org/" + "x" * 500, "too many"), ("https://example.org/ x", "ASCII"),
    ],
)  # fmt: skip
def test_an_address_that_may_not_be_reached_is_refused_at_its_field(place: House, settings: Any, url: str, says: str) -> None:  # fmt: skip
    settings.GPUPORTAL_WEBHOOK_PRIVATE = False
    with pytest.raises(InvalidRequest) as refused:
        hook(place, url)
    assert says in refused.value.errors["url"][0]


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("93.184.216.34", True, True), ("2606:4700::1111", True, True), ("10.1.2.3", False, True),
        ("127.0.0.1", False, True), ("::1", False, True), ("fd00::1", False, True), ("100.64.0.1", False, True),
        ("169.254.169.254", False, False), ("fe80::1", False, False), ("224.0.0.1", False, False),
        ("0.0.0.0", False, False), ("240.0.0.1", False, False), ("255.255.255.255", False, False),
        ("::ffff:10.0.0.1", False, True), ("::ffff:169.254.169.254", False, False), ("64:ff9b::a00:1", False, True),
        ("2002:a00:1::", False, True), ("64:ff9b::5db8:d822", True, True),
    ],
)  # fmt: skip
def test_addresses_inside_are_not_reached_in_any_disguise(address: str, public: bool, private: bool) -> None:
    assert outbound.may_reach(ip_address(address), private=False) is public
    assert outbound.may_reach(ip_address(address), private=True) is private


def test_a_public_name_that_points_inside_is_refused_when_connecting(place: House, settings: Any, there: Receiver) -> None:  # fmt: skip
    port = there.url.rsplit(":", 1)[1].strip("/")
    hook(place, f"https://localhost:{port}/")
    settings.GPUPORTAL_WEBHOOK_PRIVATE = False
    cancelled(place)
    tell()
    deliver()
    assert "which webhooks may not reach" in Delivery.objects.get().log[0]["error"]
    assert there.got == []


def test_the_kept_answer_is_bounded_and_may_hold_anything(place: House, there: Receiver) -> None:
    there.body = b"\x00\xff<script>" + b"x" * 100_000
    hook(place, there.url)
    cancelled(place)
    tell()
    deliver()
    assert len(Delivery.objects.get().log[0]["excerpt"]) <= outbound.EXCERPT


def test_old_deliveries_and_notifications_go(place: House, there: Receiver) -> None:
    hook(place, there.url)
    cancelled(place)
    tell()
    Delivery.objects.update(created_at=timezone.now() - timedelta(days=15))
    Notification.objects.create(
        user=place.users["ann"], event=Event.JOB_FAILED, at=timezone.now() - timedelta(days=91), title="old"
    )
    housekeeping()
    assert not Delivery.objects.exists() and not Notification.objects.exists()
