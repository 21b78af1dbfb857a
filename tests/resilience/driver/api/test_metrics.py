"""/metrics and /health of a driver, the rules that are shipped, and a real Prometheus that scrapes and alerts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest

pytest.importorskip("fastapi")

from megascale.observe.prometheus import Family, format_families, packaged_file
from megascale.resilience.driver.api.metrics import Scrapes
from megascale.resilience.driver.start_driver import _await_last_scrape
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.protocol.agent_messages import StepFigures, Steps
from megascale.resilience.protocol.heartbeat import GpuReport, Heartbeat, NetworkTraffic
from tests.resilience.driver.api.test_http_api import Served, served  # noqa: F401 - a fixture

_SAMPLE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (\S+)$')


def scrape(result: Served, token: str | None = None) -> dict[str, float]:
    """Samples by name and labels."""
    headers = {"Authorization": f"Bearer {token or result.read_token}"}
    with urllib.request.urlopen(urllib.request.Request(result.url + "/metrics", headers=headers), timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = _SAMPLE.match(line)
            assert match, line
            samples[match[1] + (match[2] or "")] = float(match[3])
    return samples


def beat(result: Served, seconds: dict[int, float]) -> None:
    """Node n0 says how long its ranks computed."""
    node = result.driver.nodes["n0"]
    node.add_heartbeat(
        Heartbeat(
            job="job", attempt=result.driver.job.state.attempt, node="n0", sequence=1, sent_ns=1, step_seconds=seconds,
            gpus=(GpuReport(0, "H", temperature=71.0, power_watts=500.0, throttled=True, xid=79),),
            traffic=(NetworkTraffic("eth0", 10.0, 20.0, errors=3),),
        ),
        time.monotonic(),
    )  # fmt: skip
    node.channel = object()  # type: ignore[assignment]


def test_the_job_in_few_series(served):  # noqa: F811
    driver = served.driver
    before = scrape(served)
    assert before['megascale_job_phase{phase="paused"}'] == 1
    assert before['megascale_job_phase{phase="running"}'] == 0
    assert before['megascale_nodes{state="up"}'] == 2
    assert "megascale_loss" not in before  # no step yet: nothing is claimed
    driver.observations.record_steps(
        Steps(replaces_earlier=False, steps=(StepFigures(7, 2.5, 1.0, 0.5), StepFigures(8, float("nan"), 1.0, 0.7)))
    )
    beat(served, {rank: 1.0 + rank / 100 for rank in range(100)})
    after = scrape(served)
    assert after["megascale_loss"] != after["megascale_loss"]
    assert after["megascale_step_seconds"] == pytest.approx(0.6)
    assert after['megascale_compute_seconds{over="slowest"}'] == pytest.approx(1.99)
    assert after['megascale_compute_seconds{over="median"}'] == pytest.approx(1.495)
    assert after["megascale_slowest_rank"] == 99
    assert after["megascale_gpus_throttled"] == after["megascale_gpus_with_errors"] == 1
    assert after['megascale_network_bytes_per_second{direction="send"}'] == 20
    assert len(after) < 60  # for any number of ranks
    driver.nodes["n0"].channel = None


def test_ranks_are_compared_with_those_of_their_stage(served):  # noqa: F811
    driver = served.driver
    settings = driver.observations.settings
    settings.config = settings.config.model_copy(
        update={"parallel": settings.config.parallel.model_copy(update={"pipeline": 2})}
    )
    driver.job.state = replace(driver.job.state, data=2)
    # Ranks 0 and 1 are the first stage, which computes twice as long as the last.
    beat(served, {0: 2.0, 1: 2.1, 2: 1.0, 3: 1.4})
    samples = scrape(served)
    driver.nodes["n0"].channel = None
    assert samples['megascale_compute_seconds{stage="0",over="median"}'] == pytest.approx(2.05)
    assert samples['megascale_compute_seconds{stage="1",over="slowest"}'] == pytest.approx(1.4)
    assert samples["megascale_slowest_rank"] == 3


def test_a_driver_waits_for_a_prometheus_that_reads_it_to_see_the_end():
    scrapes = Scrapes()
    assert scrapes.missing(ended=0.0, current_time=100.0) == 0
    scrapes.note(10.0)  # once, by a person
    assert scrapes.missing(ended=20.0, current_time=20.0) == 0
    scrapes.note(25.0)
    assert scrapes.missing(ended=30.0, current_time=31.0) == 24
    assert scrapes.missing(ended=24.0, current_time=31.0) == 0  # the end was read
    assert scrapes.missing(ended=30.0, current_time=60.0) == 0  # it reads no more
    scrapes.note(1025.0)
    assert scrapes.missing(ended=1030.0, current_time=1031.0) == 60


@pytest.mark.parametrize("end", ["scrape", "signal", "nothing"])
def test_its_end_is_read_or_waited_for_in_vain_or_a_person_goes_on(end):
    scrapes, current = Scrapes(), time.monotonic()
    interval = 0.5 if end == "nothing" else 60.0
    scrapes.note(current - interval)
    scrapes.note(current)
    lines: list[str] = []
    job = SimpleNamespace(entered=current + 0.001, phase=Phase.DONE)
    driver = SimpleNamespace(job=job, log_line=lambda who, text: lines.append(text))

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        if end == "scrape":
            loop.call_later(0.01, scrapes.note, current + 1)
        elif end == "signal":
            loop.call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
        async with asyncio.timeout(20):
            await _await_last_scrape(driver, scrapes)

    asyncio.run(wait())
    assert "until Prometheus has read the job's end" in lines[0]


def test_health_is_told_by_the_code_too(served, tmp_path):  # noqa: F811
    assert served.ask("/health") == (200, {"healthy": True, "state": "paused"})
    assert served.ask("/health", token=served.read_token)[0] == 200
    for path in ("/health", "/metrics"):
        assert served.ask(path, token="wrong")[0] == 401
    failed = Served(tmp_path / "failed", Phase.FAILED)
    try:
        assert failed.ask("/health") == (503, {"healthy": False, "state": "failed"})
        assert scrape(failed)['megascale_job_phase{phase="failed"}'] == 1
    finally:
        failed.over.set()
        failed.thread.join(20)


def test_labels_of_strangers_stay_labels():
    text = format_families([Family("a_total", "counter", "two\nlines").add(2, name='"} evil 1\nb 2\\ \ud800')])
    lines = text.splitlines()
    assert lines[0] == r"# HELP a_total two\nlines"
    assert len(lines) == 3
    assert _SAMPLE.match(lines[2])
    assert format_families([Family("b", "gauge", "none").add(None)]).strip() == ""
    assert "+Inf" in format_families([Family("b", "gauge", "x").add(float("inf"))])


def test_rules_ask_for_what_is_exposed(served):  # noqa: F811
    driver = served.driver
    driver.observations.record_steps(Steps(replaces_earlier=False, steps=(StepFigures(7, 2.5, 1.0, 0.5),)))
    beat(served, {0: 1.0})
    present = {name.partition("{")[0] for name in scrape(served)}
    driver.nodes["n0"].channel = None
    text = packaged_file("rules.yml").read_text()
    requested = set(re.findall(r"\bmegascale_[a-z_]+", "\n".join(re.findall(r"expr: (.*)", text))))
    assert requested
    assert requested <= present
    recorded = set(re.findall(r"record: (\S+)", text))
    assert set(re.findall(r"\bmegascale:[a-z0-9_:]+", text)) == recorded
    # And so does the dashboard, which nothing here can draw. An incident is told of once there was one.
    panels = json.loads(packaged_file("dashboard.json").read_text())["panels"]
    drawn = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    assert set(re.findall(r"\bmegascale_[a-z_]+", drawn)) - {"megascale_incidents_total"} <= present
    assert set(re.findall(r"\bmegascale:[a-z0-9_:]+", drawn)) <= recorded


SLOWEST = 'megascale_compute_seconds{over="slowest"}'


# a real one -------------------------------------------------------------------------------------------------------

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are not installed (Debian: prometheus)",
)


def alerts(at: str, name: str, *expected: dict[str, object]) -> dict[str, object]:
    return {"eval_time": at, "alertname": name, "exp_alerts": list(expected)}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


DRIVER = {"job": "megascale", "instance": "head:1"}
DOWN = {
    "exp_labels": DRIVER | {"severity": "critical"},
    "exp_annotations": {"summary": "The driver at head:1 does not answer; start it again with `megascale launch`."},
}
STILL = {
    "exp_labels": DRIVER | {"severity": "critical", "phase": "running"},
    "exp_annotations": {"summary": "The job at head:1 runs and does no step; see `megascale hang`."},
}
FAILED = {
    "exp_labels": DRIVER | {"severity": "critical", "phase": "failed"},
    "exp_annotations": {"summary": "The job at head:1 has failed; `megascale events` says why."},
}
SLOW = {
    "exp_labels": {"severity": "warning"},
    "exp_annotations": {"summary": "A rank computes 1.2 times as long as the median; see `megascale spans`."},
}
SLOW_IN_STAGE = {
    "exp_labels": {"severity": "warning", "stage": "1"},
    "exp_annotations": {
        "summary": "A rank of pipeline stage 1 computes 1.2 times as long as the median; see `megascale spans`."
    },
}


def compute(slowest: str, median: str, **stage: str) -> list[dict[str, str]]:
    return [
        series("megascale_compute_seconds", slowest, **stage, over="slowest"),
        series("megascale_compute_seconds", median, **stage, over="median"),
    ]


def last_phase(phase: str, up: str = "1x10 0x30") -> list[dict[str, str]]:
    """A driver that is read for 10 minutes, in the last of them in `phase`, and then is gone."""
    return [
        series("up", up, **DRIVER),
        series("megascale_job_phase", "1x8 0 0 stale", **DRIVER, phase="running"),
        series("megascale_job_phase", "0x8 1 1 stale", **DRIVER, phase=phase),
    ]


ALERTS = {
    "slow for 19 minutes": (compute("1.04x5 1.2x25", "1x30"), alerts("25m", "MegascaleSlowRank", SLOW)),
    "slow for 4 minutes": (compute("1.04x20 1.2x10", "1x30"), alerts("25m", "MegascaleSlowRank")),
    "stages differ and their ranks do not": (
        compute("2x30", "2x30", stage="0") + compute("1x30", "1x30", stage="1"),
        alerts("25m", "MegascaleSlowRank"),
    ),
    "slow in the fast stage": (
        compute("2x30", "2x30", stage="0") + compute("1.2x30", "1x30", stage="1"),
        alerts("25m", "MegascaleSlowRank", SLOW_IN_STAGE),
    ),
    "the job is done": (last_phase("done"), alerts("30m", "MegascaleDriverDown")),
    "the job was interrupted": (last_phase("interrupted"), alerts("30m", "MegascaleDriverDown")),
    "the job has failed": (last_phase("failed"), alerts("30m", "MegascaleDriverDown")),
    "the failure is told though the driver is gone": (
        last_phase("failed"), alerts("30m", "MegascaleFailed", FAILED),
    ),
    "the driver was killed": (last_phase("running"), alerts("30m", "MegascaleDriverDown", DOWN)),
    "the driver was never read": (last_phase("done")[:1], alerts("30m", "MegascaleDriverDown", DOWN)),
    "the next job at its address loses its driver": (
        [
            series("up", "1x10 0x10 1x10 0x10", **DRIVER),
            series("megascale_job_phase", "0x8 1 1 stale _x9 0x9 stale", **DRIVER, phase="done"),
            series("megascale_job_phase", "1x8 0 0 stale _x9 1x9 stale", **DRIVER, phase="running"),
        ],
        alerts("35m", "MegascaleDriverDown", DOWN),
    ),
    "no step for a while": (
        [series("megascale_job_phase", "1x40", **DRIVER, phase="running"), series("megascale_step", "7x40", **DRIVER)],
        alerts("30m", "MegascaleStandsStill", STILL),
    ),
    "steps": (
        [
            series("megascale_job_phase", "1x40", **DRIVER, phase="running"),
            series("megascale_step", "7+1x40", **DRIVER),
        ],
        alerts("30m", "MegascaleStandsStill"),
    ),
}  # fmt: skip


@needs_prometheus
def test_promtool_accepts_the_rules_and_they_alert_when_they_should(tmp_path):
    rules = str(packaged_file("rules.yml"))
    result = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    tests = [
        {"name": name, "interval": "1m", "input_series": inputs, "alert_rule_test": [alert]}
        for name, (inputs, alert) in ALERTS.items()
    ]
    case = {"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "case.yml").write_text(json.dumps(case))
    result = subprocess.run(["promtool", "test", "rules", tmp_path / "case.yml"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


class Webhook(BaseHTTPRequestHandler):
    """Keeps what an Alertmanager posts."""

    told: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        self.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def daemon(tmp_path):
    """Starts daemons that log to tmp_path/log and end with the test."""
    started = []

    def start(*arguments: object) -> subprocess.Popen:
        with open(tmp_path / "log", "ab") as log:
            started.append(subprocess.Popen(list(map(str, arguments)), stdout=log, stderr=log, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(20)


@needs_prometheus
@pytest.mark.skipif(not shutil.which("prometheus-alertmanager"), reason="prometheus-alertmanager is not installed")
def test_prometheus_scrapes_it_and_alertmanager_calls(served, tmp_path, daemon):  # noqa: F811
    """The test uses the driver's token and the shipped rules with short times. The loss is NaN."""
    Webhook.told.clear()
    hook = HTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    served.driver.observations.record_steps(
        Steps(replaces_earlier=False, steps=(StepFigures(8, float("nan"), 1.0, 0.7),))
    )
    (tmp_path / "rules.yml").write_text(packaged_file("rules.yml").read_text().replace("interval: 15s", "interval: 1s"))
    (tmp_path / "alerts.yml").write_text(
        "route: {receiver: hook, group_wait: 0s}\nreceivers:\n- name: hook\n"
        f"  webhook_configs: [{{url: 'http://127.0.0.1:{hook.server_port}/'}}]\n"
    )
    alerts, port = free_port(), free_port()
    target, token = served.url.removeprefix("http://"), served.run / "driver" / "token.read"
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nrule_files: [rules.yml]\n"
        f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{alerts}']}}]}}]}}\n"
        f"scrape_configs:\n- job_name: megascale\n  authorization: {{credentials_file: {json.dumps(str(token))}}}\n"
        f"  static_configs: [{{targets: [{json.dumps(target)}]}}]\n"
    )
    daemon(
        "prometheus-alertmanager", f"--config.file={tmp_path / 'alerts.yml'}", f"--storage.path={tmp_path / 'am'}",
        f"--web.listen-address=127.0.0.1:{alerts}", "--cluster.listen-address=",
    )  # fmt: skip
    server = daemon(
        "prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not Webhook.told:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            assert server.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.1)
    finally:
        hook.shutdown()
    alert = Webhook.told[0]["alerts"][0]
    assert (alert["status"], alert["labels"]["alertname"]) == ("firing", "MegascaleLossIsNoNumber")
    assert alert["labels"]["instance"] == target
