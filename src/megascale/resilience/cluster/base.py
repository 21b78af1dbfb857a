"""What the driver asks of whatever provides nodes. Local processes implement it; so can Kubernetes or Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megascale.resilience.protocol.given import JobDescription


@dataclass(frozen=True)
class NodeInfo:
    """A node that the cluster knows. alive: whether an agent could be started there; running: whether one is."""

    name: str
    address: str
    alive: bool
    running: bool


class Cluster(Protocol):
    """Nodes with an agent each. Calls are quick or asynchronous; the driver's loop waits for none of them long."""

    def announce(self, job: JobDescription, token: bytes) -> None:
        """What agents are given from now on (protocol/given.py), those that run too: another driver has the job, or
        the same at another address. Called before anything else."""
        ...

    def nodes(self) -> list[NodeInfo]:
        """Every node that exists now, evicted ones included until they are removed."""
        ...

    async def start_agent(self, name: str) -> bool:
        """Start (again) the agent of a node; what an older agent there left running is ended first. False: not now."""
        ...

    async def fence(self, name: str) -> bool:
        """Make sure that nothing of this job runs on a node any more; True once that is certain."""
        ...

    async def request(self) -> str | None:
        """Ask for one new node with a running agent; its name, or None if the cluster has none to give now."""
        ...
