"""What a Kubernetes cluster has of a job, its pods and the machines: kept from what the watches bring, without I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megascale.resilience.cluster.kubernetes_api import Json

SLOT = "megascale.dev/slot"  # label: which of several pods of a job on one machine; absent where there is one
PULLS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"})
BROKEN = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"  # taint by which a person says that a machine is off
_HOUSEKEEPING = 15.0  # seconds in which a kubelet that reaches the server ends what was force-deleted, beyond the grace


@dataclass
class Pod:
    """A pod of the job.

    Attributes:
        node: its node's name in the job, "" until it has a machine.
        running: its container runs; ended: it has ended for certain, or never will run.
        over: its phase says that it has ended, which may be said from afar.
        waiting: (reason, message) of a container that cannot be started, or of no machine that takes it.
        grace: seconds that it gets to end, once it is deleted.
        deleting: when it was seen to be deleted, on the monotonic clock, 0: it is not.
        silent: whether its agent has said that it ends and that its ranks have ended.
        absent: when it was gone from the server without having been seen to end, 0: it is there.
    """

    name: str
    uid: str
    machine: str = ""
    node: str = ""
    address: str = ""
    running: bool = False
    ended: bool = False
    over: bool = False
    why: str = ""
    waiting: tuple[str, str] = ("", "")
    deleting: float = 0.0
    grace: float = 30.0
    silent: bool = False
    absent: float = 0.0
    driver: tuple[str, str] = ("", "")
    created: float = field(default_factory=time.monotonic)


@dataclass
class Machine:
    """A node of the cluster. ready: since when on the monotonic clock, 0: it is not; why: it takes nothing new, or is
    not ready; devices: name -> how many are left; taken: out of service by a person's word."""

    name: str
    ready: float = 0.0
    why: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    devices: dict[str, int] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)
    drained: str = ""
    off: bool = False


