"""Whether a cluster answers: marked here, shown on every page, and no new jobs for one that does not."""

from __future__ import annotations

from datetime import datetime

from scheduling.models import Cluster
from scheduling.services.wakeup import wake_cycle


def cluster_seen(cluster: Cluster, at: datetime) -> None:
    """It answered. Back after a while away, it takes new jobs again."""
    came_back = Cluster.objects.filter(pk=cluster.pk, reachable=False).update(
        reachable=True, unreachable_since=None, last_error=""
    )
    Cluster.objects.filter(pk=cluster.pk).update(last_seen_at=at)
    if came_back:
        wake_cycle()


def cluster_failed(cluster: Cluster, error: str, at: datetime) -> None:
    """It did not answer: jobs keep their state, nothing new is sent there."""
    went_away = Cluster.objects.filter(pk=cluster.pk, reachable=True).update(reachable=False, unreachable_since=at)
    Cluster.objects.filter(pk=cluster.pk).update(last_error=error[:500])
    if went_away:
        wake_cycle()
