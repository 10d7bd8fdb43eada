"""Addresses of the scheduling app."""

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
