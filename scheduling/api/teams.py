"""Teams, members, quotas, budgets, allocation requests, tokens, and the audit log."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers as s
from rest_framework.request import Request
from rest_framework.response import Response

from gpuportal.api import not_found
from scheduling.api import schema
from scheduling.api.base import ApiView, StrictSerializer, page
from scheduling.models import Pool
from scheduling.services.errors import InvalidRequest
from teams.actors import Actor
from teams.models import AllocationRequest, ApiToken, AuditEvent, Budget, Membership, Quota, Role, Team, User
from teams.permissions import SCOPES, Permission, allowed, require, visible_team_ids
from teams.services import budgets, requests, teams, tokens
from teams.services.quotas import QuotaSpec, set_quota

_AMOUNT = {"max_digits": 14, "decimal_places": 6, "min_value": 0}
_TEAM = OpenApiParameter("team", {"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,63}$"})


class TeamOut(s.Serializer):
    id = s.IntegerField()
    name = s.CharField()
    title = s.CharField()
    parent = s.CharField(source="parent.name", default=None, allow_null=True)
    archived_at = s.DateTimeField(allow_null=True)


class TeamIn(StrictSerializer):
    name = s.CharField(max_length=64)
    title = s.CharField(max_length=200, required=False, allow_blank=True)
    parent = s.CharField(max_length=64, required=False, allow_null=True)


class MemberOut(s.Serializer):
    user = s.CharField(source="user.username")
    role = s.CharField()
    from_groups = s.BooleanField()


class MembersOut(s.Serializer):
    results = MemberOut(many=True)


class MemberIn(StrictSerializer):
    role = s.ChoiceField(Role.values)


class QuotaOut(s.Serializer):
    id = s.IntegerField()
    team = s.CharField(source="team.name")
    pool = s.CharField(source="pool.name")
    guaranteed = s.CharField()
    limit = s.CharField(allow_null=True)
    weight = s.CharField()
    begins_at = s.DateTimeField(source="during.lower")
    ends_at = s.DateTimeField(source="during.upper", allow_null=True)
    reason = s.CharField()


class QuotaIn(StrictSerializer):
    team = s.CharField(max_length=64)
    pool = s.CharField(max_length=64)
    guaranteed = s.DecimalField(**_AMOUNT)
    limit = s.DecimalField(**_AMOUNT, required=False, allow_null=True)
    weight = s.DecimalField(max_digits=10, decimal_places=4, min_value=0, required=False)
    from_at = s.DateTimeField(required=False, allow_null=True)
    reason = s.CharField(max_length=300, required=False, allow_blank=True)


class BudgetOut(s.Serializer):
    id = s.IntegerField()
    team = s.CharField(source="team.name")
    unit = s.CharField()
    amount = s.CharField()
    period = s.CharField()
    time_zone = s.CharField()
    warn_at = s.CharField()
    blocks = s.BooleanField()
    starts_on = s.DateField()
    ends_on = s.DateField(allow_null=True)


class BudgetIn(StrictSerializer):
    team = s.CharField(max_length=64)
    unit = s.ChoiceField(["gpu-hours", "money"])
    amount = s.DecimalField(max_digits=15, decimal_places=2, min_value=0)
    period = s.ChoiceField(["month", "quarter", "year"])
    starts_on = s.DateField()
    ends_on = s.DateField(required=False, allow_null=True)
    time_zone = s.CharField(max_length=64, required=False)
    warn_at = s.DecimalField(max_digits=4, decimal_places=3, min_value=0, max_value=1, required=False)
    blocks = s.BooleanField(required=False)


class RequestOut(s.Serializer):
    id = s.IntegerField()
    team = s.CharField(source="team.name")
    pool = s.CharField(source="pool.name")
    asked_guaranteed = s.CharField()
    asked_limit = s.CharField(allow_null=True)
    granted_guaranteed = s.CharField(allow_null=True)
    granted_limit = s.CharField(allow_null=True)
    justification = s.CharField()
    begins_at = s.DateTimeField()
    expires_at = s.DateTimeField()
    state = s.CharField()
    reason = s.CharField()
    renewal_of = s.IntegerField(source="renewal_of_id", allow_null=True)


class RequestIn(StrictSerializer):
    team = s.CharField(max_length=64)
    pool = s.CharField(max_length=64)
    guaranteed = s.DecimalField(**_AMOUNT)
    limit = s.DecimalField(**_AMOUNT, required=False, allow_null=True)
    justification = s.CharField(max_length=4000)
    begins_at = s.DateTimeField()
    expires_at = s.DateTimeField()
    renewal_of = s.IntegerField(min_value=1, max_value=schema.BIG, required=False, allow_null=True)


class DecisionIn(StrictSerializer):
    decision = s.ChoiceField(["approve", "decline", "withdraw"])
    reason = s.CharField(max_length=1000, required=False, allow_blank=True)
    guaranteed = s.DecimalField(**_AMOUNT, required=False, allow_null=True)
    limit = s.DecimalField(**_AMOUNT, required=False, allow_null=True)


class TokenOut(s.Serializer):
    id = s.IntegerField()
    name = s.CharField()
    prefix = s.CharField()
    team = s.CharField(source="team.name", default=None, allow_null=True)
    scopes = s.ListField(child=s.CharField())
    created_at = s.DateTimeField()
    expires_at = s.DateTimeField(allow_null=True)
    last_used_at = s.DateTimeField(allow_null=True)
    revoked_at = s.DateTimeField(allow_null=True)


class TokenMade(TokenOut):
    secret = s.CharField(help_text="Shown this once.")


class TokenIn(StrictSerializer):
    name = s.CharField(max_length=100)
    scopes = s.ListField(child=s.ChoiceField(list(SCOPES)), min_length=1, max_length=len(SCOPES))
    expires_at = s.DateTimeField(required=False, allow_null=True)
    team = s.CharField(max_length=64, required=False, allow_null=True, help_text="For a robot of this team.")


class AuditOut(s.Serializer):
    id = s.IntegerField()
    at = s.DateTimeField()
    actor_label = s.CharField()
    action = s.CharField()
    object_type = s.CharField()
    object_id = s.CharField()
    object_label = s.CharField()
    before = s.JSONField(allow_null=True)
    after = s.JSONField(allow_null=True)
    reason = s.CharField()
    via = s.CharField()
    address = s.CharField(allow_null=True)
    request_id = s.CharField()


def team_named(actor: Actor, name: str) -> Team:
    """404 for what the actor may not see."""
    team = Team.objects.select_related("parent__parent").filter(name=name).first()
    if team is None or not allowed(actor, Permission.VIEW_TEAM, team):
        raise not_found("team", name)
    return team


def _team_field(actor: Actor, name: str) -> Team:
    team = Team.objects.select_related("parent__parent").filter(name=name, archived_at=None).first()
    if team is None or not allowed(actor, Permission.VIEW_TEAM, team):
        raise InvalidRequest({"team": [f"There is no team {name!r} that you may see."]})
    return team


def _pool_field(name: str) -> Pool:
    pool = Pool.objects.filter(name=name).first()
    if pool is None:
        known = ", ".join(Pool.objects.values_list("name", flat=True)[:50])
        raise InvalidRequest({"pool": [f"There is no pool {name!r}; there are {known or 'none'}."]})
    return pool


class _Listing(ApiView):
    def listed(self, request: Request, rows: Any, kind: Any, path: str = "team_id") -> Response:
        """A page of what belongs to the teams that the actor sees, or to one of them."""
        name = request.query_params.get("team")
        if name is not None:
            rows = rows.filter(**{path: team_named(self.actor, name.replace("\x00", "")).pk})
        scope = visible_team_ids(self.actor, Permission.VIEW_TEAM)
        if scope is not None:
            rows = rows.filter(**{f"{path}__in": scope})
        return page(request, rows, lambda found: list(kind(found, many=True).data))


class Teams(_Listing):
    @extend_schema(operation_id="teams_list", tags=["teams"], parameters=schema.CURSOR, responses=schema.answers(schema.paged(TeamOut), 400))  # fmt: skip
    def get(self, request: Request) -> Response:
        """Teams that you belong to, with those below them."""
        rows, scope = Team.objects.select_related("parent"), visible_team_ids(self.actor, Permission.VIEW_TEAM)
        rows = rows if scope is None else rows.filter(pk__in=scope)
        return page(request, rows, lambda found: list(TeamOut(found, many=True).data))

    @extend_schema(operation_id="teams_create", tags=["teams"], request=TeamIn, responses=schema.answers(TeamOut, 400, 422, ok=201))  # fmt: skip
    def post(self, request: Request) -> Response:
        """A new leaf of the tree; administrators only."""
        require(self.actor, Permission.MANAGE_TEAMS)
        data = self.body(TeamIn)
        parent = _team_field(self.actor, data["parent"]) if data.get("parent") else None
        made = teams.create_team(actor=self.actor, name=data["name"], title=data.get("title", ""), parent=parent)
        return Response(TeamOut(made).data, status=201)


class OneTeam(ApiView):
    @extend_schema(operation_id="teams_get", tags=["teams"], responses=schema.answers(TeamOut, 404))
    def get(self, request: Request, name: str) -> Response:
        """One team."""
        return Response(TeamOut(team_named(self.actor, name)).data)

    @extend_schema(operation_id="teams_archive", tags=["teams"], responses=schema.answers(TeamOut, 404, 422))
    def delete(self, request: Request, name: str) -> Response:
        """Archive: it takes no more jobs; its past stays."""
        return Response(TeamOut(teams.archive_team(actor=self.actor, team=team_named(self.actor, name))).data)


class Members(ApiView):
    @extend_schema(operation_id="members_list", tags=["teams"], responses=schema.answers(MembersOut, 404))
    def get(self, request: Request, name: str) -> Response:
        """Members of a team with their roles: at most 2,000."""
        rows = team_named(self.actor, name).memberships.select_related("user").order_by("user__username")[:2000]
        return Response({"results": MemberOut(rows, many=True).data})


class OneMember(ApiView):
    def _found(self, name: str, username: str) -> tuple[Team, User]:
        team = team_named(self.actor, name)
        require(self.actor, Permission.MANAGE_MEMBERS, team)
        user = User.objects.filter(username=username, is_active=True).first()
        if user is None:
            raise not_found("person", username)
        return team, user

    @extend_schema(operation_id="members_set", tags=["teams"], request=MemberIn, responses=schema.answers(MemberOut, 400, 404, 422))  # fmt: skip
    def put(self, request: Request, name: str, username: str) -> Response:
        """Add a person or change the role; leads of the team only."""
        team, user = self._found(name, username)
        row = teams.set_member(actor=self.actor, team=team, user=user, role=self.body(MemberIn)["role"])
        return Response(MemberOut(row).data)

    @extend_schema(operation_id="members_remove", tags=["teams"], responses=schema.answers(None, 404, 422, ok=204))
    def delete(self, request: Request, name: str, username: str) -> Response:
        """Take a person out of the team; the last lead stays."""
        team, user = self._found(name, username)
        try:
            teams.remove_member(actor=self.actor, team=team, user=user)
        except Membership.DoesNotExist:
            raise not_found("member", username) from None
        return Response(status=204)


class Quotas(_Listing):
    @extend_schema(operation_id="quotas_list", tags=["quotas"], parameters=[*schema.CURSOR, _TEAM], responses=schema.answers(schema.paged(QuotaOut), 400, 404))  # fmt: skip
    def get(self, request: Request) -> Response:
        """Quotas in force, planned and past, of the teams that you see."""
        return self.listed(request, Quota.objects.select_related("team", "pool"), QuotaOut)

    @extend_schema(operation_id="quotas_set", tags=["quotas"], request=QuotaIn, responses=schema.answers(QuotaOut, 400, 422, ok=201))  # fmt: skip
    def post(self, request: Request) -> Response:
        """Set a quota now or from a date on; refused when guarantees would add up to more than there is."""
        require(self.actor, Permission.MANAGE_QUOTAS)
        data = self.body(QuotaIn)
        spec = QuotaSpec(data["guaranteed"], data.get("limit"), data.get("weight", Decimal(1)))
        made = set_quota(
            actor=self.actor, team=_team_field(self.actor, data["team"]), pool_id=_pool_field(data["pool"]).pk,
            spec=spec, from_at=data.get("from_at"), reason=data.get("reason", ""),
        )  # fmt: skip
        return Response(QuotaOut(Quota.objects.select_related("team", "pool").get(pk=made.pk)).data, status=201)


class Budgets(_Listing):
    @extend_schema(operation_id="budgets_list", tags=["budgets"], parameters=[*schema.CURSOR, _TEAM], responses=schema.answers(schema.paged(BudgetOut), 400, 404))  # fmt: skip
    def get(self, request: Request) -> Response:
        """Budgets of the teams that you see."""
        return self.listed(request, Budget.objects.select_related("team"), BudgetOut)

    @extend_schema(operation_id="budgets_create", tags=["budgets"], request=BudgetIn, responses=schema.answers(BudgetOut, 400, 422, ok=201))  # fmt: skip
    def post(self, request: Request) -> Response:
        """A new budget; managers only."""
        require(self.actor, Permission.MANAGE_BUDGETS)
        data = self.body(BudgetIn)
        made = budgets.create_budget(actor=self.actor, **{**data, "team": _team_field(self.actor, data["team"])})
        return Response(BudgetOut(made).data, status=201)


class OneBudget(ApiView):
    @extend_schema(operation_id="budgets_delete", tags=["budgets"], responses=schema.answers(None, 404, ok=204))
    def delete(self, request: Request, pk: int) -> Response:
        """Ends a budget; the audit log keeps it."""
        row = Budget.objects.select_related("team__parent__parent").filter(pk=pk).first()
        if row is None or not allowed(self.actor, Permission.VIEW_TEAM, row.team):
            raise not_found("budget", pk)
        budgets.delete_budget(actor=self.actor, budget=row)
        return Response(status=204)


class Requests(_Listing):
    @extend_schema(operation_id="requests_list", tags=["requests"], parameters=[*schema.CURSOR, _TEAM], responses=schema.answers(schema.paged(RequestOut), 400, 404))  # fmt: skip
    def get(self, request: Request) -> Response:
        """Allocation requests of the teams that you see."""
        return self.listed(request, AllocationRequest.objects.select_related("team", "pool"), RequestOut)

    @extend_schema(operation_id="requests_ask", tags=["requests"], request=RequestIn, responses=schema.answers(RequestOut, 400, 422, ok=201))  # fmt: skip
    def post(self, request: Request) -> Response:
        """Ask for a larger quota; leads of the team."""
        data = self.body(RequestIn)
        team, renewal = _team_field(self.actor, data.pop("team")), data.pop("renewal_of", None)
        before = AllocationRequest.objects.filter(pk=renewal, team=team).first() if renewal else None
        if renewal and before is None:
            raise InvalidRequest({"renewal_of": [f"Team {team.name} has no request {renewal}."]})
        made = requests.ask(
            actor=self.actor, team=team, pool_id=_pool_field(data.pop("pool")).pk, limit=data.pop("limit", None),
            renewal_of=before, **data,
        )  # fmt: skip
        return Response(RequestOut(made).data, status=201)


class OneRequest(ApiView):
    def _found(self, pk: int) -> AllocationRequest:
        row = AllocationRequest.objects.select_related("team__parent__parent", "pool").filter(pk=pk).first()
        if row is None or not allowed(self.actor, Permission.VIEW_TEAM, row.team):
            raise not_found("request", pk)
        return row

    @extend_schema(operation_id="requests_get", tags=["requests"], responses=schema.answers(RequestOut, 404))
    def get(self, request: Request, pk: int) -> Response:
        """One request."""
        return Response(RequestOut(self._found(pk)).data)

    @extend_schema(operation_id="requests_decide", tags=["requests"], request=DecisionIn, responses=schema.answers(RequestOut, 400, 404, 422))  # fmt: skip
    def post(self, request: Request, pk: int) -> Response:
        """Approve (as asked or with other numbers), decline, or withdraw."""
        self._found(pk)
        data, actor = self.body(DecisionIn), self.actor
        reason = data.get("reason", "")
        if data["decision"] == "approve":
            amounts = {"guaranteed": data.get("guaranteed"), "limit": data.get("limit")}
            requests.approve(actor=actor, request_id=pk, reason=reason, **amounts)
        elif data["decision"] == "decline":
            requests.decline(actor=actor, request_id=pk, reason=reason)
        else:
            requests.withdraw(actor=actor, request_id=pk)
        return Response(RequestOut(self._found(pk)).data)


def _tokens(actor: Actor) -> Any:
    """One's own, and those of robots of teams in which one manages tokens."""
    rows = ApiToken.objects.select_related("team")
    own = rows.filter(user=actor.user) if actor.user is not None else rows.none()
    scope = visible_team_ids(actor, Permission.MANAGE_TOKENS)
    return own | (rows.filter(team__isnull=False) if scope is None else rows.filter(team_id__in=scope))


