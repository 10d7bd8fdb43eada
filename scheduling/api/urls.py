"""Addresses of the REST API."""

from django.urls import URLPattern, path, register_converter

from scheduling.api import hardware, jobs, reports, teams


class NameConverter:
    """Names of teams, as their validator allows them."""

    regex = "[a-z0-9][a-z0-9._-]{0,63}"

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: str) -> str:
        return value


class UsernameConverter(NameConverter):
    regex = "[A-Za-z0-9@.+_-]{1,150}"


class NumberConverter:
    """Ids: what fits into the database."""

    regex = "[0-9]{1,18}"

    def to_python(self, value: str) -> int:
        return int(value)

    def to_url(self, value: int) -> str:
        return str(value)


register_converter(NameConverter, "name")
register_converter(UsernameConverter, "username")
register_converter(NumberConverter, "number")

urlpatterns: list[URLPattern] = [
    path("jobs/", jobs.Jobs.as_view(), name="api-jobs"),
    path("jobs/bulk/", jobs.Bulk.as_view()),
    path("jobs/<number:pk>/", jobs.OneJob.as_view(), name="api-job"),
    path("jobs/<number:pk>/cancel/", jobs.Cancel.as_view()),
    path("jobs/<number:pk>/hold/", jobs.HoldJob.as_view()),
    path("jobs/<number:pk>/release/", jobs.ReleaseJob.as_view()),
    path("jobs/<number:pk>/clone/", jobs.Clone.as_view()),
    path("jobs/<number:pk>/log/", jobs.Log.as_view()),
    path("jobs/<number:pk>/events/", jobs.Events.as_view()),
    path("jobs/<number:pk>/blockers/", jobs.Blockers.as_view()),
    path("jobs/<number:pk>/estimate/", jobs.EstimateOfJob.as_view()),
    path("attempts/", jobs.Attempts.as_view()),
    path("attempts/<number:pk>/", jobs.OneAttempt.as_view()),
    path("attempts/<uuid:attempt>/marks/", jobs.Marks.as_view(), name="api-marks"),
    path("teams/", teams.Teams.as_view()),
    path("teams/<name:name>/", teams.OneTeam.as_view()),
    path("teams/<name:name>/members/", teams.Members.as_view()),
    path("teams/<name:name>/members/<username:username>/", teams.OneMember.as_view()),
    path("quotas/", teams.Quotas.as_view()),
    path("budgets/", teams.Budgets.as_view()),
    path("budgets/<number:pk>/", teams.OneBudget.as_view()),
    path("requests/", teams.Requests.as_view()),
    path("requests/<number:pk>/", teams.OneRequest.as_view()),
    path("tokens/", teams.Tokens.as_view()),
    path("tokens/<number:pk>/", teams.OneToken.as_view()),
    path("audit/", teams.Audit.as_view()),
    path("reports/", reports.Reports.as_view()),
    path("reports/<slug:slug>/", reports.OneReport.as_view()),
    path("what-if/", reports.WhatIf.as_view()),
]
for _name, (_many, _one) in hardware.KINDS.items():
    urlpatterns += [path(f"{_name}/", _many.as_view()), path(f"{_name}/<number:pk>/", _one.as_view())]
