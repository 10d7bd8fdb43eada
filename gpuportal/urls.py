"""All addresses of the portal."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView, SpectacularRedocView, SpectacularSwaggerSplitView

from gpuportal import health

urlpatterns = [
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
    path("accounts/", include("allauth.urls")),
    path("admin/", admin.site.urls),
    path("api/v1/", include("scheduling.api.urls")),
    path("api/schema/", SpectacularAPIView.as_view(), name="schema"),
    path("api/docs/", SpectacularSwaggerSplitView.as_view(url_name="schema"), name="api-docs"),
    path("api/redoc/", SpectacularRedocView.as_view(url_name="schema"), name="api-redoc"),
    path("", include("django_prometheus.urls")),
    path("", include("teams.urls")),
    path("", include("scheduling.urls")),
]

handler400 = "scheduling.views.errors.bad_request"
handler403 = "scheduling.views.errors.forbidden"
handler404 = "scheduling.views.errors.not_found"
handler500 = "scheduling.views.errors.server_error"

assert __name__ == settings.ROOT_URLCONF
