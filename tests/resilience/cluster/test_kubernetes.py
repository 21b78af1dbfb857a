"""The cluster of pods before a small API server: pods that are refused or do not start, machines to avoid, drivers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megascale.config import from_tree
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.kubernetes import KubernetesCluster
from megascale.resilience.protocol.job_description import JobDescription
from tests.chaos.kubernetes.kubelets import Kubelets, machine
from tests.chaos.kubernetes.server import Refused, Server, Store

pytest.importorskip("kubernetes")


@dataclass
class Site:
    store: Store
    kubelets: Kubelets
    folder: Path

    def run(self, work: Callable[[KubernetesCluster], Awaitable[Any]], port: int = 1, **kubernetes: Any) -> Any:
        """Do it with the cluster of a driver."""
        tree: dict[str, Any] = {"train": {"name": "job", "device": "cpu", "runs": str(self.folder)}}
        tree["resilience"] = {"cluster": "kubernetes", "replenish_wait": 2.0, "grace_period": 1.0}
        tree["kubernetes"] = {"kubeconfig": str(self.folder / "kubeconfig"), "image": "r/m:1"} | kubernetes

        async def all_of_it() -> Any:
            config = from_tree(tree)
            cluster = KubernetesCluster(ClusterRequest(self.folder / "job", config))
            try:
                cluster.announce(JobDescription("job", port, ("127.0.0.1", port), config.resilience), b"0" * 64)
                return await work(cluster)
            finally:
                await cluster.close()

        return asyncio.run(all_of_it())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    store = Store()
    for i in range(3):
        store.create("nodes", machine(f"k{i}", labels={"rack": f"r{i % 2}"}))
    server = Server(store)
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    kubelets = Kubelets(store)
    kubelets.start()
    yield Site(store, kubelets, tmp_path)
    kubelets.stop()
    server.down()


async def wait_until(observed: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first result of `seen`."""
    async with asyncio.timeout(seconds):
        while not (result := observed()):
            await asyncio.sleep(0.02)
        return result


def test_pods_are_given_each_on_a_machine_of_its_own(site):
    async def work(cluster: KubernetesCluster) -> None:
        names = await asyncio.gather(*(cluster.request() for _ in range(3)))
        assert sorted(names) == ["k0", "k1", "k2"]
        assert [(info.name, info.can_start_agent, info.has_agent) for info in cluster.nodes()] == [
            (name, True, True) for name in ("k0", "k1", "k2")
        ]
        assert (cluster.find_switch("k0"), cluster.find_switch("k1"), cluster.find_switch("k2")) == ("r0", "r1", "r0")
        await cluster.fence("k1")
        assert cluster.has_stopped("k1")
        assert await cluster.start_agent("k1")
        assert {info.name for info in cluster.nodes() if info.has_agent} == {"k0", "k1", "k2"}

    site.run(work, switch_label="rack")
    owner = site.store.get("configmaps", "megascale-job")["metadata"]["uid"]
    assert all(p["metadata"]["ownerReferences"][0]["uid"] == owner for p in site.store.all("pods"))
    assert site.store.get("leases", "megascale-job")["spec"]["holderIdentity"] == ""


def test_quota_and_admission_are_verdicts(site):
    def refuse(kind: str, thing: dict) -> None:
        if kind == "pods":
            raise Refused(
                403, "Forbidden", "pods is forbidden: exceeded quota: team, requested: pods=1, limited: pods=1"
            )

    site.store.admit = refuse

    async def work(cluster: KubernetesCluster) -> None:
        assert await cluster.request() is None
        (verdict,) = cluster.take_verdicts()
        assert (verdict.kind, verdict.needs_person) == ("quota_reached", True)
        assert "exceeded quota: team" in verdict.evidence[0]
        assert not cluster.take_verdicts()

    site.run(work)


def test_an_image_that_cannot_be_pulled_is_a_verdict_and_the_pod_goes(site):
    site.kubelets.broken_images.add("r/m:1")

    async def work(cluster: KubernetesCluster) -> None:
        assert await cluster.request() is None
        assert [verdict.kind for verdict in cluster.take_verdicts()] == ["image_pull_failed"]

    site.run(work)
    assert not [p for p in site.store.all("pods") if not p["metadata"].get("deletionTimestamp")]


