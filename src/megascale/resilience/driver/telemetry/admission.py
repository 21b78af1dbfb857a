"""The announcement of the driver to its agents, and the decision which agents may join the job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megascale.config import ResilienceConfig
from megascale.core.events import Event
from megascale.resilience.agent.node_health import read_versions
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.driver.nodes import Node, Nodes
from megascale.resilience.driver.process import LoopTasks
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, JobEvent, NodeEvent, NodeState
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.driver.telemetry.membership import Adoption
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import Hello, JobOffer, Join
from megascale.resilience.protocol.contact import Contact, write_contact
from megascale.resilience.protocol.job_description import JobDescription

_REFUSAL_LIMIT = 10_000  # distinct refusals that are recorded: a flood of connections must not fill the journal

# Packages whose versions must be equal on all nodes, since ranks exchange data and must compute the same.
_EQUAL_PACKAGES = ("torch", "numpy", "triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
# Packages whose releases, but not builds, must be equal on the driver's machine, which may lack GPUs.
_RELEASE_PACKAGES = ("torch", "numpy")

Facts = Mapping[str, str]  # hardware of a machine or versions of its packages, by name


@dataclass(kw_only=True, eq=False)
class Announcement:
    """Announces the addresses of this driver to agents and commands.

    Attributes:
        journal: holds the driver's epoch.
        limits: the configuration section [resilience], which the agents receive.
        token: the job's secret.
        record_event: writes an event into the audit log.
        address: (host, port) at which agents connect.
    """

    run: Path
    job: Job
    journal: Journal
    cluster: Cluster
    limits: ResilienceConfig
    token: bytes
    record_event: RecordEvent
    address: tuple[str, int] = ("", 0)
    api_url: str = ""

    def publish(self) -> None:
        """Write the contact file, and announce the job to all agents through the cluster."""
        name = self.job.state.name
        write_contact(self.run, Contact(name, self.journal.epoch, os.getpid(), self.address, self.api_url))
        self.cluster.announce(JobDescription(name, self.journal.epoch, self.address, self.limits), self.token)

    def raise_epoch(self, hello: Hello) -> None:
        """Continue with an epoch above the one that an agent knows.

        An agent with a newer epoch than the journal's shows that the journal was removed or is an old one.
        `Attempts.begin` raises the attempt likewise. Raise JournalFenced if another driver has a newer epoch.
        """
        previous = self.journal.epoch
        self.journal.raise_epoch(hello.epoch + 1)
        self.job.apply(JobEvent.OPENED, epoch=self.journal.epoch)
        self.publish()
        text = (
            f"{hello.node} knows a driver of epoch {hello.epoch} and attempt {hello.attempt}, the journal only epoch "
            f"{previous}: it was removed or is an old one; this driver continues as epoch {self.journal.epoch}"
        )
        self.record_event(Event.JOURNAL_DAMAGED, nodes=(hello.node,), evidence=(text,))


@dataclass(kw_only=True, eq=False)
class Admission:
    """Decides which agents may join the job.

    Attributes:
        job: the driver's job.
        nodes: all nodes.
        adoption: takes over trainers that the journal does not know.
        announcement: raises the epoch if an agent knows a newer driver.
        record_event: writes an event into the audit log.
        device: train.device, which determines the hardware that a node needs.
        offer_fields: the constant fields of `JobOffer`.
    """

    job: Job
    nodes: Nodes
    adoption: Adoption
    announcement: Announcement
    tasks: LoopTasks
    record_event: RecordEvent
    device: str
    offer_fields: dict[str, str]
    _versions: Facts = field(default_factory=read_versions, init=False)  # on the driver's machine
    _refusals: set[tuple[str, ...]] = field(default_factory=set, init=False)  # (host, node, kind of reason)

    def handle_hello(self, channel: agent_channel.AgentChannel, hello: Hello) -> str:
        """Admit an agent that connects for the first time or again. Return the reason of a refusal, "" if admitted."""
        if hello.epoch > self.job.state.epoch:
            self.announcement.raise_epoch(hello)
        if self.job.phase in ENDED:
            return f"the job is {self.job.phase}"
        reason = self._find_obstacle(hello)
        if reason:
            return reason
        name = hello.node
        epoch = self.job.state.epoch
        if name in self.nodes.cluster.removed_nodes:
            # An agent of a node that was replaced, such as one whose slurmd died, must not train next to the new node.
            channel.send_message(do="welcome", epoch=epoch, version=agent_channel.VERSION)
            channel.send_message(do="stop", epoch=epoch, order=0, how="kill", grace_period=0.0)
            channel.send_message(do="leave", epoch=epoch)
            self.nodes.ensure_known(name)
            return ""
        node = self.nodes.ensure_known(name)
        if node.channel is not None:
            node.channel.close()  # The old connection failed unnoticed, or the agent was started anew.
        is_same_agent = node.boot == hello.boot
        has_restarted = node.boot != "" and not is_same_agent
        self.nodes.leases.admit(name, is_same_agent=is_same_agent, holds_ranks=hello.trainers is not None)
        node.boot = hello.boot
        node.channel = channel
        node.last_seen = time.monotonic()
        node.joined = node.last_seen
        node.attempt = hello.attempt
        channel.send_message(do="welcome", epoch=epoch, version=agent_channel.VERSION)
        self._update_record(node, hello, is_same_agent=is_same_agent)
        if has_restarted or node.attempt < self.job.state.attempt:
            node.forget_attempt()
        self.adoption.handle_arrival(node, hello)
        self.tasks.wake.set()
        return ""

    def handle_join(self, join: Join) -> JobOffer | str:
        """Return the job offer for a node that only knows the driver's address, or the reason of a refusal."""
        if self.job.phase in ENDED:
            return f"the job is {self.job.phase}"
        node = self.nodes.get(join.node)
        if node is not None and node.channel is not None and node.record.address != join.address:
            return (
                f"a node {join.node} is in the job already, at {node.record.address}: give this one another name "
                "(--node)"
            )
        reason = self._find_obstacle(join)
        if reason:
            return reason
        return JobOffer(epoch=self.job.state.epoch, version=agent_channel.VERSION, **self.offer_fields)

    def record_refusal(self, peer: str, node: str, reason: str) -> None:
        """Record that a connection was refused, once per host, node and kind of reason."""
        key = (peer.rpartition(":")[0], node, reason.split(";")[0])
        if key not in self._refusals and len(self._refusals) < _REFUSAL_LIMIT:
            self._refusals.add(key)
            self.record_event(
                Event.MESSAGE_REFUSED, action="refused", evidence=(f"{node or peer}: {reason}",), peer=peer
            )

    def _find_obstacle(self, greeting: Hello | Join) -> str:
        """Return why the node of a greeting cannot hold ranks of the job, "" if it can."""
        members = [
            (node.name, node.record.facts.get("hardware", {}), node.record.facts.get("versions", {}))
            for node in self.nodes.all()
            if node.channel is not None and node.name != greeting.node
        ]
        return find_incompatibility(
            greeting.node,
            greeting.hardware,
            greeting.versions,
            driver_versions=self._versions,
            members=members,
            ranks_per_node=self.job.state.ranks_per_node,
            device=self.device,
        )

    def _update_record(self, node: Node, hello: Hello, *, is_same_agent: bool) -> None:
        """Store the node's address and the facts about its machine, and record a node that is new."""
        if node.state is NodeState.ENDING and is_same_agent:
            return  # The agent is still ending. Only its connection is new, so the node must not become usable.
        facts = {"pod": hello.pod, "hardware": hello.hardware, "versions": hello.versions}
        if node.state is NodeState.UP and (node.record.address, node.record.facts) == (hello.address, facts):
            return
        is_new = not node.state.is_present and node.state is not NodeState.EVICTED
        changes = {"address": hello.address, "facts": facts}
        if is_new:
            changes["reason"] = "its agent connected"
        self.nodes.change(node.name, NodeEvent.CONNECTED, **changes)
        if is_new:
            text = f"{node.name} at {hello.address} joined"
            if hello.metrics_problem:
                text += f"; its {hello.metrics_problem}"
            self.record_event(Event.NODE_JOINED, nodes=(node.name,), evidence=(text,))


