"""Secrets of clusters and webhooks: encrypted at rest, never shown again."""

from __future__ import annotations

import json
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings

from scheduling.models import Cluster


class SecretUnreadable(Exception):
    """The encryption key is not the one that the secret was saved with."""


def seal(secret: dict[str, Any]) -> bytes | None:
    """``None`` for nothing to hide."""
    if not secret:
        return None
    return Fernet(settings.FIELD_ENCRYPTION_KEY).encrypt(json.dumps(secret).encode())


def unseal(cluster: Cluster) -> dict[str, Any]:
    if not cluster.secret:
        return {}
    return opened(cluster.secret, f"cluster {cluster.name}", "connect the cluster again")


def opened(sealed: bytes | memoryview[int], what: str, remedy: str) -> dict[str, Any]:
    """What was sealed. Raises ``SecretUnreadable``, naming what it belongs to and what to do."""
    try:
        return dict(json.loads(Fernet(settings.FIELD_ENCRYPTION_KEY).decrypt(bytes(sealed))))
    except InvalidToken:
        raise SecretUnreadable(
            f"The secret of {what} was encrypted with another FIELD_ENCRYPTION_KEY; {remedy}."
        ) from None
