"""Every page with 100,000 waiting and 1,000,000 finished jobs and 10,000 GPUs: queries, and milliseconds on the server.

    python -m benchmarks.pages [--waiting 100000] [--finished 1000000] [--folder DIR] [--no-viewers]

Starts a PostgreSQL of its own, in DIR if given; a DIR that was filled before is used again. Then 200 viewers look at
the queue of a real web server (two worker processes) for half a minute, each asking every ten seconds as a browser
does, while a cycle's writes go on beside them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.large import fill, serve

Row = tuple[str, str, str]
MOST_QUERIES, MOST_MS = 12, 200
ROUNDS = 7


def results(*, waiting: int = 100_000, finished: int = 1_000_000, folder: Path | None = None) -> list[Row]:
    """(name, value, target) of each page (median of its rounds), and of the crowd."""
    data = serve(folder)
    try:
        import django

        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        call_command("collectstatic", verbosity=0, interactive=False)
        fill(waiting=waiting, finished=finished)
        return [*pages(), *viewers()]
    finally:
        if folder is None:
            shutil.rmtree(data, ignore_errors=True)


def addresses() -> dict[str, str]:
    from scheduling.models import Attempt, Job, Node

    attempt = Attempt.objects.order_by("-number", "-id").first()
    waiting = Job.objects.filter(state="waiting").order_by("id").first()
    finished = Job.objects.filter(state="succeeded").order_by("id").first()
    node = Node.objects.filter(state="up").order_by("id").first()
    assert attempt is not None and waiting is not None and finished is not None and node is not None
    team = waiting.team.name
    return {
        "overview": "/",
        "queue": "/queue/",
        "queue, a late page": "/queue/?page=1900",
        "queue of a team": f"/queue/?team={team}",
        "queue by reason": "/queue/?reason=limit",
        "queue by name": "/queue/?name=waiting+9",
        "queue of a pool": "/queue/?pool=a100",
        "running jobs": "/queue/?state=running",
        "a waiting job": f"/jobs/{waiting.pk}/",
        "a running job with 60 attempts": f"/jobs/{attempt.job_id}/",
        "a finished job": f"/jobs/{finished.pk}/",
        "request a job": "/jobs/new/",
        "cluster": "/clusters/",
        "map of 10,000 GPUs": "/clusters/map.json",
        "a node": f"/nodes/{node.pk}/",
        "my page": "/me/",
        "glossary": "/glossary/",
    }


def pages() -> list[Row]:
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    from teams.models import User

    rows = []
    for username in ("user-1", "user-9"):
        client = Client(SERVER_NAME="localhost")
        client.force_login(User.objects.get(username=username))
        client.get("/me/")
        for name, address in addresses().items():
            with CaptureQueriesContext(connection) as queries:
                answer = client.get(address)
            asked = len(queries)
            if answer.status_code == 404 and username != "user-1":
                continue  # a job of another team
            assert answer.status_code == 200, (address, answer.status_code)
            times = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                client.get(address)
                times.append((time.perf_counter() - began) * 1000)
            who = "administrator" if username == "user-1" else "member"
            value = f"{asked} queries, {statistics.median(times):.0f} ms (best {min(times):.0f})"
            rows.append((f"{name} ({who})", value, f"at most {MOST_QUERIES} queries, {MOST_MS} ms"))
    return rows


def viewers(count: int = 200, seconds: float = 30, every: float = 10) -> list[Row]:
    """A crowd on a real web server; the loop's own work is timed alone and beside it."""
    import asyncio
    import socket

    from django.conf import settings
    from django.test import Client

    from teams.models import User

    cookies = []
    for user in User.objects.order_by("id")[:count]:
        client = Client()
        client.force_login(user)
        cookies.append(client.cookies[settings.SESSION_COOKIE_NAME].value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "granian", "--interface", "wsgi", "--host", "127.0.0.1", "--port", str(port),
         "--workers", "2", "--blocking-threads", "8", "--no-ws", "--log-level", "error", "gpuportal.wsgi:application"],
        env={**os.environ, "ALLOWED_HOSTS": "127.0.0.1"},
    )  # fmt: skip
    try:
        alone = _cycle_ms(8)
        waits, beside = asyncio.run(_crowd(port, cookies, seconds, every))
    finally:
        server.terminate()
        server.wait(20)
    waits.sort()
    return [
        (f"queue, {count} viewers, p50 of {len(waits)} polls", f"{1000 * waits[len(waits) // 2]:.0f} ms", ""),
        (f"queue, {count} viewers, p95", f"{1000 * waits[int(len(waits) * 0.95)]:.0f} ms", "at most 200 ms"),
        ("writing a cycle's reasons and order, alone", f"{alone:.0f} ms", ""),
        (f"the same beside {count} viewers", f"{beside:.0f} ms", f"at most {1.5 * alone:.0f} ms"),
    ]


def _cycle_ms(rounds: int) -> float:
    """Median time of what the loop writes for the pages: the order anew, the numbers of all reasons."""
    from django.db import connection, transaction
    from django.utils import timezone

    from scheduling.models import Cycle, QueueOrder, ReasonGroup

    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        with transaction.atomic():
            now = timezone.now()
            row = QueueOrder.objects.get()
            QueueOrder.objects.all().delete()
            row.pk, row.cycle, row.worked_out_at = None, Cycle.objects.create(started_at=now), now
            row.save(force_insert=True)
            ReasonGroup.objects.update(worked_out_at=now)
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.3)
    connection.close()
    return statistics.median(times)


async def _crowd(port: int, cookies: list[str], seconds: float, every: float) -> tuple[list[float], float]:
    import asyncio

    import httpx

    waits: list[float] = []
    until = time.monotonic() + seconds
    paths = ("/queue/", "/queue/?team=team-{:02d}")

    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=httpx.Limits(max_connections=200), timeout=30
    ) as client:
        for _ in range(100):
            try:
                await client.get("/healthz")
                break
            except httpx.HTTPError:
                await asyncio.sleep(0.2)

        async def look(number: int) -> None:
            await asyncio.sleep(every * number / len(cookies))
            tag = ""
            path = paths[number % 2].format(1 + number % 48)
            while time.monotonic() < until:
                headers = {"HX-Request": "true", "Cookie": f"sessionid={cookies[number]}", "If-None-Match": tag}
                began = time.perf_counter()
                answer = await client.get(path, headers=headers)
                waits.append(time.perf_counter() - began)
                assert answer.status_code in (200, 304), answer.status_code
                tag = answer.headers["ETag"]
                await asyncio.sleep(max(0.0, every - waits[-1]))

        beside: Any = asyncio.get_running_loop().run_in_executor(None, _cycle_ms, int(seconds / 4))
        await asyncio.gather(*(look(number) for number in range(len(cookies))))
        return waits, await beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--finished", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="keep the database here, or use the one that is here")
    options = parser.parse_args()
    print("| page | figures | target |\n| --- | --- | --- |")
    for row in results(waiting=options.waiting, finished=options.finished, folder=options.folder):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