def test_the_block_list_outlives_the_driver(site):
    async def first(cluster: KubernetesCluster) -> None:
        name = await cluster.request()
        assert name is not None
        cluster.block(name, "its fan is loud")
        await cluster.fence(name)
        listed = "megascale-job"
        await wait_until(lambda: name in json.loads(site.store.get("configmaps", listed)["data"]["blocked.json"]))
        assert not cluster.view.describe_node(name).can_start_agent
        blocked.append(name)

    async def second(cluster: KubernetesCluster) -> None:
        result = await asyncio.gather(cluster.request(), cluster.request())
        assert sorted(result) == sorted({"k0", "k1", "k2"} - set(blocked))

    blocked: list[str] = []
    site.run(first)
    site.run(second, port=2)


def test_a_pod_that_is_stuck_is_removed_by_force_and_proves_nothing(site, monkeypatch):
    monkeypatch.setattr("megascale.resilience.cluster.kubernetes.END_TIMEOUT", 0.5)

    async def work(cluster: KubernetesCluster) -> None:
        name = await cluster.request()
        assert name is not None
        site.kubelets.cut.add(name)  # its kubelet does not reach the server
        assert not await cluster.fence(name)
        await wait_until(lambda: not cluster.view.table.list_pods(name))
        assert not site.store.all("pods")
        assert not cluster.has_stopped(name)
        peers = await asyncio.gather(cluster.request(), cluster.request())
        assert name not in peers  # what runs there may run on

    site.run(work)


def test_a_pod_that_no_machine_takes_is_made_again_when_one_is_free(site):
    """All machines are to be avoided while it is asked for, as after all pods were deleted by force."""

    async def work(cluster: KubernetesCluster) -> None:
        for name in ("k0", "k1", "k2"):
            cluster.block(name, "all are")
        requested = asyncio.create_task(cluster.request())
        await wait_until(lambda: any(pod.obstacle.reason for pod in cluster.view.table.pods.values()))
        first = {pod.name for pod in cluster.view.table.pods.values()}
        cluster.unblock("k1")
        assert await requested == "k1"
        assert not first & {pod["metadata"]["name"] for pod in site.store.all("pods")}

    site.run(work)


def test_a_pod_that_no_machine_has_taken_goes_with_the_driver(site):
    """A spare that was asked for as the job ended: later it would run, and wait for a driver."""

    async def work(cluster: KubernetesCluster) -> None:
        assert await cluster.request()
        for name in ("k0", "k1", "k2"):
            cluster.block(name, "all are")
        requested = asyncio.create_task(cluster.request())
        await wait_until(lambda: len(cluster.view.table.pods) == 2)
        requested.cancel()

    site.run(work)
    (remaining,) = site.store.all("pods")
    assert remaining["spec"]["nodeName"]


def test_pods_that_run_are_told_where_a_new_driver_is(site):
    async def begin(cluster: KubernetesCluster) -> None:
        assert await cluster.request()

    def was_reported() -> bool:
        notes = site.store.all("pods")[0]["metadata"]["annotations"]
        return (notes["megascale.dev/driver"], notes["megascale.dev/epoch"]) == ("127.0.0.1:2", "2")

    async def take_over(cluster: KubernetesCluster) -> None:
        assert [info.has_agent for info in cluster.nodes()] == [True]
        await wait_until(was_reported)

    site.run(begin)
    site.run(take_over, port=2)


def test_drained_machines_and_deleted_pods_are_seen(site):
    async def work(cluster: KubernetesCluster) -> None:
        name = await cluster.request()
        assert name is not None
        site.store.update("nodes", name, lambda thing: thing["spec"].update(unschedulable=True))
        await wait_until(lambda: name in cluster.drained)
        site.kubelets.cut.add(name)
        pod = site.store.all("pods")[0]["metadata"]["name"]
        site.store.delete("pods", pod, 30)
        await wait_until(lambda: name in cluster.ending)
        assert not cluster.view.describe_node(name).has_agent
        assert not cluster.has_stopped(name)
        site.store.delete("pods", pod, 0)  # by force: what ran may run on, and its agent is still to end
        await wait_until(lambda: not cluster.view.table.pods)
        assert name in cluster.ending

    site.run(work)
