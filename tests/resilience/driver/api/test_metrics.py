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
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from urllib.parse import urlencode

import pytest
import yaml

pytest.importorskip("fastapi")

from megascale.config import ResilienceConfig, load
from megascale.errors import ConfigError
from megascale.observe.prometheus import Family, format_families, get_rules_file
from megascale.observe.prometheus.dashboards import make_fleet_dashboard, make_run_dashboard
from megascale.resilience.driver.api.metrics import JobMetrics, Scrapes, ScrapeTargets
from megascale.resilience.driver.serve_driver import await_last_scrape
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.protocol.agent_messages import StepFigures, Steps
from megascale.resilience.protocol.heartbeat import GpuReport, Heartbeat, NetworkTraffic
from tests.resilience.driver.api.test_http_api import Served, served  # noqa: F401 - a fixture

_SAMPLE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (\S+)$')


LABELS = '{run="job",job_name="job"'  # of every series


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
            assert match[2].startswith(LABELS), line
            label_text = match[2].removeprefix(LABELS).removeprefix(",").removesuffix("}")
            samples[match[1] + (f"{{{label_text}}}" if label_text else "")] = float(match[3])
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


def test_age_of_the_last_step_starts_again_with_each_step_also_of_a_replay(served):  # noqa: F811
    metrics = JobMetrics(served.driver)
    observations = served.driver.observations
    begin = time.monotonic()
    assert metrics._measure_step_age(begin) == 0
    assert metrics._measure_step_age(begin + 50) == 50
    for step in (8, 7):  # the job's furthest step stays
        observations.record_steps(Steps(replaces_earlier=False, steps=(StepFigures(step, 2.0, 1.0, 0.7),)))
        assert metrics._measure_step_age(begin + 60) == 0
        assert metrics._measure_step_age(begin + 61) == 1


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
    assert scrapes.compute_wait(ended=0.0, current_time=100.0) == 0
    scrapes.record(10.0)  # once, by a person
    assert scrapes.compute_wait(ended=20.0, current_time=20.0) == 0
    scrapes.record(25.0)
    assert scrapes.compute_wait(ended=30.0, current_time=31.0) == 24
    assert scrapes.compute_wait(ended=24.0, current_time=31.0) == 0  # the end was read
    assert scrapes.compute_wait(ended=30.0, current_time=60.0) == 0  # it reads no more
    scrapes.record(1025.0)
    assert scrapes.compute_wait(ended=1030.0, current_time=1031.0) == 60


@pytest.mark.parametrize("end", ["scrape", "signal", "nothing"])
def test_its_end_is_read_or_waited_for_in_vain_or_a_person_goes_on(end):
    scrapes, current = Scrapes(), time.monotonic()
    interval = 0.5 if end == "nothing" else 60.0
    scrapes.record(current - interval)
    scrapes.record(current)
    lines: list[str] = []
    job = SimpleNamespace(phase_entered=current + 0.001, phase=Phase.DONE)
    driver = SimpleNamespace(job=job, log_line=lambda source, text: lines.append(text))

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        if end == "scrape":
            loop.call_later(0.01, scrapes.record, current + 1)
        elif end == "signal":
            loop.call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
        async with asyncio.timeout(20):
            await await_last_scrape(driver, scrapes)

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


