"""`--cluster kubernetes`: each node is a pod that the driver creates, by default one per machine.

Watches follow pods and machines in threads, and requests run in threads too. So the driver's loop never waits for the
API server, and training continues while the server is unavailable. A Lease decides which driver leads
(kubernetes_lease.py). A node has the name of its machine. A pod that has ended is replaced by a new one, on the same
machine if the driver starts that node again. The processes on an unreachable machine count as ended when the kubelet
has reported their end or the agent's lease has expired, never because an object was deleted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from megascale.config import Config
from megascale.core.addresses import find_local_address
from megascale.core.events import Event
from megascale.core.failure import keep_running, log_failure
from megascale.errors import ConfigError, TrainingError
from megascale.resilience.cluster.base import Cluster, ClusterRequest, NodeInfo, count_configured_gpus, format_address
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.kubernetes_api import KubernetesApi, KubernetesError, is_in_pod
from megascale.resilience.cluster.kubernetes_lease import DriverLease
from megascale.resilience.cluster.kubernetes_objects import (
    JobObjects,
    find_controller,
    list_inherited_secrets,
    make_labels,
    make_object_name,
    read_inherited_variables,
)
from megascale.resilience.cluster.kubernetes_pods import (
    DRIVER_ANNOTATION,
    EPOCH_ANNOTATION,
    EXTRA_GRACE,
    make_pod,
    read_patch,
    read_resources,
)
from megascale.resilience.cluster.kubernetes_table import Pod
from megascale.resilience.cluster.kubernetes_view import STUCK_SECONDS, ClusterView, judge_refusal
from megascale.resilience.cluster.remote import make_marker
from megascale.resilience.protocol.job_description import JobDescription
from megascale.resilience.rules.view import Verdict

log = logging.getLogger("megascale.driver")

AGENT_LEASE = 8.0  # seconds, default of resilience.agent_lease
END_TIMEOUT = 20.0  # seconds for a deleted pod to end, after which it is deleted by force
POD_GRACE = 5  # seconds in which a pod must end whose ranks have ended or must end
START_TIMEOUT = 60.0  # seconds for a pod to start
# Fraction of the Lease's duration after which a driver that cannot renew the Lease ends. The rest of the duration is
# for this end, before another driver may take the Lease.
WITHDRAW_SHARE = 0.8
FORCE_SECONDS = 3.0  # seconds between the order to a stuck pod's agent to end and the deletion of the pod by force
JUDGE_INTERVAL = 2.0  # seconds between checks of waiting pods
POLL_INTERVAL = 0.1  # seconds between reads of the table
_FAILED = object()  # result of a request that failed


class KubernetesCluster(Cluster):
    """Pods of one job in one namespace."""

    agent_lease = AGENT_LEASE
    start_limit = 10_000  # in effect no limit, since agents import on their own machines
    slow_start = True
    notice_seconds = 20.0

    def __init__(self, request: ClusterRequest) -> None:
        super().__init__(request)
        settings = request.config.kubernetes
        self._config = request.config
        self._job = request.config.train.name
        self._name = make_object_name(self._job)
        self._gpus = count_configured_gpus(request.config)
        self._patch = read_patch(settings)  # the user's changes of pods, by kubernetes.pod
        self.api = KubernetesApi(settings)
        self.lease = DriverLease(self.api, self._name, settings.lease_seconds, make_labels(self._job, "job"))
        self.objects = JobObjects(self.api, self._job)
        self.hands_over = is_in_pod()
        self._threads = ThreadPoolExecutor(8, "kubernetes")  # for requests, which block
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._driver_address: tuple[str, int] | None = None  # host and port at which agents reach this driver
        self._epoch = 0
        self._excluded: frozenset[str] = frozenset()  # nodes on whose machines no new pod must run
        self._requested_pods: set[str] = set()  # names of pods that are not nodes yet
        self._unreachable_since = 0.0  # on the monotonic clock, 0 while the server answers
        if request.config.checkpoint.location is None:
            make_marker(request.run / "checkpoints")
        self.view = ClusterView(self.api, request.config, self._gpus, self.objects.blocked)
        self._acquire_job()

    @classmethod
    def describe_remote_machines(cls, config: Config) -> tuple[int, str]:
        """Return (GPUs per pod, address of the driver).

        Raises ConfigError without an image or a usable job name, and for resources that pods cannot request.
        """
        make_object_name(config.train.name)
        if not config.kubernetes.image:
            raise ConfigError("cluster kubernetes needs the image of the nodes: --kubernetes.image=REGISTRY/NAME:TAG")
        gpus = count_configured_gpus(config)
        read_resources(config.kubernetes, gpus)
        return gpus, find_own_address(KubernetesApi(config.kubernetes))

    def _acquire_job(self) -> None:
        """Acquire the Lease and list the objects of the job, before the driver's loop starts."""
        try:
            self.lease.acquire(lambda text: self._report("driver", text))
            pod = os.environ.get("MEGASCALE_POD", "")
            controller = None
            if self.hands_over:
                controller = find_controller(self.api, pod)
            self.objects.prepare(controller)
            if not self.view.list_objects():
                self._report(
                    "driver",
                    "machines are not visible (no ClusterRole for nodes): a lost machine is noticed by its silence",
                )
        except KubernetesError as error:
            raise TrainingError(
                f"the Kubernetes API server {self.api.host} refused or did not answer: {error}"
            ) from None

    # Cluster ----------------------------------------------------------------------------------------------------------

    def announce(self, job: JobDescription, token: bytes) -> None:
        listen, port = job.driver
        self._driver_address = (self._choose_advertised_host(listen), port)
        self._epoch = job.epoch
        is_first = self._loop is None
        self._loop = asyncio.get_running_loop()
        self._spawn(self._update_agents(token))
        if is_first:
            self.view.start(self._loop)
            self._spawn(keep_running(self._judge_pods, "the check of pods", log))
            self._spawn(keep_running(self._renew_lease, "the renewal of the Lease", log))

    def nodes(self) -> list[NodeInfo]:
        return self.view.list_nodes()

    def exclude_nodes(self, names: frozenset[str]) -> None:
        self._excluded = names

    def has_stopped(self, name: str) -> bool:
        return self.view.table.has_stopped(name, self._config.resilience.grace_period + EXTRA_GRACE)

    def record_agent_end(self, name: str) -> None:
        self.view.table.record_agent_end(name)

    def find_switch(self, name: str) -> str:
        return self.view.find_switch(name)

    @property
    def removed_nodes(self) -> frozenset[str]:
        """Nodes whose pods were deleted and do not end."""
        return self.view.list_removed_nodes()

    @property
    def drained(self) -> dict[str, str]:
        """Nodes on machines that are cordoned or drained, with the reason."""
        return self.view.list_drain_reasons()

    @property
    def ending(self) -> frozenset[str]:
        """Nodes whose pod is being deleted or has ended, or was removed while its processes may still run."""
        return self.view.list_ending_nodes()

    def take_verdicts(self) -> list[Verdict]:
        return self.view.take_verdicts()

    def block(self, name: str, reason: str) -> None:
        self.objects.blocked[self.view.get_machine_name(name)] = reason
        self._spawn(self._write_blocked())

    def unblock(self, name: str) -> None:
        if self.objects.blocked.pop(self.view.get_machine_name(name), None) is not None:
            self._spawn(self._write_blocked())

    async def start_agent(self, name: str) -> bool:
        machine = self.view.get_machine_name(name)
        if not self.view.describe_node(name).can_start_agent:
            return False
        await self._remove_pods(name, END_TIMEOUT)
        if self.view.table.list_pods(name):
            return False  # The old pod does not end, and still holds the devices.
        # A node is named MACHINE with one pod per machine, else MACHINE.SLOT with a random text in place of SLOT.
        slot = name.removeprefix(machine).removeprefix(".")
        pod_name = await self._create_pod(slot, machine, self._list_machines_to_avoid())
        if pod_name is None:
            return False
        pod = await self._wait_until_running(pod_name, START_TIMEOUT)
        self._requested_pods.discard(pod_name)
        return pod is not None

    async def fence(self, name: str) -> bool:
        """Return True once the kubelet has reported the pod's end, or must have ended the pod by itself."""
        await self._remove_pods(name, END_TIMEOUT)
        return self.has_stopped(name)

    async def request(self) -> str | None:
        """Return a node with a running pod, None if no pod starts. A verdict then has the reason."""
        slot = "" if self._config.kubernetes.one_a_node else secrets.token_hex(2)
        deadline = time.monotonic() + (self._config.resilience.replenish_wait or START_TIMEOUT)
        while True:
            avoid = self._list_machines_to_avoid()
            pod_name = await self._create_pod(slot, "", avoid)
            if pod_name is None:
                return None
            pod = await self._wait_until_running(
                pod_name, deadline - time.monotonic(), is_hopeless=partial(self._is_outdated, avoid)
            )
            self._requested_pods.discard(pod_name)
            if pod is not None:
                return pod.node
            await self._delete_pod(pod_name, 0)
            # Another pod has a better chance only if a machine that this pod avoided is free now.
            is_any_machine_freed = not avoid <= self._list_machines_to_avoid()
            if time.monotonic() >= deadline or not is_any_machine_freed:
                return None

    async def close(self) -> None:
        """Release the Lease and stop the watches.

        Pods continue, except those that have no machine yet: after the job's end nothing would delete them.
        """
        unscheduled = []
        for name in self._requested_pods:
            pod = self.view.find_pod(name)
            if pod is None or not pod.machine:
                unscheduled.append(name)
        self.view.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.replaced_by:
            for name in unscheduled:
                await self._delete_pod(name, 0)
            await self._try_call(self.lease.release)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # the driver -------------------------------------------------------------------------------------------------------

    def _choose_advertised_host(self, listen: str) -> str:
        """Return the host at which agents reach this driver."""
        if self._config.resilience.advertise:
            return self._config.resilience.advertise
        return listen if listen not in ("0.0.0.0", "::") else find_own_address(self.api)

    async def _update_agents(self, token: bytes) -> None:
        """Write the Secret, and the address of this driver into the annotations of existing pods."""
        while await self._try_call(self.objects.write_secret, token) is _FAILED:
            await asyncio.sleep(1.0)
        assert self._driver_address is not None
        address = format_address(*self._driver_address)
        epoch = str(self._epoch)
        patch = {"metadata": {"annotations": {DRIVER_ANNOTATION: address, EPOCH_ANNOTATION: epoch}}}
        for pod in list(self.view.table.pods.values()):
            if not pod.has_final_phase and pod.driver != (address, epoch):  # pod.driver: values of the annotations
                self._spawn(self._try_call(self.api.call, "PATCH", self.api.path("pods", pod.name), patch))

    async def _renew_lease(self) -> None:
        """Renew the Lease repeatedly. This driver ends if that fails for too long or another driver holds the Lease."""
        seconds = self._config.kubernetes.lease_seconds
        while not self.replaced_by:
            # Several renewals may fail before the driver withdraws at 0.8 of the duration.
            await asyncio.sleep(min(5.0, seconds / 6))
            has_failed = await self._try_call(self.lease.renew) is _FAILED
            if self.lease.new_holder:
                self.replaced_by = f"Lease {self._name} is held by {self.lease.new_holder}: that driver has the job now"
            self._report_reachability(has_failed, WITHDRAW_SHARE * seconds)
            silence = time.monotonic() - self.lease.renewed_at  # seconds
            if silence > WITHDRAW_SHARE * seconds and not self.withdrawal_reason:
                self.withdrawal_reason = (
                    f"Lease {self._name} was not renewed for {silence:.0f} s (kubernetes.lease_seconds={seconds:g}), "
                    "another driver may hold it"
                )

    def _report_reachability(self, has_failed: bool, limit: float) -> None:
        """Add a verdict when the server stops answering, or answers again."""
        if has_failed and not self._unreachable_since:
            self._unreachable_since = self.lease.renewed_at
            text = f"the API server does not answer; training continues without it for {limit:.0f} s"
            self.view.add_verdict(Verdict(Event.CLUSTER_UNREACHABLE, action="alert", evidence=(text,)))
        elif self._unreachable_since and not has_failed:
            text = f"the API server answers again, after {time.monotonic() - self._unreachable_since:.1f} s"
            self.view.add_verdict(Verdict(Event.CLUSTER_BACK, evidence=(text,)))
            self._unreachable_since = 0.0
            self.view.retry_now()

    async def _judge_pods(self) -> None:
        """Judge waiting and stuck pods repeatedly, since the duration of a state may show a problem."""
        while True:
            await asyncio.sleep(JUDGE_INTERVAL)
            self.view.judge()
            for pod in self.view.table.list_stuck_pods(STUCK_SECONDS + FORCE_SECONDS):
                seconds = pod.grace + STUCK_SECONDS
                text = f"pod {pod.name} on {pod.machine} should have ended {seconds:.0f} s ago: deleted by force"
                self.view.add_verdict(Verdict(Event.POD_FAILED, (pod.node,), evidence=(text,)), f"stuck {pod.uid}")
                await self._delete_pod(pod.name, 0)

    # pods -------------------------------------------------------------------------------------------------------------

    def _list_machines_to_avoid(self) -> frozenset[str]:
        """Return the machines that are blocked, have a pod, or may still run processes of an earlier pod."""
        avoid = set(self.objects.blocked)
        for pod in list(self.view.table.vanished_pods.values()):
            if not self.has_stopped(pod.node):
                avoid.add(pod.machine)
        if self._config.kubernetes.one_a_node:
            avoid |= {self.view.get_machine_name(node) for node in self._excluded}
        return frozenset(avoid - {""})

    def _is_outdated(self, avoid: frozenset[str], pod: Pod) -> bool:
        """Return True if a pod is unschedulable and avoids a machine that is free now.

        Another pod must then replace it, since the affinity of a pod cannot be changed.
        """
        return not pod.machine and bool(pod.obstacle.reason) and not avoid <= self._list_machines_to_avoid()

    async def _create_pod(self, slot: str, machine: str, avoid: frozenset[str]) -> str | None:
        """Create a pod and return its name, None if the server refused."""
        name = f"{self._job}-{secrets.token_hex(3)}"
        self._requested_pods.add(name)  # `close` may run before the answer to the request.
        pod = make_pod(
            self._config,
            name,
            self._gpus,
            slot=slot,
            machine=machine,
            avoid=avoid,
            driver=self._driver_address,
            epoch=self._epoch,
            owner=self.objects.owner,
            environment=read_inherited_variables(),
            secrets=list_inherited_secrets(),
            patch=self._patch,
        )
        try:
            await self._call_in_thread(self.api.call, "POST", self.api.path("pods"), pod)
        except KubernetesError as error:
            self._requested_pods.discard(name)
            self.view.add_verdict(judge_refusal(error, f"pod {name}"))
            return None
        return name

    async def _wait_until_running(
        self, name: str, timeout: float, is_hopeless: Callable[[Pod], bool] = lambda pod: False
    ) -> Pod | None:
        """Return a pod once its container runs, None if the pod ends first, is hopeless or does not start in time."""
        deadline = time.monotonic() + timeout
        was_seen = False  # The watch may report the pod after the answer to its creation.
        while time.monotonic() < deadline:
            pod = self.view.find_pod(name)
            if pod is None and was_seen:
                return None
            if pod is not None:
                was_seen = True
                if pod.has_final_phase or pod.deletion_seen or is_hopeless(pod):
                    return None
                if pod.is_running:
                    return pod
            await asyncio.sleep(POLL_INTERVAL)
        return None

    async def _remove_pods(self, node: str, timeout: float) -> None:
        """Delete a node's pods, by force if they do not end. The latter stay in `Table.vanished_pods`."""
        for pod in self.view.table.list_pods(node):
            await self._delete_pod(pod.name, POD_GRACE)
        deadline = time.monotonic() + timeout
        while self.view.table.list_pods(node) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_INTERVAL)
        for pod in self.view.table.list_pods(node):
            self._report("driver", f"pod {pod.name} on {pod.machine} does not end: it is deleted by force")
            await self._delete_pod(pod.name, 0)

    async def _delete_pod(self, name: str, grace: int) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": grace}
        await self._try_call(self.api.call, "DELETE", self.api.path("pods", name), body)

    async def _write_blocked(self) -> None:
        while await self._try_call(self.objects.write_blocked, self.objects.blocked) is _FAILED:
            await asyncio.sleep(5.0)

    # threads ----------------------------------------------------------------------------------------------------------

    async def _call_in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments))

    async def _try_call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function` in a thread. Return its result, None for a missing object (404), _FAILED for other errors."""
        try:
            return await self._call_in_thread(function, *arguments)
        except KubernetesError as error:
            return None if error.status == 404 else _FAILED
        except RuntimeError:  # the thread pool is shut down
            return _FAILED

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        log_failure(task, f"the cluster's task {getattr(work, '__qualname__', work)}", log)


def find_own_address(api: KubernetesApi) -> str:
    """Return the address at which pods reach this driver: that of its pod, else that of the route to the API server."""
    address = os.environ.get("MEGASCALE_POD_ADDRESS")
    if address:
        return address
    try:
        return find_local_address(api.host)
    except OSError:
        return "0.0.0.0"


CLUSTERS.register("kubernetes", KubernetesCluster)
