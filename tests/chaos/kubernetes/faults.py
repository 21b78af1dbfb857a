"""Kinds of fault of the site `kubernetes`: what is done to pods and nodes, and what must follow."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.harness.launched import WAIT
from megascale.errors import TrainingError
from tests.chaos.kubernetes.job import DriverPodJob, KubernetesJob
from tests.chaos.machines.network import wait

_TRAINED = 20  # steps that training goes on where it is to go on
_DOWN = 60.0  # seconds without an API server
_SOON = 90.0  # seconds in which something must follow
_AGENT = "megascale.resilience.agent.pod"
_POD_COUNT = 32  # pods of the job of which all but two are lost
_NEVER = "docker.io/local/no-such-image:1"


@dataclass
class Injected:
    """Injected fault.

    Attributes:
        at: when, seconds since 1970.
        node: to which node of the cluster, "" for none; pod: to which pod.
        wrong: what was not as it should be, in words.
        work: what still goes on.
    """

    at: float
    node: str = ""
    pod: str = ""
    wrong: list[str] = field(default_factory=list)
    work: threading.Thread | None = None


def _of_rank_1(job: KubernetesJob) -> Injected:
    node = job.holder(1)
    pod = job.pod(node)
    return Injected(time.time(), node, pod)


def delete_pod(job: KubernetesJob) -> Injected:
    """Delete a pod as a person does, with the pod's grace period."""
    injected = _of_rank_1(job)
    job.kubectl("delete", "pod", injected.pod, "--wait=false")
    return injected


def force_delete_pod(job: KubernetesJob) -> Injected:
    """The object is gone at once; the kubelet ends its processes."""
    injected = _of_rank_1(job)
    job.kubectl("delete", "pod", injected.pod, "--force", "--grace-period=0", "--wait=false")
    return injected


def lose_many(job: KubernetesJob) -> Injected:
    """All pods but rank 0's and one spare's are gone at once."""
    injected = _of_rank_1(job)
    retained = {job.pod(job.holder(0))}
    stored = {job.holder(0), job.holder(1)}
    retained.add(job.pod(next(node for node in job.joined() if node not in stored)))
    lost = [pod["metadata"]["name"] for pod in job.pods() if pod["metadata"]["name"] not in retained]
    if len(lost) != _POD_COUNT - 2:
        injected.wrong.append(f"{len(lost)} pods were there to be lost, not {_POD_COUNT - 2}")
    injected.at = time.time()
    # kubectl deletes pods one after another, which takes over a minute on a busy machine.
    job.kubectl("delete", "pod", *lost, "--force", "--grace-period=0", "--wait=false", seconds=3 * _SOON)
    return injected


def power_off(job: KubernetesJob) -> Injected:
    """The plug is pulled."""
    injected = _of_rank_1(job)
    job.site.nodes[injected.node].power_off()
    return injected


def partition(job: KubernetesJob) -> Injected:
    """No packet comes or goes, and the node's processes run on."""
    injected = _of_rank_1(job)
    job.site.nodes[injected.node].machine.cut()
    return injected


def drain(job: KubernetesJob) -> Injected:
    """`kubectl drain`: cordoned, and its pods evicted through the API; it waits until they are gone."""
    injected = _of_rank_1(job)
    arguments = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s"]

    def run() -> None:
        try:
            job.site.kubectl("drain", injected.node, *arguments, seconds=130.0)
        except (TrainingError, subprocess.TimeoutExpired) as error:
            injected.wrong.append(f"kubectl drain: {error}")

    injected.work = threading.Thread(target=run)
    injected.work.start()
    return injected


def delete_driver(job: KubernetesJob) -> Injected:
    """The driver's pod is deleted, and its Job makes another one."""
    injected = Injected(time.time(), pod=_driver(job)["metadata"]["name"])
    job.kubectl("delete", "pod", injected.pod, "--wait=false")
    return _taken_over(job, injected)


def crash_driver(job: KubernetesJob) -> Injected:
    """SIGKILL to the driver in its pod, whose kubelet starts its container again."""
    pod = _driver(job)
    node = job.site.nodes[pod["spec"]["nodeName"]]
    injected = Injected(time.time(), pod=pod["metadata"]["name"])
    node.run("pkill", f"-{signal.SIGKILL}", "-f", f"launch .*{job.name}|launch /etc/megascale/job")
    return _taken_over(job, injected)


def _driver(job: KubernetesJob) -> dict[str, Any]:
    assert isinstance(job, DriverPodJob)
    return job.driver()


