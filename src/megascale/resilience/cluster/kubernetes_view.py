"""The driver's view of a Kubernetes cluster: watches in threads, the table that they keep, and the verdicts on it."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from megascale.config import Config
from megascale.resilience.cluster import kubernetes_verdicts as verdicts
from megascale.resilience.cluster.base import NodeInfo
from megascale.resilience.cluster.kubernetes_api import KubernetesApi, KubernetesError
from megascale.resilience.cluster.kubernetes_pod import JOB, ROLE
from megascale.resilience.cluster.kubernetes_table import Pod, Table
from megascale.resilience.cluster.kubernetes_watch import Change, Watch
from megascale.resilience.rules.view import Verdict

STUCK = 5.0  # seconds beyond its grace after which a pod that is deleted counts as stuck


class ClusterView:
    """Args:
    api: the server.
    config: of the job.
    gpus: that each of its pods takes.
    blocked: machines that the job must not get.

    Attributes:
        table: what there is.
        known: nodes that there are or were -> their machines.
    """

    def __init__(self, api: KubernetesApi, config: Config, gpus: int, blocked: dict[str, str]) -> None:
        self._blocked = blocked
        self._resource, self._label = config.kubernetes.gpu_resource, config.kubernetes.switch_label
        self._gpus = gpus > 0 or any(each.startswith(f"{self._resource}=") for each in config.kubernetes.resources)
        self.table = Table(self._resource)
        self.known: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reports: list[Verdict] = []
        self._told: set[tuple[str, str]] = set()
        pods = {"labelSelector": f"{JOB}={config.train.name},{ROLE}=agent"}
        self.pods = Watch(api, api.path("pods"), partial(self._changed, True), **pods)
        self.machines = Watch(api, "/api/v1/nodes", partial(self._changed, False))

    def look(self) -> bool:
        """List everything, before the watches begin; False where machines may not be seen. Raises KubernetesError."""
        self.table.all_pods(self.pods.list())
        self._remember()
        try:
            self.table.all_machines(self.machines.list())
        except KubernetesError as error:
            if error.status != 403:
                raise
            return False
        return True

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follow from now on."""
        self._loop = loop
        for watch in (self.pods, self.machines):
            watch.start()

    def stop(self) -> None:
        """Follow no longer."""
        for watch in (self.pods, self.machines):
            watch.stop()

    def kick(self) -> None:
        """The server answers again."""
        for watch in (self.pods, self.machines):
            watch.kick()

    # what the driver asks ---------------------------------------------------------------------------------------------

    def pod(self, name: str) -> Pod | None:
        """A pod by its own name."""
        return self.table.pods.get(self.table.named.get(name, ""))

    def machine_of(self, node: str) -> str:
        """Where a node of the job is or was."""
        return self.known.get(node, node)

    def taken(self) -> frozenset[str]:
        """Nodes whose pods should have ended and do not: what runs there is told to end, and replaced."""
        return frozenset(each.node for each in self.table.stuck(STUCK))

    def switch(self, node: str) -> str:
        """What its machine's label says."""
        machine = self.table.machines.get(self.machine_of(node))
        return machine.labels.get(self._label, "") if machine is not None and self._label else ""

    def drained(self) -> dict[str, str]:
        """Nodes on machines that are cordoned or drained."""
        machines = self.table.machines
        found = {node: machines[where].drained for node, where in self.known.items() if where in machines}
        return {node: why for node, why in found.items() if why}

    def ending(self) -> frozenset[str]:
        """Nodes whose pods are all being deleted, have ended, or were removed while what they ran may run on."""
        pods = self.table.pods.values()
        living = {each.node for each in pods if not (each.over or each.ended or each.deleting)}
        return frozenset({each.node for each in (*pods, *self.table.unproven.values()) if each.node} - living)

    def reports(self) -> list[Verdict]:
        """Verdicts since the last call."""
        found, self._reports = self._reports, []
        return found

    def report(self, verdict: Verdict, about: str = "") -> None:
        """Have the driver told; what is about one pod or machine once."""
        if about:
            if (verdict.kind, about) in self._told:
                return
            self._told.add((verdict.kind, about))
        self._reports.append(verdict)

    def infos(self) -> list[NodeInfo]:
        """All nodes that there are or were."""
        pods = self.table.by_node()
        return [self._info(node, pods.get(node, [])) for node in sorted(self.known)]

    def info(self, node: str) -> NodeInfo:
        """A node of the job now."""
        return self._info(node, [each for each in self.table.pods.values() if each.node == node])

    def _info(self, node: str, mine: list[Pod]) -> NodeInfo:
        where = self.machine_of(node)
        living = [each for each in mine if not (each.over or each.ended or each.deleting)]
        machine = self.table.machines.get(where)
        usable = bool(machine.ready and not machine.drained) if machine is not None else not self.table.machines
        last = max(mine, key=lambda each: each.created, default=None)
        why = machine.why if machine is not None and machine.why else last.why if last is not None else ""
        address = living[0].address if living else ""
        return NodeInfo(node, address, usable and where not in self._blocked, bool(living), why)

    # what the watches bring -------------------------------------------------------------------------------------------

    def _changed(self, pods: bool, change: Change) -> None:
        """In a watch's thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.take, pods, change)

    def take(self, pods: bool, change: Change) -> None:
        """Something is there, has changed or is gone."""
        kind, things = change
        table = self.table
        if kind == "all":
            (table.all_pods if pods else table.all_machines)(things)
        for thing in things if kind != "all" else ():
            if kind == "gone":
                (table.pod_gone if pods else table.machine_gone)(thing)
            elif pods:
                self._judge(table.pod_changed(thing))
            else:
                table.machine_changed(thing)
                self._judge_machine(thing["metadata"]["name"])
        self._remember()
        if kind == "all":
            self.judge()

    def _remember(self) -> None:
        self.known |= {each.node: each.machine for each in self.table.pods.values() if each.node}

    def judge(self) -> None:
        """Verdicts on all that is there now."""
        for each in list(self.table.pods.values()):
            self._judge(each)
        for name in list(self.table.machines) if self._gpus else ():
            self._judge_machine(name)

    def _judge(self, pod: Pod) -> None:
        waited = time.monotonic() - pod.created
        found = verdicts.of_end(pod) if pod.over or pod.ended else verdicts.of_waiting(pod, waited)
        if found is not None:
            self.report(found, pod.uid)

    def _judge_machine(self, name: str) -> None:
        machine = self.table.machines[name]
        running = (each for each in self.table.pods.values() if each.machine == name and each.running)
        nodes = tuple(each.node for each in running) if self._gpus else ()
        needed = machine.capacity.get(self._resource, 0)
        if found := verdicts.of_devices(machine, nodes, self._resource, needed):
            self.report(found, f"{name} {machine.devices[self._resource]}")
