"""Kubernetes as a back end, through the official client."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.backends.kubernetes.api import Api
from scheduling.backends.kubernetes.backend import KubernetesBackend
from scheduling.backends.kubernetes.config import FIELDS, parse

__all__ = ["FIELDS", "KubernetesBackend", "from_config"]


def from_config(config: Mapping[str, object], secret: Mapping[str, object] | None = None) -> KubernetesBackend:
    """The back end for a cluster's settings (``FIELDS`` describes them). Contacts nothing yet.

    Raises ``ConfigError`` naming every wrong field.
    """
    settings = parse(config, secret)
    return KubernetesBackend(settings, Api(settings))
