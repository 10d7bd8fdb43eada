"""What if: a scenario in, a result out, by the live engine, bounded in size, time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from django.conf import settings

from scheduling.services.errors import InvalidRequest

LARGEST = 256 << 10
SECONDS = 20
MEMORY = 2 << 30


def run_scenario(text: str) -> dict[str, Any]:
    """The result of scenario-format.md. Raises ``InvalidRequest`` naming the line, or the bound that was met."""
    size = len(text.encode())
    if size > LARGEST:
        raise InvalidRequest({"scenario": [f"{size:,} bytes are too many; at most {LARGEST:,} are allowed."]})
    environment = {"PATH": os.environ.get("PATH", ""), "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scheduling.services.whatif_child", str(SECONDS), str(MEMORY)],
            input=text, capture_output=True, text=True, timeout=2 * SECONDS, cwd=settings.BASE_DIR, env=environment,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode < 0:
        raise InvalidRequest({"scenario": [f"It takes more than {SECONDS} s; give fewer jobs, or use `simulate`."]})
    if done.returncode != 0:
        raise RuntimeError(f"The simulation failed: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise InvalidRequest({"scenario": [answer["error"]]})
    found: dict[str, Any] = answer["result"]
    return found
