"""A cluster and an anomaly rule of a package outside `src`: `megascale launch` finds them by its entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.errors import ConfigError
from megascale.resilience import rules
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.local import LocalCluster
from megascale.resilience.rules import metrics_rules, table
from tests.extend.packaged import install
from tests.resilience.conftest import launch  # noqa: F401

PACKAGE = '''
"""Local processes under another name, which writes down what the driver asks of it; and a rule about steps."""

from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.local import LocalCluster
from megascale.resilience.rules import register_rule
from megascale.resilience.rules.view import Verdict


class RecordingCluster(LocalCluster):
    def __init__(self, request):
        super().__init__(request)
        self._file = request.run / "requests"

    def _record(self, request):
        with open(self._file, "a") as file:
            file.write(request + "\\n")

    async def start_agent(self, name):
        self._record(f"start {name}")
        return await super().start_agent(name)

    async def fence(self, name):
        self._record(f"fence {name}")
        return await super().fence(name)

    async def request(self):
        self._record("request")
        return await super().request()


def fifth_step(view):
    came = [(m, w) for m, w in view.workers() if w.step >= 5]
    return [Verdict("fifth_step", (m.node,), (w.rank,), "recover", ("five are enough",)) for m, w in came[:1]]


CLUSTERS.register("recording", RecordingCluster)
register_rule(fifth_step, quick=True)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path / "site", "ours", PACKAGE, monkeypatch)


def test_a_cluster_and_a_rule_of_another_package_run_a_job(package, launch):  # noqa: F811
    arguments = ["--nodes=1", "--resilience.cluster=recording", "--train.steps=100000", "--checkpoint.interval=0"]
    job = launch("extended", *arguments)
    result = job.until("fifth_step")
    assert (result.nodes, result.action, result.evidence) == (("n0",), "recover", ("five are enough",))
    assert result.ranks in ((0,), (1,))  # either may be the first that the driver hears of
    assert job.until("recovery_action").action == "retry"  # the verdict is acted upon like any other
    assert (job.run / "requests").read_text().splitlines() == ["request", "start n0", "fence n0"]
    job.process.terminate()
    assert job.finish() == 130, job.story()
    assert job.events()[-1].kind == "driver_ended"


def test_a_cluster_that_nobody_registered_is_refused_with_those_there_are(package, megascale, tiny, tmp_path):
    pytest.importorskip("fastapi")
    done = megascale("launch", tiny, "--resilience.cluster=slurn")
    assert done.returncode == 2
    assert "resilience.cluster='slurn' is not known; did you mean 'slurm'? choose among " in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_plugin_that_cannot_be_imported_is_named(package, megascale, tiny):
    pytest.importorskip("fastapi")
    package.write_text("import nothing_of_that_name")
    done = megascale("launch", tiny)
    assert done.returncode == 2
    assert "the plugin ours (ours) cannot be loaded: ModuleNotFoundError" in done.stderr


def test_a_name_means_one_cluster_and_a_rule_is_applied_once(monkeypatch):
    with pytest.raises(ConfigError, match="'local' is registered already"):
        CLUSTERS.register("local", LocalCluster)
    monkeypatch.setattr(table, "SLOW_RULES", [])
    for _ in range(2):
        rules.register_rule(metrics_rules.judge_losses)
    assert [metrics_rules.judge_losses] == table.SLOW_RULES