def test_rules_and_dashboards_query_exposed_series(served):  # noqa: F811
    driver = served.driver
    driver.observations.record_steps(Steps(replaces_earlier=False, steps=(StepFigures(7, 2.5, 1.0, 0.5),)))
    beat(served, {0: 1.0})
    write_records(served.run)
    present = {name.partition("{")[0] for name in scrape(served)}
    driver.nodes["n0"].channel = None
    rules = [rule for group in yaml.safe_load(get_rules_file().read_text())["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    expressions = [rule["expr"] for rule in rules]
    for dashboard in (make_run_dashboard(), make_fleet_dashboard()):
        expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    requested = set(re.findall(r"\bmegascale_[a-z_]+", " ".join(expressions)))
    # An incident is counted once there was one.
    assert requested - {"megascale_incidents_total"} <= present
    assert set(re.findall(r"\bmegascale:[a-z0-9_:]+", " ".join(expressions))) <= recorded


def write_records(run: Path) -> None:
    """Write a run of three attempts: a hang, then an eviction by a person. Step 2 was repeated."""
    begin = time.time() - 100
    steps = [(1, 11), (2, 12), (2, 32), (3, 33)]
    metrics = [
        {"step": step, "time": begin + at, "seconds": 1.0, "loss": 2.0, "mfu": 0.5, "tokens_per_second": 100.0 * step}
        for step, at in steps
    ]
    events = [
        (0, "attempt_started", ""),
        (11, "checkpoint_saved", ""),
        (20, "process_exit", "recover"),
        (21, "hang", "recover"),
        (22, "slow_node", "alert"),
        (30, "attempt_started", ""),
        (40, "eviction_asked", ""),
        (45, "checksum_mismatch", "alert"),
        (50, "attempt_started", ""),
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    with open(run / "events.jsonl", "a") as file:
        for at, event, action in events:
            file.write(json.dumps({"time": begin + at, "event": event, "action": action}) + "\n")


def test_the_records_of_the_run_folder_are_counted(served):  # noqa: F811
    write_records(served.run)
    samples = scrape(served)
    assert samples["megascale_mfu_ratio"] == 0.5
    assert samples["megascale_tokens_per_second"] == 200
    assert samples["megascale_checksum_mismatches_total"] == 1
    restarts = {name: value for name, value in samples.items() if name.startswith("megascale_restarts_total")}
    assert restarts == {
        'megascale_restarts_total{cause="hang"}': 1,
        'megascale_restarts_total{cause="node_evicted_by_a_person"}': 1,
    }
    assert samples["megascale_commit_age_seconds"] == pytest.approx(89, abs=5)
    # Three of four steps counted, of 100 s.
    assert samples["megascale_effective_time_ratio"] == pytest.approx(0.03, abs=0.005)
    assert samples['megascale_lost_time_seconds{cause="repeated_steps"}'] == pytest.approx(1)


def test_targets_are_those_of_present_nodes_and_end_with_the_job(tmp_path):
    target_folder = tmp_path / "targets"
    target_folder.mkdir()
    record = SimpleNamespace(address="10.0.0.7")
    state = SimpleNamespace(is_present=True)
    node = SimpleNamespace(name="n7", record=record, state=state)
    limits = ResilienceConfig(
        targets=str(target_folder), driver_metrics="0.0.0.0:9400", agent_metrics="[::]:9100", advertise="head"
    )
    job = SimpleNamespace(phase=Phase.RUNNING, state=SimpleNamespace(name="gpt"))
    nodes = SimpleNamespace(all=lambda: [node])
    driver = SimpleNamespace(limits=limits, job=job, nodes=nodes)
    targets = ScrapeTargets(driver)
    targets.write()
    groups = json.loads((target_folder / "gpt.json").read_text())
    labels = {"run": "gpt", "job_name": "gpt"}
    assert groups == [
        {"targets": ["head:9400"], "labels": labels | {"role": "driver"}},
        {"targets": ["10.0.0.7:9100"], "labels": labels | {"role": "agent", "node": "n7"}},
    ]
    state.is_present = False
    targets.write()
    assert len(json.loads((target_folder / "gpt.json").read_text())) == 1
    targets.remove_if_ended()
    assert (target_folder / "gpt.json").exists()
    job.phase = Phase.DONE
    targets.remove_if_ended()
    assert list(target_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("listen", "host"), [("10.0.0.1", "10.0.0.1"), ("0.0.0.0", socket.gethostname()), ("::1", socket.gethostname())]
)
def test_the_driver_is_scraped_at_the_address_on_which_it_listens(tmp_path, listen, host):
    """The name of a node may not resolve on the machine of Prometheus."""
    limits = ResilienceConfig(targets=str(tmp_path), driver_metrics="0.0.0.0:9401", listen=listen)
    job = SimpleNamespace(phase=Phase.RUNNING, state=SimpleNamespace(name="gpt"))
    ScrapeTargets(SimpleNamespace(limits=limits, job=job, nodes=SimpleNamespace(all=list))).write()
    (group,) = json.loads((tmp_path / "gpt.json").read_text())
    assert group["targets"] == [f"{host}:9401"]


def test_targets_without_an_address_are_refused():
    with pytest.raises(ConfigError, match=r"resilience\.targets=/x would list no address; set resilience\."):
        load(None, ["--resilience.targets=/x"])


# a real one -------------------------------------------------------------------------------------------------------

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are not installed (Debian: prometheus)",
)


class Webhook(BaseHTTPRequestHandler):
    """Keeps what an Alertmanager posts."""

    answers: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        self.answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
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


def query_prometheus(port: int, expression: str) -> list[dict]:
    """Return the series of an instant query; a wrong query raises."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': expression})}"
    with urllib.request.urlopen(url, timeout=20) as response:
        answer = json.load(response)
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


# Panels without data as long as nothing of their kind happens, or for lack of a history of some minutes.
EMPTY_PANELS = {"megascale_incidents_total", "megascale:step_seconds:median1h"}


def check_dashboards(port: int) -> None:
    """Query each panel of both dashboards as Grafana does, with its variables replaced."""
    pending = {
        target["expr"].replace("$run", "job").replace("$job_name", "job").replace("$__rate_interval", "1m")
        for dashboard in (make_run_dashboard(), make_fleet_dashboard())
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    assert len(pending) > 20
    deadline = time.monotonic() + 60
    while pending:  # A recording rule has its first value after an interval.
        pending = {each for each in pending if not query_prometheus(port, each)}
        if all(any(name in each for name in EMPTY_PANELS) for each in pending):
            return
        assert time.monotonic() < deadline, pending
        time.sleep(0.2)


@needs_prometheus
@pytest.mark.skipif(not shutil.which("prometheus-alertmanager"), reason="prometheus-alertmanager is not installed")
def test_prometheus_scrapes_it_and_alertmanager_calls(served, tmp_path, daemon):  # noqa: F811
    """The test uses the driver's token and the shipped rules with short times. The loss is NaN."""
    Webhook.answers.clear()
    hook = HTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    served.driver.observations.record_steps(
        Steps(replaces_earlier=False, steps=(StepFigures(8, float("nan"), 1.0, 0.7),))
    )
    beat(served, {0: 1.0})
    write_records(served.run)
    (tmp_path / "rules.yml").write_text(get_rules_file().read_text().replace("interval: 15s", "interval: 1s"))
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
        while not Webhook.answers:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            assert server.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.1)
        labels = query_prometheus(port, "megascale_step")[0]["metric"]
        assert (labels["run"], labels["job_name"]) == ("job", "job")
        check_dashboards(port)
    finally:
        hook.shutdown()
    alert = Webhook.answers[0]["alerts"][0]
    assert (alert["status"], alert["labels"]["alertname"]) == ("firing", "MegascaleLossNotFinite")
    assert alert["labels"]["instance"] == target
