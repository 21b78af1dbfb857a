"""The interface between the driver and the system that provides nodes.

`Cluster` is the base class of all clusters. A cluster implements the five abstract methods; every other attribute and
method has a default that does nothing, and a cluster overrides those that it supports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from megascale.config import Config
from megascale.resilience.protocol.job_description import JobDescription
from megascale.resilience.rules.view import Verdict

NO_REASONS: Mapping[str, str] = MappingProxyType({})  # an empty default that no cluster can change


@dataclass(frozen=True)
class NodeInfo:
    """A node that the cluster knows.

    Attributes:
        name: name of the node within the job.
        address: address at which other nodes reach it, "" if unknown.
        reason: the last problem of the node, "" if there was none.
    """

    name: str
    address: str
    can_start_agent: bool
    has_agent: bool
    reason: str = ""


@dataclass(frozen=True)
class ClusterRequest:
    """Arguments from which a cluster is constructed.

    Attributes:
        run: the run folder, absolute.
        config: the resolved configuration.
        devices: GPUs of this machine as CUDA_VISIBLE_DEVICES names them, one group per node in order of creation;
            empty on CPU.
        report: prints a line on the terminal: (source, text).
    """

    run: Path
    config: Config
    devices: tuple[tuple[str, ...], ...] = ()
    report: Callable[[str, str], None] = lambda source, text: None


class Cluster(ABC):
    """Nodes with one agent each. Calls return quickly or are asynchronous, since the driver's loop makes them.

    Attributes:
        agent_lease: default of resilience.agent_lease in seconds, None: the cluster needs no lease.
        slow_start: True if a spare node takes over faster than an agent that is started again.
        start_limit: number of agents that are started at the same time, None: limited by this machine's cores.
        notice_seconds: time in which a living agent learns of a new driver.
        has_unlisted_agents: True if agents may run that `nodes` does not list.
        hands_over: True if SIGTERM to the driver means that another driver follows, so training continues.
        replaced_by: description of the driver that replaced this one, "" while this driver is current. The replaced
            driver ends without touching the job.
        withdrawal_reason: why the cluster took the job away from this driver, "" while this driver has the job.
    """

    agent_lease: ClassVar[float | None] = None
    slow_start: bool = False
    start_limit: int | None = None
    notice_seconds: float = 0.0
    has_unlisted_agents: bool = False
    hands_over: bool = False
    replaced_by: str = ""
    withdrawal_reason: str = ""

    def __init__(self, request: ClusterRequest) -> None:
        self.run = request.run
        self._report = request.report

    @classmethod
    def describe_remote_machines(cls, config: Config) -> tuple[int, str] | None:
        """Return (GPUs per node, address at which the nodes reach this machine), None for a cluster on this machine.

        The nodes of a cluster on other machines use no GPUs or cores of this machine. Called before the job starts.
        """
        return None

    # required ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def announce(self, job: JobDescription, token: bytes) -> None:
        """Give all agents, including running ones, the job description and secret of this driver. Called first."""

    @abstractmethod
    def nodes(self) -> list[NodeInfo]:
        """List every node that exists, including evicted nodes until they are removed."""

    @abstractmethod
    async def start_agent(self, name: str) -> bool:
        """End the node's agent if it runs, and start a new one; return False if that is not possible now."""

    @abstractmethod
    async def fence(self, name: str) -> bool:
        """End all processes of this job on a node; return True once it is certain that they have ended."""

    @abstractmethod
    async def request(self) -> str | None:
        """Request one new node with a running agent; return its name, or None if the cluster has none now."""

    # choice of nodes --------------------------------------------------------------------------------------------------

    def list_possible_nodes(self, count: int) -> list[str]:
        """List all nodes that a new job of `count` nodes (spares included) may get; empty if they are unknown."""
        return []

    def prefer(self, names: Sequence[str]) -> None:
        """Provide these nodes first if the cluster has more nodes than the job needs."""
        return

    def exclude_nodes(self, names: frozenset[str]) -> None:
        """Exclude these nodes from `request`, and no others: they are evicted, cordoned or have an agent."""
        return

    def block(self, name: str, reason: str) -> None:
        """Exclude an evicted node's machine from this job beyond the life of this driver."""
        return

    def unblock(self, name: str) -> None:
        """Allow the machine of a node again."""
        return

    def find_switch(self, name: str) -> str:
        """Return the network switch of a node, "" if unknown. Ranks are placed in the order of switches."""
        return ""

    # observations -----------------------------------------------------------------------------------------------------

    @property
    def removed_nodes(self) -> frozenset[str]:
        """Nodes that the cluster removed from the job although processes of the job may still run there."""
        return frozenset()

    @property
    def drained(self) -> Mapping[str, str]:
        """Nodes that are to receive no new work, each with the reason; running work continues."""
        return NO_REASONS

    @property
    def ending(self) -> frozenset[str]:
        """Nodes whose agents are ending; the driver starts nothing on them."""
        return frozenset()

    def has_stopped(self, name: str) -> bool:
        """Return True if it is certain that no process of the job runs on a node."""
        return False

    def record_agent_end(self, name: str) -> None:
        """Record that the agent of a node reported its end and the end of its ranks."""
        return

    def take_verdicts(self) -> list[Verdict]:
        """Return the cluster's own verdicts (quota, image, device) since the last call."""
        return []

    # end of the driver ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the cluster's connections before the driver's loop ends; agents continue."""
        return

    def wait_for_job_end(self) -> int | None:
        """Wait until the job has ended under another driver, and return its exit code; None without a need to wait.

        A cluster waits if the end of this process would end the job.
        """
        return None


def count_configured_gpus(config: Config) -> int:
    """Return the configured number of GPUs per node: parallel.gpus_per_host, 0 on CPUs."""
    if config.train.device == "cpu":
        return 0
    return config.parallel.gpus_per_host


def format_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