def _taken_over(job: KubernetesJob, injected: Injected) -> Injected:
    """Training goes on while there is no driver, and when there is one again."""
    if job.first(lambda e: e.kind == "driver_took_over" and e.time > injected.at, _SOON) is None:
        injected.wrong.append(f"no driver took over within {_SOON:g} s")
    job.until_step(job.step() + _TRAINED)
    return injected


def stick(job: KubernetesJob) -> Injected:
    """Kill the kubelet, delete the pod and end its processes. No object reports the end: the pod is Terminating."""
    injected = _of_rank_1(job)
    node = job.site.nodes[injected.node]
    node.kill_kubelet()
    job.kubectl("delete", "pod", injected.pod, "--wait=false")
    injected.at = time.time()
    node.run("pkill", f"-{signal.SIGKILL}", "-f", _AGENT)
    if "Terminating" not in job.kubectl("get", "pod", injected.pod):
        injected.wrong.append(f"{injected.pod} is not Terminating: nothing was tested")
    return injected


def stick_running(job: KubernetesJob) -> Injected:
    """The node's kubelet is gone and its pod is deleted: its processes run on, and only the driver can end them."""
    injected = _of_rank_1(job)
    job.site.nodes[injected.node].kill_kubelet()
    injected.at = time.time()
    job.kubectl("delete", "pod", injected.pod, "--wait=false")
    if "Terminating" not in job.kubectl("get", "pod", injected.pod):
        injected.wrong.append(f"{injected.pod} is not Terminating: nothing was tested")
    return injected


def stop_api(job: KubernetesJob) -> Injected:
    """The API server is away for a minute and comes again."""
    injected = Injected(time.time())
    job.site.stop_api()
    time.sleep(_DOWN)
    before = job.step()
    job.site.start_api()
    if before < job.step_before + _TRAINED:
        injected.wrong.append(f"training stood still without the API: {job.step_before} to {before}")
    job.until_step(job.step() + _TRAINED)
    return injected


def second_driver(job: KubernetesJob) -> Injected:
    """The same command once more, from another folder, while the first one has the job."""
    injected = Injected(time.time())
    second = job.second()
    try:
        code = second.wait(_SOON)
    except subprocess.TimeoutExpired:
        second.terminate()
        second.wait()
        injected.wrong.append(f"the second driver did not end within {_SOON:g} s")
    else:
        if code == 0:
            injected.wrong.append("the second driver ended with 0")
    job.until_step(job.step() + _TRAINED)
    return injected


