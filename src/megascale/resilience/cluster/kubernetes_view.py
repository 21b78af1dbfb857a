"""The driver's view of a Kubernetes cluster: watches in threads, the table of pods and machines, and verdicts.

A verdict describes a refusal (quota, admission, image, no machine) or a failure that the cluster reports.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial

from megascale.config import Config
from megascale.core.events import Event
from megascale.resilience.cluster.base import NodeInfo
from megascale.resilience.cluster.kubernetes_api import Change, Json, KubernetesApi, KubernetesError, Watch
from megascale.resilience.cluster.kubernetes_objects import JOB_LABEL, ROLE_LABEL
from megascale.resilience.cluster.kubernetes_table import CONTAINER_FAILURES, PULL_FAILURES, Machine, Pod, Table
from megascale.resilience.rules.view import Verdict

STUCK_SECONDS = 5.0  # seconds beyond the grace period after which a deleted pod counts as stuck
SCHEDULE_SECONDS = 2.0  # seconds within which the scheduler must place a pod, or the pod counts as unschedulable
_QUOTA = re.compile(r"exceeded quota|forbidden: maximum|quota", re.IGNORECASE)
# Prefixes of the reasons for which the cluster refuses or ends a pod.
_CLUSTER_ENDS = ("Evicted", "OutOf", "Unexpected", "Admission", "NodeAffinity", "Preempting", "Topology")


class ClusterView:
    """The state of the cluster.

    Args:
        config: configuration of the job.
        gpus: number of GPUs per pod.
        blocked: reasons by the names of machines that the job must not get.

    Attributes:
        table: pods and machines.
        machine_names: name of the machine of each node of the job, including earlier nodes.
    """

    def __init__(self, api: KubernetesApi, config: Config, gpus: int, blocked: dict[str, str]) -> None:
        settings = config.kubernetes
        self._blocked = blocked
        self._resource = settings.gpu_resource
        self._switch_label = settings.switch_label
        self._has_gpus = gpus > 0 or any(text.startswith(f"{self._resource}=") for text in settings.resources)
        self.table = Table(self._resource)
        self.machine_names: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._verdicts: list[Verdict] = []
        self._reported: set[tuple[str, str]] = set()  # (kind, subject) of verdicts that are reported once
        selector = f"{JOB_LABEL}={config.train.name},{ROLE_LABEL}=agent"
        self.pod_watch = Watch(api, api.path("pods"), partial(self._receive, of_pods=True), labelSelector=selector)
        self.machine_watch = Watch(api, "/api/v1/nodes", partial(self._receive, of_pods=False))
        self._watches = (self.pod_watch, self.machine_watch)

    def list_objects(self) -> bool:
        """List all pods and machines before the watches start; return False if machines are not visible.

        Raises KubernetesError.
        """
        self.table.set_pods(self.pod_watch.list_objects())
        self._record_machine_names()
        try:
            self.table.set_machines(self.machine_watch.list_objects())
        except KubernetesError as error:
            if error.status != 403:  # 403: the driver has no right to list machines
                raise
            return False
        return True

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follow the cluster from now on."""
        self._loop = loop
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        for watch in self._watches:
            watch.stop()

    def retry_now(self) -> None:
        """Open broken watches at once, since the server answers."""
        for watch in self._watches:
            watch.retry_now()

    # queries ----------------------------------------------------------------------------------------------------------

    def find_pod(self, name: str) -> Pod | None:
        return self.table.pods.get(self.table.uids.get(name, ""))

    def get_machine_name(self, node: str) -> str:
        """Return the name of the machine of a node of the job."""
        return self.machine_names.get(node, node)

    def list_removed_nodes(self) -> frozenset[str]:
        """Return the nodes whose deleted pods do not end. The driver ends and replaces their agents."""
        return frozenset(pod.node for pod in self.table.list_stuck_pods(STUCK_SECONDS))

    def find_switch(self, node: str) -> str:
        """Return the switch in the label of a node's machine, "" if unknown."""
        machine = self.table.machines.get(self.get_machine_name(node))
        if machine is None or not self._switch_label:
            return ""
        return machine.labels.get(self._switch_label, "")

    def list_drain_reasons(self) -> dict[str, str]:
        """Return the reason for each node on a machine that is cordoned or drained."""
        drained = {}
        for node, name in self.machine_names.items():
            machine = self.table.machines.get(name)
            if machine is not None and machine.drain_reason:
                drained[node] = machine.drain_reason
        return drained

    def list_ending_nodes(self) -> frozenset[str]:
        """Return the nodes whose pods are all ending, or have disappeared while their processes may still run."""
        pods = list(self.table.pods.values()) + list(self.table.vanished_pods.values())
        living = {pod.node for pod in self.table.pods.values() if pod.is_living}
        return frozenset({pod.node for pod in pods if pod.node} - living)

    def take_verdicts(self) -> list[Verdict]:
        """Return the verdicts since the last call."""
        verdicts = self._verdicts
        self._verdicts = []
        return verdicts

    def add_verdict(self, verdict: Verdict, subject: str = "") -> None:
        """Add a verdict. Verdicts of one kind on one subject (a pod or machine) are reported once."""
        if subject:
            if (verdict.kind, subject) in self._reported:
                return
            self._reported.add((verdict.kind, subject))
        self._verdicts.append(verdict)

    def list_nodes(self) -> list[NodeInfo]:
        """Return all nodes of the job, including earlier nodes."""
        groups = self.table.group_pods()
        return [self._describe(node, groups.get(node, [])) for node in sorted(self.machine_names)]

    def describe_node(self, node: str) -> NodeInfo:
        """Return the current state of a node of the job."""
        return self._describe(node, [pod for pod in self.table.pods.values() if pod.node == node])

    def _describe(self, node: str, pods: list[Pod]) -> NodeInfo:
        """Return the state of a node from its machine and its pods."""
        name = self.get_machine_name(node)
        machine = self.table.machines.get(name)
        living = [pod for pod in pods if pod.is_living]
        if machine is None:
            is_usable = not self.table.machines  # True if machines are not visible
        else:
            is_usable = bool(machine.ready_since and not machine.drain_reason)
        address = ""
        reason = ""
        if living:
            address = living[0].address
        if machine is not None and machine.problem:
            reason = machine.problem
        elif pods:
            reason = max(pods, key=lambda pod: pod.created).problem
        return NodeInfo(
            node,
            address,
            can_start_agent=is_usable and name not in self._blocked,
            has_agent=bool(living),
            reason=reason,
        )

    # changes ----------------------------------------------------------------------------------------------------------

    def _receive(self, change: Change, *, of_pods: bool) -> None:
        """Pass a change from a watch's thread to the loop."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(partial(self.apply, change, of_pods=of_pods))

    def apply(self, change: Change, *, of_pods: bool) -> None:
        """Update the table by a change of pods or machines, and judge the changed objects."""
        kind, objects = change
        if of_pods:
            self._apply_pods(kind, objects)
        else:
            self._apply_machines(kind, objects)
        self._record_machine_names()
        if kind == "all":
            self.judge()

    def _apply_pods(self, kind: str, objects: list[Json]) -> None:
        """Update the table by a change of pods, and judge changed pods. `apply` judges a complete list."""
        if kind == "all":
            self.table.set_pods(objects)
            return
        for obj in objects:
            if kind == "deleted":
                self.table.remove_pod(obj)
            else:
                self._judge_pod(self.table.update_pod(obj))

    def _apply_machines(self, kind: str, objects: list[Json]) -> None:
        """Update the table by a change of machines, and judge changed machines."""
        if kind == "all":
            self.table.set_machines(objects)
            return
        for obj in objects:
            if kind == "deleted":
                self.table.remove_machine(obj)
            else:
                self._judge_machine(self.table.update_machine(obj))

    def _record_machine_names(self) -> None:
        self.machine_names |= {pod.node: pod.machine for pod in self.table.pods.values() if pod.node}

    def judge(self) -> None:
        """Add verdicts on all pods and machines."""
        for pod in list(self.table.pods.values()):
            self._judge_pod(pod)
        for machine in list(self.table.machines.values()):
            self._judge_machine(machine)

    def _judge_pod(self, pod: Pod) -> None:
        """Add a verdict on a pod that the cluster ended or that cannot start."""
        if pod.has_final_phase or pod.has_ended:
            verdict = judge_end(pod)
        else:
            verdict = judge_obstacle(pod, time.monotonic() - pod.created)
        if verdict is not None:
            self.add_verdict(verdict, pod.uid)

    def _judge_machine(self, machine: Machine) -> None:
        """Add a verdict if a machine with running pods reports unhealthy devices, once per number of devices."""
        if not self._has_gpus:
            return
        pods = [pod for pod in self.table.pods.values() if pod.machine == machine.name and pod.is_running]
        nodes = tuple(pod.node for pod in pods)
        verdict = judge_devices(machine, nodes, self._resource, machine.capacity or 0)
        if verdict is not None:
            self.add_verdict(verdict, f"{machine.name} {machine.devices}")


def judge_refusal(error: KubernetesError, subject: str) -> Verdict:
    """Return the verdict on a request for a pod that the server refused or did not receive."""
    if not error.status or error.status >= 500:
        # A request fails with status 500 if a webhook is unreachable.
        if "webhook" in str(error):
            kind = Event.ADMISSION_DENIED
        else:
            kind = Event.CLUSTER_UNREACHABLE
        return Verdict(kind, action="alert", evidence=(f"{subject}: {error}",))
    if error.status == 403 and _QUOTA.search(str(error)):
        text = f"{subject} was refused, the namespace's quota is reached: {error}; raise it, or delete pods that use it"
        return Verdict(Event.QUOTA_REACHED, action="alert", evidence=(text,), needs_person=True)
    is_denied_by_webhook = "admission" in str(error) or "denied the request" in str(error)
    if error.status in (401, 403) and not is_denied_by_webhook:
        text = f"{subject} was refused, the driver lacks the right: {error}; give it the Role of deploy/kubernetes"
    else:
        text = f"{subject} was refused by the server's admission: {error}"
    return Verdict(Event.ADMISSION_DENIED, action="alert", evidence=(text,), needs_person=True)


def judge_obstacle(pod: Pod, seconds: float) -> Verdict | None:
    """Return the verdict on a pod `seconds` after it was first seen, None if the pod may still start."""
    reason, message = pod.obstacle
    if reason in PULL_FAILURES:
        text = (
            f"{pod.name} on {pod.machine}: the image cannot be pulled ({reason}): {message}; check kubernetes.image, "
            "kubernetes.pull_secrets and the registry"
        )
        return Verdict(Event.IMAGE_PULL_FAILED, (pod.node,), action="alert", evidence=(text,), needs_person=True)
    if reason in CONTAINER_FAILURES:
        text = f"{pod.name} on {pod.machine}: its container cannot be created ({reason}): {message}"
        return Verdict(Event.POD_FAILED, (pod.node,), action="alert", evidence=(text,), needs_person=True)
    if reason and seconds > SCHEDULE_SECONDS:
        text = f"no machine can run {pod.name} ({reason}): {message}"
        return Verdict(Event.UNSCHEDULABLE, action="alert", evidence=(text,))
    return None


def judge_end(pod: Pod) -> Verdict | None:
    """Return the verdict on a pod that the cluster refused or ended, None for an ordinary end."""
    nodes = (pod.node,) if pod.node else ()
    if pod.problem.startswith(_CLUSTER_ENDS):
        text = f"{pod.name} on {pod.machine} was ended by the cluster: {pod.problem}"
        return Verdict(Event.POD_FAILED, nodes, action="none", evidence=(text,))
    if pod.problem.startswith("OOMKilled"):
        text = (
            f"{pod.name} on {pod.machine} was ended for lack of memory: {pod.problem}; raise memory in "
            "kubernetes.resources"
        )
        return Verdict(Event.OUT_OF_MEMORY, nodes, action="none", evidence=(text,))
    return None


def judge_devices(machine: Machine, nodes: tuple[str, ...], resource: str, needed: int) -> Verdict | None:
    """Return the verdict on a machine with fewer than `needed` healthy devices, None if it has enough.

    nodes: nodes of the job on the machine.
    """
    if machine.devices is None or not nodes or machine.devices >= needed:
        return None
    count = needed if machine.capacity is None else machine.capacity
    unhealthy = max(0, count - machine.devices)
    text = f"the device plugin of {machine.name} reports {unhealthy} of {count} {resource} as unhealthy"
    return Verdict(Event.DEVICE_FAULT, nodes, action="evict", evidence=(text,))
