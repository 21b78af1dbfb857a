"""The state of a job's pods and of the machines in a Kubernetes cluster, which watched objects update without I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megascale.resilience.cluster.kubernetes_api import Json

SLOT_LABEL = "megascale.dev/slot"  # label that distinguishes several pods of a job on one machine
PULL_FAILURES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
CONTAINER_FAILURES = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"  # taint by which a person states that a machine is off
# Prefixes of the reasons for which a kubelet refuses a pod before the pod runs.
_REJECTIONS = ("OutOf", "NodeAffinity", "Unexpected", "Admission", "Topology")
# Seconds beyond the grace period in which a connected kubelet ends the processes of a pod that was deleted by force.
_KUBELET_SECONDS = 15.0


class Obstacle(NamedTuple):
    """Reason and message why a container or a pod cannot start, both empty if it can."""

    reason: str = ""
    message: str = ""


NO_OBSTACLE = Obstacle()


@dataclass
class Pod:
    """A pod of the job.

    Attributes:
        machine: name of its machine, "" before the pod is scheduled.
        node: name of its node in the job, "" before the pod is scheduled.
        is_running: its container runs.
        has_ended: its container must have ended, or will never run.
        has_final_phase: its phase is final. Pods of a silent kubelet get such a phase although they may still run.
        problem: description of its end.
        obstacle: the reason why it cannot start.
        deletion_seen: when its deletion was seen, on the monotonic clock; 0 if it is not deleted.
        grace: seconds in which it must end after its deletion.
        has_agent_ended: its agent reported the end of itself and of its ranks.
        absent_since: when the object disappeared without an observed end, on the monotonic clock; 0 while it exists.
        driver: (address, epoch) of the driver in its annotations.
        created: when it was first seen, on the monotonic clock.
    """

    name: str
    uid: str
    machine: str = ""
    node: str = ""
    address: str = ""
    is_running: bool = False
    has_ended: bool = False
    has_final_phase: bool = False
    problem: str = ""
    obstacle: Obstacle = NO_OBSTACLE
    deletion_seen: float = 0.0
    grace: float = 30.0
    has_agent_ended: bool = False
    absent_since: float = 0.0
    driver: tuple[str, str] = ("", "")
    created: float = field(default_factory=time.monotonic)

    @property
    def is_living(self) -> bool:
        """True unless the pod has ended, its phase is final or it is being deleted."""
        return not (self.has_final_phase or self.has_ended or self.deletion_seen)

    def update(self, obj: Json, current_time: float) -> None:
        """Read a pod object that was received at `current_time` on the monotonic clock."""
        metadata = obj["metadata"]
        spec = obj.get("spec") or {}
        status = obj.get("status") or {}
        slot = (metadata.get("labels") or {}).get(SLOT_LABEL)
        self.machine = spec.get("nodeName") or ""
        self.node = self.machine
        if self.machine and slot:
            self.node += f".{slot}"
        self.address = status.get("podIP") or self.address
        annotations = metadata.get("annotations") or {}
        self.driver = (annotations.get("megascale.dev/driver", ""), annotations.get("megascale.dev/epoch", ""))
        containers = status.get("containerStatuses") or []
        # A container's state has one key: "waiting", "running" or "terminated".
        states = [container.get("state") or {} for container in containers]
        runs_once = spec.get("restartPolicy") == "Never"
        self.is_running = any("running" in state for state in states)
        self.has_final_phase = status.get("phase") in ("Failed", "Succeeded")
        if containers:
            # A pod is marked as failed if its kubelet is silent, but its containers may still run.
            self.has_ended = all(_has_ended(container, runs_once) for container in containers)
        else:
            # A failed pod without containers never ran if no kubelet has started or accepted it.
            was_rejected = str(status.get("reason", "")).startswith(_REJECTIONS)
            self.has_ended = self.has_final_phase and (not status.get("startTime") or was_rejected)
        self.problem = _describe_end(status, states)
        self.obstacle = _find_obstacle(status, states)
        if metadata.get("deletionTimestamp") and not self.deletion_seen:
            self.deletion_seen = current_time
        if self.deletion_seen and metadata.get("deletionGracePeriodSeconds") is not None:
            self.grace = float(metadata["deletionGracePeriodSeconds"])


@dataclass
class Machine:
    """A node of the Kubernetes cluster.

    Attributes:
        ready_since: when it became ready, on the monotonic clock; 0 if it is not ready.
        problem: why it is not ready.
        devices, capacity: number of allocatable and of all devices, None if the machine reports none.
        drain_reason: why it receives no new pods, "" if it receives pods.
        is_off: a person has stated that the machine is off.
    """

    name: str
    ready_since: float = 0.0
    problem: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    devices: int | None = None
    capacity: int | None = None
    drain_reason: str = ""
    is_off: bool = False

    def update(self, obj: Json, resource: str, current_time: float) -> None:
        """Read a node object that was received at `current_time`."""
        spec = obj.get("spec") or {}
        status = obj.get("status") or {}
        conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
        ready = conditions.get("Ready") or {}
        if ready.get("status") == "True":
            self.ready_since = self.ready_since or current_time
            self.problem = ""
        else:
            self.ready_since = 0.0
            self.problem = f"machine {self.name} is not ready: {ready.get('message') or 'unknown'}"
        self.labels = obj["metadata"].get("labels") or {}
        self.is_off = any(taint.get("key") == OUT_OF_SERVICE for taint in spec.get("taints") or ())
        if spec.get("unschedulable"):
            self.drain_reason = "it is unschedulable (cordoned or drained)"
        else:
            self.drain_reason = ""
        self.devices = _parse_count(status.get("allocatable"), resource)
        self.capacity = _parse_count(status.get("capacity"), resource)


class Table:
    """The pods of a job and the machines of the cluster.

    Args:
        resource: name of the devices that machines count.
        clock: monotonic clock in seconds.

    Attributes:
        pods: existing pods by uid.
        uids: uid of each pod by name.
        vanished_pods: pods by uid that disappeared without an observed end, so that their processes may still run.
        machines: machines by name, empty if the driver may not list them.
    """

    def __init__(self, resource: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._resource = resource
        self._clock = clock
        self.pods: dict[str, Pod] = {}
        self.uids: dict[str, str] = {}
        self.vanished_pods: dict[str, Pod] = {}
        self.machines: dict[str, Machine] = {}

    # pods -------------------------------------------------------------------------------------------------------------

    def set_pods(self, objects: Sequence[Json]) -> None:
        """Set the complete list of pods."""
        uids = {obj["metadata"]["uid"] for obj in objects}
        for pod in list(self.pods.values()):
            if pod.uid not in uids:
                self._remove(pod)
        for obj in objects:
            self.update_pod(obj)

    def update_pod(self, obj: Json) -> Pod:
        metadata = obj["metadata"]
        current_time = self._clock()
        pod = self.pods.get(metadata["uid"])
        if pod is None:
            pod = Pod(metadata["name"], metadata["uid"], created=current_time)
            self.pods[pod.uid] = pod
            self.uids[pod.name] = pod.uid
        pod.update(obj, current_time)
        return pod

    def remove_pod(self, obj: Json) -> None:
        """Remove a deleted pod. Its last state shows whether its container has ended."""
        self._remove(self.update_pod(obj))

    def _remove(self, pod: Pod) -> None:
        """Remove a pod. If its processes may still run, keep it in `vanished_pods`."""
        self.pods.pop(pod.uid, None)
        self.uids.pop(pod.name, None)
        if pod.machine and not (pod.has_ended or pod.has_agent_ended):
            pod.absent_since = self._clock()
            self.vanished_pods[pod.uid] = pod

    def list_pods(self, node: str) -> list[Pod]:
        """Return the pods of a node of the job that have not ended."""
        return [pod for pod in self.pods.values() if pod.node == node and not pod.has_ended]

    def group_pods(self) -> dict[str, list[Pod]]:
        """Return the pods of each node of the job, including pods that have ended."""
        groups: dict[str, list[Pod]] = {}
        for pod in self.pods.values():
            groups.setdefault(pod.node, []).append(pod)
        return groups

    def list_stuck_pods(self, margin: float) -> list[Pod]:
        """Return the deleted pods that should have ended at least `margin` seconds ago."""
        current_time = self._clock()
        return [
            pod
            for pod in self.pods.values()
            if pod.deletion_seen
            and pod.machine
            and not pod.has_ended
            and current_time > pod.deletion_seen + pod.grace + margin
        ]

    def has_stopped(self, node: str, grace: float) -> bool:
        """Return True if no process of a node of the job can still run, and forget its vanished pods.

        The kubelet has reported the end of the processes, or must have ended them.

        grace: seconds in which pods must end.
        """
        if self.list_pods(node):
            return False
        for pod in [pod for pod in self.vanished_pods.values() if pod.node == node]:
            if not self._must_have_ended(pod, grace):
                return False
            del self.vanished_pods[pod.uid]
        return True

    def _must_have_ended(self, pod: Pod, grace: float) -> bool:
        """Return True if a vanished pod's machine is off, or has been ready for long enough to end the processes."""
        machine = self.machines.get(pod.machine)
        if machine is None:
            return False
        if machine.is_off:
            return True
        if not machine.ready_since:
            return False
        seconds = self._clock() - max(pod.absent_since, machine.ready_since)
        return seconds > grace + _KUBELET_SECONDS

    def record_agent_end(self, node: str) -> None:
        """Record that a node's agent reported the end of itself and its ranks, which the kubelet need not confirm."""
        self.vanished_pods = {uid: pod for uid, pod in self.vanished_pods.items() if pod.node != node}
        for pod in self.pods.values():
            if pod.node == node and (pod.has_final_phase or pod.deletion_seen > 0):
                pod.has_agent_ended = True

    # machines ---------------------------------------------------------------------------------------------------------

    def set_machines(self, objects: Sequence[Json]) -> None:
        """Set the complete list of machines."""
        names = {obj["metadata"]["name"] for obj in objects}
        self.machines = {name: machine for name, machine in self.machines.items() if name in names}
        for obj in objects:
            self.update_machine(obj)

    def update_machine(self, obj: Json) -> Machine:
        name = obj["metadata"]["name"]
        machine = self.machines.setdefault(name, Machine(name))
        machine.update(obj, self._resource, self._clock())
        return machine

    def remove_machine(self, obj: Json) -> None:
        """Remove a machine, whose processes may still run."""
        self.machines.pop(obj["metadata"]["name"], None)


