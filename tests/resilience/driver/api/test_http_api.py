"""The driver's HTTP API against arbitrary requests, which schemathesis generates from the API's description."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from megascale.config import Config, load
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.local import LocalCluster
from megascale.resilience.driver.api import access, http_api
from megascale.resilience.driver.api.metrics import JobMetrics
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.state.job_state import JobState, NodeEvent, NodeState, Phase
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.protocol import contact
from megascale.resilience.protocol.agent_messages import Diagnosed


class Served:
    """A driver without agents whose API is served in a thread."""

    host = "127.0.0.1"

    def __init__(self, run: Path, phase: Phase = Phase.PAUSED) -> None:
        run.mkdir(parents=True)
        contact.make_token(run)
        built = access.make_tokens(run)
        self.run = run
        self.token = built.act.decode()
        self.read_token = built.read.decode()
        self.phase = phase
        self.ready = threading.Event()
        self.over = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.thread.start()
        assert self.ready.wait(30)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        config = load(None, [])
        (self.run / "driver" / "job.toml").write_text(config.to_toml())
        journal, _ = Journal.take(self.run, 3.0)
        job = JobState("job", self.phase, 1, ("n0",), 1, 1)
        self.driver = Driver(self.run, config, LocalCluster(ClusterRequest(self.run, config)), [], journal, job)
        for name in ("n0", "n1"):
            self.driver.nodes.change(name, NodeEvent.CONNECTED)
        self.url, end = await http_api.serve(self.driver, self.host, 0, JobMetrics(self.driver))
        self.ready.set()
        while not self.over.is_set():
            await asyncio.sleep(0.02)
        await end()
        journal.close()

    def ask(self, path: str, body: object = None, token: str | None = None) -> tuple[int, dict]:
        token = self.token if token is None else token
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    result = Served(tmp_path / "run")
    yield result
    result.over.set()
    result.thread.join(20)


@pytest.mark.parametrize("token", ["", "wrong", "ä" * 3, "x" * 5000])
def test_without_the_token_nothing_is_said_and_nothing_done(served, token):
    for path, body in (("/v1/job", None), ("/v1/events", None), ("/v1/job/resume", {})):
        try:
            code, answer = served.ask(path, body, token)
        except UnicodeEncodeError:
            return  # no such header can be sent
        assert code in (401, 404, 431, 400), path
        assert "epoch" not in answer
    assert served.driver.job.phase is Phase.PAUSED


def test_it_listens_on_loopback_only(served):
    assert Config().resilience.listen == "127.0.0.1"
    assert served.url.startswith("http://127.0.0.1:")


def test_orders_do_what_they_say_and_refuse_what_cannot_be(served):
    assert served.ask("/v1/job")[1]["phase"] == "paused"
    assert served.ask("/v1/nodes/n9/cordon", {})[0] == 404
    assert served.ask("/v1/nodes/n1/cordon", {"why": "loud"})[0] == 200
    assert served.driver.nodes["n1"].record.cordoned
    assert served.ask("/v1/job/pause", {})[0] == 409
    assert served.ask("/v1/job/restart", {})[0] == 409
    assert served.ask("/v1/job/resume", {"why": "x" * 501})[0] == 422
    assert served.ask("/v1/job/resume", {"wy": "typo"})[0] == 422
    assert served.ask("/v1/job/resume", {"why": "go"}) == (200, {"phase": "waiting"})
    events = served.ask("/v1/events")[1]
    assert [e["kind"] for e in events] == ["node_cordoned", "continued"]
    assert events[0]["evidence"] == ["loud"]
    assert served.ask(f"/v1/events?after={events[0]['id']}")[1] == events[1:]


def test_a_spare_that_fails_its_self_checks_is_evicted_and_replaced(served):
    driver = served.driver
    driver.job.state = replace(driver.job.state, phase=Phase.RUNNING)
    driver.tasks.spawn = lambda work: work.close()  # no cluster is asked
    report = Diagnosed(0, 1, stderr="failed: memory bandwidth cpu: 1 GB/s")
    handled = threading.Event()
    served.loop.call_soon_threadsafe(driver.self_checks.record_result, driver.nodes["n1"], report)
    served.loop.call_soon_threadsafe(handled.set)
    assert handled.wait(20)
    assert driver.nodes["n1"].state is NodeState.EVICTED
    assert "memory bandwidth" in driver.nodes["n1"].record.reason
    assert driver.job.phase is Phase.RUNNING  # training does not notice
    events = served.ask("/v1/events")[1]
    assert [(e["kind"], e["action"]) for e in events] == [
        ("node_diagnosed", "evict"),
        ("recovery_action", "replenish"),
        ("node_evicted", ""),
    ]


@pytest.mark.parametrize("setting", ["lr.paek=1", "lr.peak=fast", "model.hidden=64", "resilience.spares=3", "lr.peak="])
def test_wrong_settings_change_nothing(tmp_path, setting):
    result = Served(tmp_path / "run", Phase.RUNNING)
    try:
        before = (result.run / "driver" / "job.toml").read_text()
        code, answer = result.ask("/v1/job/restart", {"settings": [setting]})
        assert code == 400
        assert setting.partition("=")[0] in answer["detail"]
        assert (result.run / "driver" / "job.toml").read_text() == before
        assert result.driver.job.phase is Phase.RUNNING
    finally:
        result.over.set()
        result.thread.join(20)


def test_whatever_schemathesis_sends_is_answered_as_described(served):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from hypothesis import Phase as Stage

    headers = {"Authorization": f"Bearer {served.token}"}
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", headers=headers)
    count, any_match = int(os.environ.get("MEGASCALE_FUZZ", "6")), list(HealthCheck)
    observed = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        observed.add(operation.label)

        @given(case=operation.as_strategy())
        @settings(
            max_examples=count, deadline=None, database=None, phases=[Stage.generate], suppress_health_check=any_match
        )
        def send(case) -> None:
            case.call_and_validate(headers=headers)

        send()
    assert len(observed) >= 9
    assert served.ask("/v1/job")[0] == 200  # and it still lives
