"""One driver a job: who holds the Lease, and when another may have it. And watches that go on where they broke off."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.config import KubernetesConfig
from megascale.errors import ConfigError
from megascale.resilience.cluster import kubernetes_lease
from megascale.resilience.cluster.kubernetes_api import KubernetesApi, KubernetesError, Watch
from megascale.resilience.cluster.kubernetes_lease import DriverLease, has_certainly_ended, make_own_identity
from tests.chaos.kubernetes.kubelets import machine
from tests.chaos.kubernetes.server import Server, Store

pytest.importorskip("kubernetes")


@pytest.fixture
def server() -> Iterator[Server]:
    built = Server(Store())
    yield built
    built.down()


@pytest.fixture
def api(server: Server, tmp_path: Path) -> KubernetesApi:
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    return KubernetesApi(KubernetesConfig(kubeconfig=str(tmp_path / "kubeconfig")))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this process a driver of another name."""

    def name(text: str) -> None:
        monkeypatch.setattr(kubernetes_lease, "make_own_identity", lambda: text)

    return name


def lease(api: KubernetesApi, seconds: float = 30.0) -> DriverLease:
    return DriverLease(api, "megascale-job", seconds, {})


def test_a_second_driver_is_refused_while_the_first_renews(api, named):
    named("pod=a uid=1")
    first = lease(api)
    first.acquire(print)
    named("pod=b uid=2")
    output: list[str] = []
    with pytest.raises(ConfigError, match="pod=a uid=1"):
        lease(api).acquire(output.append, sleep=lambda seconds: first.renew())
    assert len(output) == 1


def test_a_driver_that_was_replaced_learns_it(api, named):
    named("pod=a uid=1")
    first = lease(api)
    first.acquire(print)
    named("pod=b uid=2")
    current = [100.0]
    second = DriverLease(api, "megascale-job", 30.0, {}, lambda: current[0])
    second.acquire(print, sleep=lambda seconds: current.__setitem__(0, current[0] + 10.0))
    assert current[0] > 130.0
    assert api.call("GET", api.path("leases", "megascale-job", kubernetes_lease.GROUP))["spec"]["leaseTransitions"] == 1
    first.renew()
    assert first.new_holder == "pod=b uid=2"
    first.release()  # of what is not its own it gives up nothing
    second.renew()
    assert not second.new_holder


def test_what_is_released_or_of_a_dead_driver_is_taken_at_once(api, named):
    def never(seconds: float) -> None:
        raise AssertionError("it waits")

    named("pod=a uid=1")
    first = lease(api)
    first.acquire(print, never)
    first.release()
    named("pod=b uid=2")
    lease(api).acquire(print, never)
    named("pod=b uid=2")  # its container was started again
    lease(api).acquire(print, never)


def test_who_is_known_to_be_dead():
    local = make_own_identity()
    assert not has_certainly_ended(local)
    assert has_certainly_ended(local.replace(f"pid={os.getpid()} ", "pid=999999999 "))
    assert not has_certainly_ended(
        local.replace("host=", "host=another-").replace(f"pid={os.getpid()} ", "pid=999999999 ")
    )
    assert not has_certainly_ended("somebody else's words")


def test_a_lease_that_was_removed_is_made_again(api, server, named):
    named("pod=a uid=1")
    local = lease(api)
    local.acquire(print)
    server.store.delete("leases", "megascale-job", 0)
    local.renew()
    assert not local.new_holder
    assert server.store.get("leases", "megascale-job")["spec"]["holderIdentity"] == "pod=a uid=1"


def test_refusals_and_a_server_that_is_away(api, server):
    with pytest.raises(KubernetesError) as result:
        api.call("GET", api.path("configmaps", "nothing"))
    assert (result.value.status, result.value.reason) == (404, "NotFound")
    server.down()
    with pytest.raises(KubernetesError) as result:
        api.call("GET", api.path("configmaps", "nothing"))
    assert result.value.status == 0
    server.up()


class Recorder:
    """Events that a watch has brought."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.changed = threading.Condition()

    def __call__(self, change: tuple[str, list[dict]]) -> None:
        kind, things = change
        with self.changed:
            names = {each["metadata"]["name"] for each in things}
            self.names = names if kind == "all" else self.names - names if kind == "deleted" else self.names | names
            self.changed.notify_all()

    def wait_until(self, names: set[str]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.names == names, 60.0), (self.names, names)


def test_a_watch_goes_on_after_an_outage_and_begins_anew_after_expiry(api, server):
    received, store = Recorder(), server.store
    store.create("nodes", machine("k0"))
    watch = Watch(api, "/api/v1/nodes", received)
    watch.start()
    received.wait_until({"k0"})
    store.create("nodes", machine("k1"))
    received.wait_until({"k0", "k1"})
    server.down()
    store.create("nodes", machine("k2"))
    server.up()
    watch.retry_now()
    received.wait_until({"k0", "k1", "k2"})
    assert watch.list_count == 1
    server.down()
    store.delete("nodes", "k0", 0)
    store.forget()  # the server does not know what happened since
    server.up()
    watch.retry_now()
    received.wait_until({"k1", "k2"})
    assert watch.list_count == 2
    watch.stop()


def test_a_driver_s_pod_that_has_ended_is_not_waited_for(api, server, named):
    def never(seconds: float) -> None:
        raise AssertionError("it waits")

    store = server.store
    built = store.create("pods", {"metadata": {"name": "a"}, "spec": {"nodeName": "k1"}})
    named(f"pod=a uid={built['metadata']['uid']}")
    lease(api).acquire(print)
    named("pod=b uid=2")
    with pytest.raises(AssertionError, match="it waits"):
        lease(api).acquire(print, never)
    states = [{"state": {"terminated": {"exitCode": 137}}}]
    store.update("pods", "a", lambda pod: pod["status"].update(phase="Failed", containerStatuses=states))
    lease(api).acquire(print, never)


def test_a_driver_s_pod_that_is_not_there_may_live_on(api, named):
    def never(seconds: float) -> None:
        raise AssertionError("it waits")

    named("pod=a uid=1")
    lease(api).acquire(print)
    named("pod=b uid=2")
    with pytest.raises(AssertionError, match="it waits"):
        lease(api).acquire(print, never)


def test_a_watch_goes_on_after_an_object_that_cannot_be_read(api, server, caplog):
    """A thread that ended silently would leave the driver with the machines of that moment."""
    received, store = Recorder(), server.store
    failures = iter([KeyError("metadata")])

    def changed(change: tuple[str, list[dict]]) -> None:
        if change[0] != "all" and (error := next(failures, None)):
            raise error
        received(change)

    store.create("nodes", machine("k0"))
    watch = Watch(api, "/api/v1/nodes", changed)
    watch.start()
    received.wait_until({"k0"})
    store.create("nodes", machine("k1"))
    received.wait_until({"k0", "k1"})
    assert watch.list_count == 2
    assert "following /api/v1/nodes failed (KeyError: 'metadata')" in caplog.text
    watch.stop()