def find_incompatibility(
    node: str,
    hardware: Facts,
    package_versions: Facts,
    *,
    driver_versions: Facts,
    members: Iterable[tuple[str, Facts, Facts]],
    ranks_per_node: int,
    device: str,
) -> str:
    """Return why a node cannot hold ranks of the job, "" if it can. Missing facts do not count against it.

    Args:
        hardware: of the node's machine.
        package_versions: on the node's machine.
        driver_versions: on the driver's machine.
        members: (name, hardware, versions) of the connected nodes.
        ranks_per_node: number of ranks that a node holds.
        device: train.device.
    """
    members = list(members)
    difference = _find_version_difference(node, package_versions, driver_versions, members)
    if difference:
        return f"{difference}; install the same on both: until then the node is not used"
    if device == "cpu" or "cores" not in hardware:  # Every machine has cores, so without them the hardware is unknown.
        return ""
    gpus = int(hardware.get("gpus", 0))
    if gpus < ranks_per_node and (gpus or device == "cuda"):
        return f"node {node} has {gpus} GPUs for its {ranks_per_node} ranks; lower parallel.data, or leave the node out"
    for name, member_hardware, _ in members:
        member_gpus = int(member_hardware.get("gpus", 0))
        if "cores" in member_hardware and (member_gpus > 0) != (gpus > 0):
            gpu_node, cpu_node = (node, name) if gpus else (name, node)
            return (
                f"node {gpu_node} has GPUs and {cpu_node} has none: a job trains on one kind of device; choose it by "
                "train.device"
            )
    return ""


def _find_version_difference(
    node: str, package_versions: Facts, driver_versions: Facts, members: list[tuple[str, Facts, Facts]]
) -> str:
    """Return which package differs between the node, the driver's machine and the connected nodes, "" if none."""
    # (package, function that returns the part of its version that must be equal)
    comparisons = [("python", _truncate_to_minor)] + [(name, _remove_build) for name in _RELEASE_PACKAGES]
    for package, shorten in comparisons:
        expected = driver_versions.get(package)
        version = package_versions.get(package)
        if expected and version and shorten(expected) != shorten(version):
            return f"node {node} has {package} {version}, the driver's machine {expected}"
    for name, _, member_versions in members:
        for package in _EQUAL_PACKAGES:
            version = package_versions.get(package)
            expected = member_versions.get(package)
            if version and expected and version != expected:
                return f"node {node} has {package} {version}, node {name} has {expected}"
    return ""


def _truncate_to_minor(version: str) -> str:
    """Return the major and minor part of a version: 3.12 for 3.12.4."""
    return ".".join(version.split(".")[:2])


def _remove_build(version: str) -> str:
    """Return a version without its build: 2.13.0 for 2.13.0+cu130."""
    return version.partition("+")[0]