class Table:
    """Args:
    resource: name of the devices that machines count.
    clock: seconds, monotonic.

    Attributes:
        pods: by uid, those that are there. named: uid of each by name.
        unproven: by uid, those that were removed without having been seen to end: what they ran may run on.
        machines: by name; empty where the driver may not see them.
    """

    def __init__(self, resource: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._resource, self._clock = resource, clock
        self.pods: dict[str, Pod] = {}
        self.named: dict[str, str] = {}
        self.unproven: dict[str, Pod] = {}
        self.machines: dict[str, Machine] = {}

    # pods -------------------------------------------------------------------------------------------------------------

    def all_pods(self, objects: Iterable[Json]) -> None:
        """Exactly these are there now."""
        found = list(objects)
        there = {each["metadata"]["uid"] for each in found}
        for pod in [pod for uid, pod in self.pods.items() if uid not in there]:
            self._removed(pod)
        for each in found:
            self.pod_changed(each)

    def pod_changed(self, thing: Json) -> Pod:
        """A pod is there, or another than it was."""
        about = thing["metadata"]
        pod = self.pods.get(about["uid"])
        if pod is None:
            pod = self.pods[about["uid"]] = Pod(about["name"], about["uid"], created=self._clock())
            self.named[pod.name] = pod.uid
        _read(pod, thing)
        if about.get("deletionTimestamp") and not pod.deleting:
            pod.deleting = self._clock()
        if pod.deleting and about.get("deletionGracePeriodSeconds") is not None:
            pod.grace = float(about["deletionGracePeriodSeconds"])
        return pod

    def pod_gone(self, thing: Json) -> None:
        """A pod is not there any more; its last state says whether it had ended."""
        self._removed(self.pod_changed(thing))

    def _removed(self, pod: Pod) -> None:
        self.pods.pop(pod.uid, None)
        self.named.pop(pod.name, None)
        if pod.machine and not (pod.ended or pod.silent):
            pod.absent = self._clock()
            self.unproven[pod.uid] = pod

    def of(self, node: str) -> list[Pod]:
        """Pods of a node of the job that have not ended."""
        return [pod for pod in self.pods.values() if pod.node == node and not pod.ended]

    def by_node(self) -> dict[str, list[Pod]]:
        """Pods of each node, those that have ended too."""
        found: dict[str, list[Pod]] = {}
        for pod in self.pods.values():
            found.setdefault(pod.node, []).append(pod)
        return found

    def stuck(self, beyond: float) -> list[Pod]:
        """Pods on machines that are being deleted and should have ended `beyond` seconds ago."""
        now = self._clock()
        late = (pod for pod in self.pods.values() if pod.deleting and now > pod.deleting + pod.grace + beyond)
        return [pod for pod in late if pod.machine and not pod.ended]

    def certain(self, node: str, grace: float) -> bool:
        """Whether nothing that the job had on a node can run any more: as its kubelet has said, or must have done.

        grace: seconds that pods get to end.
        """
        if self.of(node):
            return False
        for pod in [pod for pod in self.unproven.values() if pod.node == node]:
            machine = self.machines.get(pod.machine)
            since = max(pod.absent, machine.ready if machine and machine.ready else float("inf"))
            if (machine is not None and machine.off) or self._clock() - since > grace + _HOUSEKEEPING:
                del self.unproven[pod.uid]
            else:
                return False
        return True

    def over(self, node: str) -> None:
        """Its agent has said that it ends, and that its ranks have ended: no word of its kubelet is needed."""
        self.unproven = {uid: pod for uid, pod in self.unproven.items() if pod.node != node}
        for pod in self.pods.values():
            pod.silent = pod.silent or (pod.node == node and (pod.over or pod.deleting > 0))

    # machines ---------------------------------------------------------------------------------------------------------

    def all_machines(self, objects: Iterable[Json]) -> None:
        """Exactly these are there now."""
        found = list(objects)
        names = {each["metadata"]["name"] for each in found}
        self.machines = {name: machine for name, machine in self.machines.items() if name in names}
        for each in found:
            self.machine_changed(each)

    def machine_changed(self, thing: Json) -> None:
        """A machine is there, or another than it was."""
        about, spec, status = thing["metadata"], thing.get("spec") or {}, thing.get("status") or {}
        machine = self.machines.setdefault(about["name"], Machine(about["name"]))
        conditions = {each["type"]: each for each in status.get("conditions") or ()}
        ready = conditions.get("Ready") or {}
        if ready.get("status") == "True":
            machine.ready = machine.ready or self._clock()
        else:
            machine.ready = 0.0
        machine.labels = about.get("labels") or {}
        taints = spec.get("taints") or ()
        machine.off = any(taint.get("key") == OUT_OF_SERVICE for taint in taints)
        machine.drained = "it is unschedulable (cordoned or drained)" if spec.get("unschedulable") else ""
        machine.why = (
            "" if machine.ready else f"machine {machine.name} is not ready: {ready.get('message') or 'unknown'}"
        )
        machine.devices = _counts(status.get("allocatable"), self._resource)
        machine.capacity = _counts(status.get("capacity"), self._resource)

    def machine_gone(self, thing: Json) -> None:
        """A machine was taken out of the cluster; what ran there may run on."""
        self.machines.pop(thing["metadata"]["name"], None)


def _counts(values: Json | None, resource: str) -> dict[str, int]:
    text = str((values or {}).get(resource, ""))
    return {resource: int(text)} if text.isdigit() else {}


def _read(pod: Pod, thing: Json) -> None:
    """Take over what an object says of a pod."""
    about, spec, status = thing["metadata"], thing.get("spec") or {}, thing.get("status") or {}
    pod.machine = spec.get("nodeName") or ""
    slot = (about.get("labels") or {}).get(SLOT)
    pod.node = (f"{pod.machine}.{slot}" if slot else pod.machine) if pod.machine else ""
    pod.address = status.get("podIP") or pod.address
    notes = about.get("annotations") or {}
    pod.driver = (notes.get("megascale.dev/driver", ""), notes.get("megascale.dev/epoch", ""))
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    pod.running = bool(states) and any("running" in state for state in states)
    # A pod that is marked as failed from afar (its kubelet is silent) has no ended container.
    statuses = status.get("containerStatuses") or ()
    once = spec.get("restartPolicy") == "Never"
    pod.ended = bool(states) and all(_over(each, once) for each in statuses)
    pod.over = status.get("phase") in ("Failed", "Succeeded")
    pod.ended = pod.ended or (pod.over and not states and (not status.get("startTime") or _rejected(status)))
    pod.why, pod.waiting = _why(status, states), _waiting(status, states)


def _over(container: Json, once: bool) -> bool:
    """Whether a container has ended for good. A kubelet that finds it gone before it has told how it ended calls it
    `waiting` with a last state; once: it is never started again."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    return "terminated" in state or (once and "waiting" in state and "terminated" in last)


def _rejected(status: Json) -> bool:
    """Whether a kubelet refused the pod, before anything of it ran."""
    return str(status.get("reason", "")).startswith(("OutOf", "NodeAffinity", "Unexpected", "Admission", "Topology"))


def _why(status: Json, states: list[Json]) -> str:
    if status.get("phase") == "Failed" and status.get("reason"):
        return f"{status['reason']}: {status.get('message') or 'no more is said'}"
    for state in states:
        if ended := state.get("terminated"):
            signal = f", signal {ended['signal']}" if ended.get("signal") else ""
            return f"{ended.get('reason') or 'ended'} with exit code {ended.get('exitCode')}{signal}"
    return ""


def _waiting(status: Json, states: list[Json]) -> tuple[str, str]:
    for state in states:
        reason = (state.get("waiting") or {}).get("reason", "")
        if reason in PULLS | BROKEN:
            return reason, str(state["waiting"].get("message") or reason)
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason") or "Unschedulable"), str(condition.get("message") or "")
    return "", ""
