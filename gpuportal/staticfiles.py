"""The pages' files: hashed names, compressed with gzip, collected again only when one of them has changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command
from whitenoise.compress import Compressor
from whitenoise.storage import CompressedManifestStaticFilesStorage


class Storage(CompressedManifestStaticFilesStorage):
    """Without Brotli, whose strongest level took half a minute of a first start for a few per cent of size."""

    def create_compressor(self, **kwargs: Any) -> Compressor:
        return Compressor(**{**kwargs, "use_brotli": False})


def fingerprint() -> str:
    """Of the names, sizes and times of all files that would be collected, and of where they go."""
    digest = hashlib.sha256(str(settings.STATIC_ROOT).encode())
    for finder in get_finders():
        for name, storage in finder.list([]):
            stat = Path(storage.path(name)).stat()
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def collect() -> bool:
    """``collectstatic`` if something changed since the last time; says whether it did."""
    stamp = Path(settings.STATIC_ROOT) / "collected.stamp"
    now = fingerprint()
    if stamp.exists() and stamp.read_text() == now:
        return False
    call_command("collectstatic", verbosity=0, interactive=False)
    stamp.write_text(now)
    return True
