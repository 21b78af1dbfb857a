"""`--cluster kubernetes`: each node is a pod that this driver makes, one on a machine.

Watches tell of pods and machines, in threads; requests run in threads too: the driver's loop never waits for the API
server, and a server that is away stops no training. A Lease says which driver leads (kubernetes_lease.py).
A node is named as its machine; a pod that is gone is replaced by a new one, on the same machine where the driver wants
that node again. What ran on a machine that nobody reaches counts as ended when its kubelet has said so or the agent's
lease is over, never because an object was removed.
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
from megascale.core.background import keep_running, log_failure
from megascale.core.events import Event
from megascale.core.interfaces import address_towards
from megascale.errors import ConfigError, TrainingError
from megascale.resilience.cluster import kubernetes_verdicts
from megascale.resilience.cluster.base import Cluster, ClusterRequest, NodeInfo
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.kubernetes_api import KubernetesApi, KubernetesError, in_pod
from megascale.resilience.cluster.kubernetes_lease import DriverLease
from megascale.resilience.cluster.kubernetes_objects import JobObjects, controller_of, own_secrets, taken_over
from megascale.resilience.cluster.kubernetes_pod import DRIVER, ENDING, EPOCH, labels, make_pod, object_name, read_patch
from megascale.resilience.cluster.kubernetes_table import Pod
from megascale.resilience.cluster.kubernetes_view import STUCK, ClusterView
from megascale.resilience.cluster.remote import make_marker
from megascale.resilience.protocol.given import JobDescription
from megascale.resilience.rules.view import Verdict

log = logging.getLogger("megascale.driver")

LEASE = 8.0  # seconds: resilience.agent_lease where nobody says otherwise
END = 20.0  # seconds for a pod that was deleted to be gone, after which it is removed by force
GRACE = 5  # seconds that a pod gets whose ranks have ended or must end
START = 60.0  # seconds for a pod on a machine that is known to run
WITHDRAW = 0.8  # share of the Lease after which a driver that cannot renew it gives up
FORCE = 3.0  # seconds after which a pod that is stuck is removed by force, when its agent was told to end
JUDGE = 2.0  # seconds between looks at pods that wait
LOOK = 0.1  # seconds between looks at the table


class KubernetesCluster(Cluster):
    """See base.Cluster.

    Attributes:
        taken: nodes that are not the job's any more. drained: machines that are to get nothing new.
        withdrawn: why this driver may not go on. replaced: which one has replaced it.
        hands_over: SIGTERM to the driver's pod means that another follows.
        at_once: pods that are started at the same time. slow_start: a spare is quicker than a new pod.
        notice_seconds: that it may take to tell a living agent of another driver.
    """

    agent_lease = LEASE
    at_once = 10_000
    slow_start = True
    notice_seconds = 20.0

    def __init__(self, request: ClusterRequest) -> None:
        super().__init__(request)
        self._config = request.config
        self._job, self._name = request.config.train.name, object_name(request.config.train.name)
        self._gpus = gpus_of_a_node(request.config)
        self._patch = read_patch(request.config.kubernetes)
        settings = request.config.kubernetes
        self.api = KubernetesApi(settings)
        self.lease = DriverLease(self.api, self._name, settings.lease_seconds, labels(self._job, "job"))
        self.objects = JobObjects(self.api, self._job)
        self._threads = ThreadPoolExecutor(8, "kubernetes")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._driver: tuple[str, int] | None = None
        self._epoch = 0
        self._barred: frozenset[str] = frozenset()
        self._waiting: set[str] = set()  # pods that were asked for and are no nodes yet
        self._away = 0.0  # since when the server does not answer, on the monotonic clock
        self.withdrawn = self.replaced = ""
        self.hands_over = in_pod()
        if request.config.checkpoint.location is None:
            make_marker(request.run / "checkpoints")
        self.view = ClusterView(self.api, request.config, self._gpus, self.objects.blocked)
        self._begin()

    @classmethod
    def on_other_machines(cls, config: Config) -> tuple[int, str]:
        """ConfigError where something that pods need is not said."""
        object_name(config.train.name)
        if not config.kubernetes.image:
            raise ConfigError("cluster kubernetes needs the image of the nodes: --kubernetes.image=REGISTRY/NAME:TAG")
        return gpus_of_a_node(config), own_address(KubernetesApi(config.kubernetes))

    def _begin(self) -> None:
        """Take the Lease and look at what there is, before the driver's loop begins."""
        try:
            self.lease.take(lambda text: self._say("driver", text))
            above = controller_of(self.api, os.environ.get("MEGASCALE_POD", "")) if self.hands_over else None
            self.objects.prepare(above)
            if not self.view.look():
                self._say("driver", "machines cannot be seen (no ClusterRole for nodes): losses are noticed by silence")
        except KubernetesError as error:
            raise TrainingError(
                f"the Kubernetes API server {self.api.host} refused or did not answer: {error}"
            ) from None

    # Cluster ----------------------------------------------------------------------------------------------------------

    def announce(self, job: JobDescription, token: bytes) -> None:
        self._driver, self._epoch = (self._towards(job.driver[0]), job.driver[1]), job.epoch
        first, self._loop = self._loop is None, asyncio.get_running_loop()
        self._spawn(self._announce(token))
        if first:
            self.view.start(self._loop)
            self._spawn(keep_running(self._judge, "the look at pods", log))
            self._spawn(keep_running(self._hold_lease, "the renewal of the Lease", log))

    def nodes(self) -> list[NodeInfo]:
        return self.view.infos()

    def bar(self, names: frozenset[str]) -> None:
        self._barred = names

    def has_stopped(self, name: str) -> bool:
        return self.view.table.certain(name, self._config.resilience.grace_period + ENDING)

    def note_end(self, name: str) -> None:
        self.view.table.over(name)

    def switch(self, name: str) -> str:
        return self.view.switch(name)

    @property
    def taken(self) -> frozenset[str]:
        """Nodes whose pods are deleted and do not end."""
        return self.view.taken()

    @property
    def drained(self) -> dict[str, str]:
        """Nodes on machines that are cordoned or drained."""
        return self.view.drained()

    @property
    def ending(self) -> frozenset[str]:
        """Nodes whose pod is being deleted, has ended, or was removed while its processes may run on."""
        return self.view.ending()

    def take_verdicts(self) -> list[Verdict]:
        return self.view.reports()

    def block(self, name: str, why: str) -> None:
        self.objects.blocked[self.view.machine_of(name)] = why
        self._spawn(self._keep_blocked())

    def unblock(self, name: str) -> None:
        if self.objects.blocked.pop(self.view.machine_of(name), None) is not None:
            self._spawn(self._keep_blocked())

    async def start_agent(self, name: str) -> bool:
        machine = self.view.machine_of(name)
        if not self.view.info(name).alive:
            return False
        await self._remove(name, END)
        if self.view.table.of(name):
            return False  # the old one does not end, and would have the devices
        slot = name.removeprefix(f"{machine}.") if name != machine else ""
        made = await self._make(slot, machine, self._avoid())
        if made is None:
            return False
        found = await self._runs(made, START)
        self._waiting.discard(made)
        return found is not None

    async def fence(self, name: str) -> bool:
        """True once its kubelet has said that it has ended, or must have ended it."""
        await self._remove(name, END)
        return self.has_stopped(name)

    async def request(self) -> str | None:
        """A node with a pod that runs; None if none comes, for which a report says why."""
        slot = "" if self._config.kubernetes.one_a_node else secrets.token_hex(2)
        deadline = time.monotonic() + (self._config.resilience.replenish_wait or START)
        while True:
            avoid = self._avoid()
            made = await self._make(slot, "", avoid)
            if made is None:
                return None
            found = await self._runs(made, deadline - time.monotonic(), partial(self._outdated, avoid))
            self._waiting.discard(made)
            if found is not None:
                return found.node
            await self._delete(made, 0)
            if time.monotonic() >= deadline or avoid <= self._avoid():
                return None

    async def close(self) -> None:
        """Give up the Lease, and stop watching; pods live on, but for those that no machine has taken yet: at the job's
        end nobody would let them go."""
        waiting = [name for name in self._waiting if (pod := self.view.pod(name)) is None or not pod.machine]
        self.view.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.replaced:
            for name in waiting:
                await self._delete(name, 0)
            await self._ask(self.lease.release)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # the driver's place -----------------------------------------------------------------------------------------------

    def _towards(self, listen: str) -> str:
        if self._config.resilience.advertise:
            return self._config.resilience.advertise
        return listen if listen not in ("0.0.0.0", "::") else own_address(self.api)

    async def _announce(self, token: bytes) -> None:
        """Give agents the secret, and those that run another driver's place this one's."""
        while await self._ask(self.objects.write_secret, token) is _FAILED:
            await asyncio.sleep(1.0)
        assert self._driver is not None
        host, port = self._driver
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        notes = {DRIVER: place, EPOCH: str(self._epoch)}
        for each in [p for p in self.view.table.pods.values() if not p.over and p.driver != (place, str(self._epoch))]:
            path, patch = self.api.path("pods", each.name), {"metadata": {"annotations": notes}}
            self._spawn(self._ask(self.api.call, "PATCH", path, patch))

    async def _hold_lease(self) -> None:
        """Renew the Lease; where that fails for too long, or another holds it, this driver ends."""
        seconds = self._config.kubernetes.lease_seconds
        while not self.replaced:
            await asyncio.sleep(min(5.0, seconds / 6))
            failed = await self._ask(self.lease.renew) is _FAILED
            if self.lease.lost:
                self.replaced = f"Lease {self._name} is held by {self.lease.lost}: that driver has the job now"
            silent = time.monotonic() - self.lease.renewed
            if failed and not self._away:
                self._away = self.lease.renewed
                text = f"the API server does not answer; training goes on, for {WITHDRAW * seconds:.0f} s without it"
                self.view.report(Verdict(Event.CLUSTER_UNREACHABLE, action="alert", evidence=(text,)))
            elif self._away and not failed:
                text = f"the API server answers again, after {time.monotonic() - self._away:.1f} s"
                self.view.report(Verdict(Event.CLUSTER_BACK, evidence=(text,)))
                self._away = 0.0
                self.view.kick()
            if silent > WITHDRAW * seconds and not self.withdrawn:
                self.withdrawn = (
                    f"Lease {self._name} was not renewed for {silent:.0f} s (kubernetes.lease_seconds={seconds:g}), "
                    "another driver may hold it"
                )

    async def _judge(self) -> None:
        """Look again at pods that wait: for some only time shows that something is wrong."""
        while True:
            await asyncio.sleep(JUDGE)
            self.view.judge()
            for each in self.view.table.stuck(STUCK + FORCE):
                text = f"pod {each.name} on {each.machine} was to end {each.grace + STUCK:.0f} s ago: removed by force"
                self.view.report(Verdict(Event.POD_FAILED, (each.node,), evidence=(text,)), f"stuck {each.uid}")
                await self._delete(each.name, 0)

    # pods -------------------------------------------------------------------------------------------------------------

    def _avoid(self) -> frozenset[str]:
        """Machines that get no new pod now: blocked ones, those with a pod, and those where an old one may run on."""
        lost = list(self.view.table.unproven.values())
        unproven = {each.machine for each in lost if not self.has_stopped(each.node)}
        barred = {self.view.machine_of(each) for each in self._barred} if self._config.kubernetes.one_a_node else set()
        return frozenset({*self.objects.blocked, *unproven, *barred} - {""})

    def _outdated(self, avoid: frozenset[str], pod: Pod) -> bool:
        """Whether a pod that no machine takes was made to avoid one that is free by now: its affinity cannot change."""
        return not pod.machine and bool(pod.waiting[0]) and not avoid <= self._avoid()

    async def _make(self, slot: str, machine: str, avoid: frozenset[str]) -> str | None:
        """Ask for a pod, which `_waiting` has from before it can be there; its name, None if that was refused."""
        name = f"{self._job}-{secrets.token_hex(3)}"
        self._waiting.add(name)
        manifest = make_pod(
            self._config,
            name,
            self._gpus,
            slot=slot,
            machine=machine,
            avoid=avoid,
            driver=self._driver,
            epoch=self._epoch,
            owner=self.objects.owner,
            environment=taken_over(),
            secrets=own_secrets(),
            patch=self._patch,
        )
        try:
            await self._do(self.api.call, "POST", self.api.path("pods"), manifest)
        except KubernetesError as error:
            self._waiting.discard(name)
            self.view.report(kubernetes_verdicts.of_refusal(error, f"pod {name}"))
            return None
        return name

    async def _runs(self, name: str, seconds: float, hopeless: Callable[[Pod], bool] = lambda pod: False) -> Pod | None:
        """The pod, once its container runs; None if it ends first, is hopeless, or does not run in time."""
        deadline, seen = time.monotonic() + seconds, False
        while time.monotonic() < deadline:
            found = self.view.pod(name)
            if found is None and seen:
                return None
            if found is not None and (found.over or found.deleting or hopeless(found)):
                return None
            if found is not None and found.running:
                return found
            seen = found is not None  # the watch may tell of it later than the answer to the request
            await asyncio.sleep(LOOK)
        return None

    async def _remove(self, name: str, seconds: float) -> None:
        """Have a node's pods end; those that do not are removed by force, and count as unproven."""
        for each in self.view.table.of(name):
            await self._delete(each.name, GRACE)
        deadline = time.monotonic() + seconds
        while self.view.table.of(name) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK)
        for each in self.view.table.of(name):
            self._say("driver", f"pod {each.name} on {each.machine} does not end: it is removed by force")
            await self._delete(each.name, 0)

    async def _delete(self, name: str, grace: int) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": grace}
        await self._ask(self.api.call, "DELETE", self.api.path("pods", name), body)

    async def _keep_blocked(self) -> None:
        while await self._ask(self.objects.write_blocked, self.objects.blocked) is _FAILED:
            await asyncio.sleep(5.0)

    # threads ----------------------------------------------------------------------------------------------------------

    async def _do(self, work: Callable[..., Any], *words: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *words))

    async def _ask(self, work: Callable[..., Any], *words: Any) -> Any:
        """As `_do`; _FAILED for what was refused or could not be asked. What is not there (404) is no failure."""
        try:
            return await self._do(work, *words)
        except KubernetesError as error:
            return None if error.status == 404 else _FAILED
        except RuntimeError:  # the threads have ended
            return _FAILED

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        log_failure(task, f"the cluster's task {getattr(work, '__qualname__', work)}", log)


_FAILED = object()


def gpus_of_a_node(config: Config) -> int:
    """That each pod takes: parallel.gpus_per_host, 0 on CPUs."""
    return 0 if config.train.device == "cpu" else config.parallel.gpus_per_host


def own_address(api: KubernetesApi) -> str:
    """Where pods reach this driver: its own pod's address, else the one that leads to the API server."""
    if address := os.environ.get("MEGASCALE_POD_ADDRESS"):
        return address
    try:
        return address_towards(api.host)
    except OSError:
        return "0.0.0.0"


CLUSTERS.register("kubernetes", KubernetesCluster)