class Tokens(ApiView):
    @extend_schema(operation_id="tokens_list", tags=["tokens"], parameters=schema.CURSOR, responses=schema.answers(schema.paged(TokenOut), 400))  # fmt: skip
    def get(self, request: Request) -> Response:
        """Your tokens and those of your teams' robots; never their secrets."""
        return page(request, _tokens(self.actor), lambda found: list(TokenOut(found, many=True).data))

    @extend_schema(operation_id="tokens_create", tags=["tokens"], request=TokenIn, responses=schema.answers(TokenMade, 400, 422, ok=201))  # fmt: skip
    def post(self, request: Request) -> Response:
        """A new token. A token cannot give more than it has itself."""
        data, actor = self.body(TokenIn), self.actor
        if actor.token is not None and "admin" not in actor.token.scopes:
            excess = sorted(set(data["scopes"]) - set(actor.token.scopes))
            if excess:
                raise InvalidRequest({"scopes": [f"{', '.join(excess)}: the token in use lacks them."]})
        team = _team_field(actor, data["team"]) if data.get("team") else None
        if team is None and actor.user is None:
            raise InvalidRequest({"team": ["A robot has no person; name the team."]})
        made, secret = tokens.create_token(
            actor=actor, name=data["name"], scopes=data["scopes"], expires_at=data.get("expires_at"),
            user=None if team else actor.user, team=team,
        )  # fmt: skip
        return Response({**TokenOut(made).data, "secret": secret}, status=201)


class OneToken(ApiView):
    @extend_schema(operation_id="tokens_revoke", tags=["tokens"], responses=schema.answers(None, 404, ok=204))
    def delete(self, request: Request, pk: int) -> Response:
        """Works no more from now on."""
        row = _tokens(self.actor).filter(pk=pk).first()
        if row is None:
            raise not_found("token", pk)
        tokens.revoke_token(actor=self.actor, token=row)
        return Response(status=204)


class Audit(ApiView):
    @extend_schema(
        operation_id="audit_list", tags=["audit"], responses=schema.answers(schema.paged(AuditOut), 400),
        parameters=[*schema.CURSOR, OpenApiParameter("action", str), OpenApiParameter("actor", str)],
    )  # fmt: skip
    def get(self, request: Request) -> Response:
        """Who did what, before and after, newest first; administrators only."""
        require(self.actor, Permission.VIEW_AUDIT)
        rows = AuditEvent.objects.all()
        for name, path in (("action", "action"), ("actor", "actor_label")):
            if request.query_params.get(name):
                rows = rows.filter(**{path: request.query_params[name].replace("\x00", "")})
        return page(request, rows, lambda found: list(AuditOut(found, many=True).data))
