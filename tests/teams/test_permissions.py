"""The one table of permissions."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from django.core.exceptions import PermissionDenied

from teams.actors import Actor
from teams.management.commands.permissions_doc import document
from teams.models import ApiToken, Membership, Quota, Role, Team
from teams.permissions import Permission, allowed, require, visible_team_ids
from teams.services.errors import Invalid
from teams.services.quotas import QuotaSpec, set_quota
from teams.services.tokens import create_token, find_token, revoke_token
from tests.factories import SYSTEM, house, person


def test_the_printed_page_is_that_of_the_code() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "permissions.md"
    assert page.read_text() == document()


@pytest.mark.django_db
def test_a_role_counts_in_the_teams_below_and_nowhere_else() -> None:
    top = Team.objects.create(name="top")
    leaf, other = Team.objects.create(name="leaf", parent=top), Team.objects.create(name="other")
    user = person("lena")
    Membership.objects.create(user=user, team=top, role=Role.LEAD)
    actor = Actor.person(user)
    assert allowed(actor, Permission.MANAGE_TEAM_JOBS, leaf)
    assert not allowed(actor, Permission.VIEW_JOBS, other)
    assert visible_team_ids(actor, Permission.VIEW_JOBS) == {top.pk, leaf.pk}
    with pytest.raises(PermissionDenied, match="lena lacks the permission manage-quotas"):
        require(actor, Permission.MANAGE_QUOTAS)


@pytest.mark.django_db
def test_a_token_is_shown_once_and_reaches_no_further_than_its_scopes() -> None:
    place = house()
    ann = place.users["ann"]
    token, secret = create_token(actor=Actor.person(ann), name="ci", scopes=["read"], expires_at=None, user=ann)
    assert secret not in str(ApiToken.objects.values().get())
    assert find_token(secret) == token
    assert find_token(secret[:-1] + ("A" if secret[-1] != "A" else "B")) is None
    through = Actor(ann, "ann", token=token)
    assert allowed(through, Permission.VIEW_JOBS, place.teams["vision"])
    assert not allowed(through, Permission.SUBMIT_JOBS, place.teams["vision"])
    revoke_token(actor=Actor.person(ann), token=token)
    assert find_token(secret) is None


@pytest.mark.django_db
def test_guarantees_beyond_the_capacity_are_refused_with_both_numbers() -> None:
    place = house()
    with pytest.raises(Invalid, match=r"add up to 17\.?0* GPUs, more than the capacity of the pool, 16 GPUs"):
        set_quota(actor=SYSTEM, team=place.teams["nlp"], pool_id=place.pool.pk, spec=QuotaSpec(Decimal(9)))


@pytest.mark.django_db
def test_a_changed_quota_keeps_its_history() -> None:
    place = house()
    set_quota(actor=SYSTEM, team=place.teams["nlp"], pool_id=place.pool.pk, spec=QuotaSpec(Decimal(4), Decimal(6)))
    rows = Quota.objects.filter(team=place.teams["nlp"]).order_by("during")
    assert [(row.guaranteed, row.limit) for row in rows] == [(8, None), (4, 6)]
    assert rows[0].during.upper == rows[1].during.lower
    assert rows[1].during.upper is None
