"""Addresses of the scheduling pages."""

from importlib.util import find_spec

from django.urls import include, path

from scheduling.views import clusters, jobs, overview, queue

urlpatterns = [
    path("", overview.overview, name="overview"),
    path("queue/", queue.queue, name="queue"),
    path("queue/views/", queue.save_view, name="queue-view-save"),
    path("queue/views/<int:number>/delete/", queue.delete_view, name="queue-view-delete"),
    path("clusters/", clusters.clusters, name="cluster-map"),
    path("clusters/map.json", clusters.map_data, name="map-data"),
    path("nodes/<int:number>/", clusters.node, name="node"),
    path("nodes/<int:number>/drain/", clusters.node_drain, name="node-drain"),
    path("nodes/<int:number>/resume/", clusters.node_resume, name="node-resume"),
    path("nodes/<int:number>/windows/<int:window>/cancel/", clusters.window_cancel, name="window-cancel"),
    path("glossary/", overview.glossary, name="glossary"),
    path("me/", overview.me, name="me"),
    path("jobs/new/", jobs.submit, name="submit"),
    path("jobs/<int:number>/", jobs.job, name="job"),
    path("jobs/<int:number>/cancel/", jobs.cancel, name="job-cancel"),
    path("jobs/<int:number>/<slug:action>/", jobs.act, name="job-act"),
    path("jobs/<int:number>/log/<int:attempt_number>", jobs.log, name="job-log"),
]

if find_spec("scheduling.urls_reports"):
    urlpatterns.append(path("reports/", include("scheduling.urls_reports")))
