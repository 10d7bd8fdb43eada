"""The collector against a real Prometheus that scrapes an exporter in DCGM's style."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from scheduling.models import GPUEvent, GPUSample
from scheduling.services import prometheus
from scheduling.services.prometheus import PrometheusError, energy
from tests.reports.ledger import Ledger

pytestmark = pytest.mark.prometheus

SENTINEL = "9223372036854775794"


def metrics(counter: int) -> str:
    """gpu 0 has everything, gpu 1 only the old counter, gpu 2 only sentinels, gpu 3 tells an XID."""
    rows = [
        ("DCGM_FI_PROF_SM_ACTIVE", 0, "0.8"), ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0, "0.9"), ("DCGM_FI_DEV_GPU_UTIL", 0, "100"),
        ("DCGM_FI_DEV_POWER_USAGE", 0, "350"), ("DCGM_FI_DEV_FB_USED", 0, "1024"),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 0, str(counter * 350_000)),
        ("DCGM_FI_DEV_GPU_UTIL", 1, "40"),
        ("DCGM_FI_PROF_SM_ACTIVE", 2, SENTINEL), ("DCGM_FI_DEV_GPU_UTIL", 2, SENTINEL), ("DCGM_FI_DEV_POWER_USAGE", 2, "60"),
        ("DCGM_FI_PROF_SM_ACTIVE", 3, "0.1"), ("DCGM_FI_DEV_XID_ERRORS", 3, "79"),
    ]  # fmt: skip
    return "".join(f'{name}{{gpu="{gpu}",Hostname="a100-0"}} {value}\n' for name, gpu, value in rows)


class Exporter(BaseHTTPRequestHandler):
    begun = time.time()

    def do_GET(self) -> None:
        body = metrics(int(time.time() - self.begun)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = shutil.which("prometheus")
    assert binary, "Prometheus is not installed: tools/install-test-packages.sh installs it"
    folder: Path = tmp_path_factory.mktemp("prometheus")
    exporter = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: dcgm\n  honor_labels: true\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{exporter.server_port}']}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for_samples(url)
        yield url
    finally:
        process.terminate()
        process.wait(20)
        exporter.shutdown()


def _wait_for_samples(url: str) -> None:
    until = time.time() + 60
    while time.time() < until:
        try:
            found = httpx.get(f"{url}/api/v1/query", params={"query": "DCGM_FI_DEV_GPU_UTIL[60s]"}).json()["data"][
                "result"
            ]
            if found and len(found[0]["values"]) >= 5:
                return
        except (httpx.HTTPError, KeyError):
            pass
        time.sleep(0.5)
    raise AssertionError("Prometheus has no samples after a minute")


def test_each_device_is_read_by_its_best_counter_and_what_is_missing_stays_unknown(server: str) -> None:
    rows = {row.device: row for row in prometheus.read(server, datetime.now(UTC))}
    assert (rows["0"].metric, rows["0"].activity) == ("sm_active", pytest.approx(0.8))
    assert (rows["1"].metric, rows["1"].activity) == ("gpu_util", pytest.approx(0.4))
    assert (rows["2"].metric, rows["2"].activity, rows["2"].power_watts) == ("", None, 60)
    assert rows["3"].xid == 79 and rows["0"].memory_used_bytes == 1024 << 20


def test_samples_are_stored_once_with_the_attempt_that_held_the_device(server: str, ledger: Ledger) -> None:
    pool, team = ledger.pool(gpus=4), ledger.team("vision")
    attempt = ledger.run(team, pool, "03-03 00:00", None, gpus=1)
    readings = prometheus.read(server, datetime.now(UTC).replace(microsecond=0))
    assert prometheus.store(readings) == 4
    prometheus.store(readings)
    assert GPUSample.objects.count() == 4 and GPUEvent.objects.count() == 1
    sample = GPUSample.objects.get(gpu__index=0)
    assert (sample.attempt_id, sample.metric) == (attempt.pk, "sm_active")
    assert GPUSample.objects.get(gpu__index=2).activity is None


def test_other_labels_can_be_chosen(server: str) -> None:
    assert prometheus.read(server, datetime.now(UTC), node_label="nothing_of_the_kind") == []


def test_a_server_that_is_away_leaves_the_minute_unknown(settings, db: None) -> None:
    settings.GPUPORTAL_PROMETHEUS_URL = "http://127.0.0.1:9"
    assert prometheus.collect() == 0
    with pytest.raises(PrometheusError):
        prometheus.read("http://127.0.0.1:9", datetime.now(UTC))


def test_an_energy_counter_that_begins_anew_is_not_negative() -> None:
    assert energy([(0, 5_000_000), (30, 5_600_000), (60, 100_000)], since=0) == 700
    assert energy([(30, 5_600_000), (60, 5_700_000)], since=0) is None