def evict(job: KubernetesJob) -> Injected:
    """`megascale evict`, from elsewhere."""
    injected = _of_rank_1(job)
    head = [sys.executable, "-m", "megascale.cli.main"]
    access = job.folder / f"{job.name}.access"
    arguments = job.site.inside(head + ["access", str(job.run), "--act"])
    access.touch(0o600)
    access.write_text(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    arguments = job.site.inside(head + ["evict", str(access), injected.node, "--why", "fan is loud"])
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        injected.wrong.append(f"megascale evict: {done.stderr.strip()}")
    return injected


def make_unhealthy(job: KubernetesJob) -> Injected:
    """The device plugin says that the node's GPU is bad."""
    injected = _of_rank_1(job)
    job.site.nodes[injected.node].break_gpus([0])
    return injected


def nothing(job: KubernetesJob) -> Injected:
    """Inject nothing, because the fault was there from the start."""
    return Injected(time.time())


def quota(job: KubernetesJob) -> Injected:
    """One pod fewer may be than the job has, from now on; a pod is deleted, and later the quota."""
    injected = _of_rank_1(job)
    job.kubectl("create", "quota", "few", f"--hard=pods={len(job.pods()) - 1}")
    wait(lambda: _used(job), "the quota to count", _SOON)
    injected.at = time.time()
    job.kubectl("delete", "pod", injected.pod, "--wait=false")
    if job.first(lambda e: e.kind == "quota_reached" and e.time > injected.at, _SOON) is None:
        injected.wrong.append("no event says that the quota was reached")
    job.kubectl("delete", "quota", "few")
    return injected


def _used(job: KubernetesJob) -> bool:
    result = job.site.get("resourcequota", "few", "-n", job.name)
    return bool(result and result[0].get("status", {}).get("used"))


# What must be so in the end; each says what was not. ------------------------------------------------------------------


def replaced(job: KubernetesJob, injected: Injected) -> list[str]:
    """The node that it befell has no ranks any more."""
    last = next(e for e in reversed(job.events()) if e.kind == "attempt_started")
    return [f"{injected.node} has got ranks again"] if injected.node in last.nodes else []


def removed(job: KubernetesJob, injected: Injected) -> list[str]:
    """Check the same, and that the object of the Terminating pod has been deleted."""
    remaining = [pod["metadata"]["name"] for pod in job.pods()]
    return replaced(job, injected) + ([f"{injected.pod} is still Terminating"] if injected.pod in remaining else [])


def replenished(job: KubernetesJob, injected: Injected) -> list[str]:
    """The spare was used, and another pod came in its place before the job's end."""
    started = [set(e.nodes) for e in job.events() if e.kind == "attempt_started"]
    present = set(job.joined()) - set(job.joined(injected.at))
    wrong = [] if started[-1] - started[0] & present else [f"no spare was used: {started}"]
    return wrong + ([] if job.joined(injected.at) else ["no new pod has become a node"])


def in_place(job: KubernetesJob, injected: Injected) -> list[str]:
    """Accept any node."""
    return []


@dataclass(frozen=True)
class KubernetesFault:
    """One kind of fault and what is right.

    Attributes:
        strike: does it.
        check: what was wrong in the end.
        verdicts: events of which one must come after it; empty: none.
        ends: recover: trainers start again; ride: training goes on without; stop: the job ends with the verdict.
        steps: of the run; lost: steps that may be done twice.
        words: settings besides.
        gpus: whether nodes have any.
        pods: of its agents, spares too.
        driver_pod: whether the driver is a pod too.
        start_timeout: seconds in which the first step must come.
    """

    strike: Callable[[KubernetesJob], Injected]
    check: Callable[[KubernetesJob, Injected], list[str]] = in_place
    verdicts: tuple[str, ...] = ()
    ends: Literal["recover", "ride", "stop"] = "recover"
    steps: int = 120
    lost: int = 1
    words: tuple[str, ...] = ()
    gpus: bool = False
    pods: int = 3
    driver_pod: bool = False
    start_timeout: float = WAIT


_LOST = ("missed_heartbeat", "process_exit", "node_lost")
# So many processes on few cores answer late: what is silent counts as lost later.
_CROWD: tuple[str, ...] = (
    f"--resilience.spares={_POD_COUNT - 2}",
    "--kubernetes.one_a_node=false",
    "--resilience.window=30",
)
_CROWD += ("--resilience.agent_lease=60", "--checkpoint.linger=180", "--resilience.replacements=100")
_GPU = '--kubernetes.resources=["nvidia.com/gpu=1"]'
_NO_WAIT = "--resilience.replenish_wait=20"
FAULTS: dict[str, KubernetesFault] = {
    "pod-deleted": KubernetesFault(delete_pod, in_place, _LOST),
    "node-off": KubernetesFault(power_off, replaced, _LOST),
    "node-partitioned": KubernetesFault(partition, replaced, _LOST),
    "node-drained": KubernetesFault(drain, replaced, _LOST + ("node_cordoned",)),
    "image-missing": KubernetesFault(
        nothing, in_place, ("image_pull_failed",), "stop", words=(f"--kubernetes.image={_NEVER}", _NO_WAIT)
    ),
    "quota": KubernetesFault(quota, in_place, _LOST, steps=200),
    "gpu-unhealthy": KubernetesFault(make_unhealthy, replaced, ("device_fault",), words=(_GPU,), gpus=True),
    "api-down": KubernetesFault(stop_api, in_place, (), "ride", steps=800),
    "two-drivers": KubernetesFault(second_driver, in_place, (), "ride", steps=300),
    "driver-deleted": KubernetesFault(delete_driver, in_place, (), "ride", steps=300, driver_pod=True),
    "driver-killed": KubernetesFault(crash_driver, in_place, (), "ride", steps=300, driver_pod=True),
    "stuck-terminating": KubernetesFault(stick, removed, _LOST, steps=200),
    "stuck-running": KubernetesFault(stick_running, removed, _LOST, steps=200),
    "spare-used": KubernetesFault(force_delete_pod, replenished, _LOST, steps=200),
    "evicted": KubernetesFault(evict, replaced, ("node_evicted",)),
    # All pods import PyTorch at the same time: on two busy cores this takes more than four minutes.
    "many-lost": KubernetesFault(
        lose_many, replenished, _LOST, steps=600, words=_CROWD, pods=_POD_COUNT, start_timeout=3 * WAIT
    ),
}
