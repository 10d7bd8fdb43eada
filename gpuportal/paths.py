"""Where embedded services have their sockets: in the data folder, unless its path is too long for a socket."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

#: A Unix socket's path may have 107 bytes; the longest name in the folder is ".s.PGSQL.5432.lock".
MOST = 107 - 20


def socket_folder(data: Path) -> Path:
    folder = data / "run"
    if len(os.fsencode(folder)) <= MOST:
        return folder
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"gpuportal-{os.getuid()}-{digest}"
