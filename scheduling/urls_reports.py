"""Addresses of the reports, included at /reports/."""

from django.urls import path

from scheduling.views import lab, reports

app_name = "reports"
urlpatterns = [
    path("", reports.index, name="index"),
    path("invoice.csv", reports.invoice, name="invoice"),
    path("frozen/", reports.frozen_list, name="frozen-list"),
    path("frozen/<int:pk>/", reports.show_frozen, name="frozen"),
    path("lab/", lab.index, name="lab"),
    path("lab/<int:pk>/", lab.show, name="lab-run"),
    path("lab/<int:pk>/adopt/", lab.adopt, name="lab-adopt"),
    path("<slug:slug>/", reports.show, name="show"),
    path("<slug:slug>/mail/", reports.mail, name="mail"),
    path("<slug:slug>/freeze/", reports.freeze, name="freeze"),
]