def _parse_count(values: Json | None, resource: str) -> int | None:
    """Return the number of devices in `allocatable` or `capacity` of a machine, None if it has none of them."""
    text = str((values or {}).get(resource, ""))
    return int(text) if text.isdigit() else None


def _has_ended(container: Json, runs_once: bool) -> bool:
    """Return True if a container has ended for good.

    A kubelet that lost a container before it saw the container's end reports `waiting` with a last state. A container
    that runs once is not started again after that.
    """
    state = container.get("state") or {}
    last_state = container.get("lastState") or {}
    return "terminated" in state or (runs_once and "waiting" in state and "terminated" in last_state)


def _describe_end(status: Json, states: list[Json]) -> str:
    """Return how a pod or its container ended, "" before the end."""
    if status.get("phase") == "Failed" and status.get("reason"):
        return f"{status['reason']}: {status.get('message') or 'no message'}"
    for state in states:
        end = state.get("terminated")
        if end:
            text = f"{end.get('reason') or 'ended'} with exit code {end.get('exitCode')}"
            if end.get("signal"):
                text += f", signal {end['signal']}"
            return text
    return ""


def _find_obstacle(status: Json, states: list[Json]) -> Obstacle:
    """Return why a pod or its container cannot start, NO_OBSTACLE if it can."""
    for state in states:
        waiting = state.get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in PULL_FAILURES | CONTAINER_FAILURES:
            return Obstacle(reason, str(waiting.get("message") or reason))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return Obstacle(str(condition.get("reason") or "Unschedulable"), str(condition.get("message") or ""))
    return NO_OBSTACLE
