"""Jobs whose nodes are pods of a small API server, run as processes here: what the driver makes of what it hears."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.kubernetes.kubelets import Kubelets, machine
from tests.chaos.kubernetes.server import Server, Store
from tests.forked import start_pod
from tests.resilience.conftest import Launched
from tests.resilience.test_launch import losses

pytest.importorskip("kubernetes")


@dataclass
class Site:
    """A cluster, and a way to launch jobs on it."""

    store: Store
    server: Server
    kubelets: Kubelets
    launch: Callable[..., Launched]

    def pod_of(self, node: str) -> str:
        """Name of the living pod of a node."""
        return next(p["metadata"]["name"] for p in self.store.all("pods") if p["spec"].get("nodeName") == node)


@pytest.fixture
def site(launch, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Makes a cluster of so many machines."""
    built: list[Site] = []

    def make(machines: int, *arguments: str) -> Site:
        store = Store()
        for i in range(machines):
            store.create("nodes", machine(f"k{i}"))
        server = Server(store)
        (tmp_path / "kubeconfig").write_text(server.kubeconfig())
        more = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "MEGASCALE_TEST_REST": "0.3"}
        kubelets = Kubelets(store, tmp_path / "pods", more, spawn=start_pod)
        kubelets.start()

        def start(name: str, *peers: str) -> Launched:
            return launch(
                name,
                "--cluster=kubernetes",
                f"--kubernetes.kubeconfig={tmp_path / 'kubeconfig'}",
                "--kubernetes.image=local/megascale:1",
                f"--kubernetes.python={sys.executable}",
                "--train.steps=100000",
                *arguments,
                *peers,
            )

        built.append(Site(store, server, kubelets, start))
        return built[-1]

    yield make
    for each in built:
        each.kubelets.stop()
        each.server.down()


def test_deleted_pod_is_replaced_by_a_spare_and_a_new_driver_takes_over(site):
    cluster = site(4)
    job = cluster.launch("kube", "--nodes=2", "--spares=1", "--checkpoint.interval=0")
    first = job.until("attempt_started", attempt=1).nodes
    job.until("first_step")
    cluster.store.delete("pods", cluster.pod_of(first[1]), None)
    job.until("first_step", attempt=2)
    job.process.kill()
    job.process.wait()
    job.start()
    job.until("driver_took_over")
    observed = job.wait(lambda: losses(job.run), "a step")
    job.until_step(observed[-1][0] + 3)
    assert not [e for e in job.events() if e.kind == "attempt_started" and e.attempt > 2]
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.story()


def test_pod_whose_kubelet_is_dead_is_moved_once_its_agent_has_ended_and_then_removed(site):
    """Only the driver tells the agent, and only the agent reports that its ranks have ended: long before its lease
    is over, which would be longer than this test waits."""
    cluster = site(3, "--resilience.agent_lease=1000", "--resilience.grace_period=20")
    job = cluster.launch("kube", "--nodes=2", "--spares=1", "--checkpoint.interval=0")
    first = job.until("attempt_started", attempt=1).nodes
    job.until("first_step")
    pod = cluster.pod_of(first[1])
    cluster.kubelets.cut.add(first[1])
    cluster.store.delete("pods", pod, 35)
    second = job.until("attempt_started", attempt=2).nodes
    assert first[1] not in second
    job.until("first_step", attempt=2)
    assert cluster.kubelets.processes[pod].wait(30) == 0
    job.wait(lambda: pod not in [each["metadata"]["name"] for each in cluster.store.all("pods")], "its removal")
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.story()
