"""What the driver asks of whatever provides nodes: local processes, a list of hosts, a package's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megascale.resilience.protocol.given import JobDescription
from megascale.resilience.rules.verdicts import Verdict


@dataclass(frozen=True)
class NodeInfo:
    """A node that the cluster knows.

    alive: whether an agent could be started there; running: whether one is; why: what was last wrong with it, in words.
    """

    name: str
    address: str
    alive: bool
    running: bool
    why: str = ""


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


@runtime_checkable
class ForeseesNodes(Protocol):
    """What a cluster that knows its nodes beforehand may add: a placement on others is refused before any starts."""

    def foreseen(self, count: int) -> list[str]:
        """Names of every node that a new job of `count` nodes, spares too, may get."""
        ...

    def prefer(self, names: Sequence[str]) -> None:
        """Give these first, where there are more than a job takes."""
        ...


@runtime_checkable
class Barring(Protocol):
    """A cluster that chooses among machines it knows by name, and is told which are not to be used."""

    def bar(self, names: frozenset[str]) -> None:
        """`request` gives none of these from now on: they were evicted or cordoned, or their agents are there."""
        ...


@runtime_checkable
class Ending(Protocol):
    """A cluster that sees nodes end before they are gone.

    Attributes:
        ending: nodes whose agents are told to end, by whomever: nothing is started on them.
    """

    ending: frozenset[str]


@runtime_checkable
class Proving(Protocol):
    """A cluster that may see for certain that nothing of the job runs on a node any more."""

    def gone(self, name: str) -> bool:
        """Whether it has: what was there has ended, by the word of whoever ran it."""
        ...


@runtime_checkable
class Hearing(Protocol):
    """A cluster that gives a machine to nobody while something of the job may run there."""

    def note_end(self, name: str) -> None:
        """The agent of a node has said that it ends, and that none of its ranks runs any more."""
        ...


@runtime_checkable
class Blocking(Protocol):
    """A cluster that remembers which machines the job must not get again, beyond the driver's life."""

    def block(self, name: str, why: str) -> None:
        """A node was evicted: its machine is given to this job no more."""
        ...

    def unblock(self, name: str) -> None:
        """It may be used again."""
        ...


@runtime_checkable
class Reporting(Protocol):
    """A cluster that sees by itself what a verdict follows from: a quota, an image, a device."""

    def reports(self) -> list[Verdict]:
        """What is new since the last call."""
        ...


@runtime_checkable
class Switched(Protocol):
    """A cluster that knows what its nodes are connected by: ranks are put on nodes in this order."""

    def switch(self, name: str) -> str:
        """The switch of a node, "" where that is not known."""
        ...


@runtime_checkable
class Succeeding(Protocol):
    """A cluster that knows which driver is the current one.

    Attributes:
        replaced: by whom this driver was replaced, in words; "" while it is the current one. It then ends without
            touching anything.
        hands_over: whether SIGTERM to the driver means that another follows at once: it ends, and training goes on.
    """

    replaced: str
    hands_over: bool


@runtime_checkable
class Closing(Protocol):
    """A cluster that holds connections, to be closed before the driver's loop ends; agents live on."""

    async def close(self) -> None:
        """Let go of everything."""
        ...


@runtime_checkable
class Taking(Protocol):
    """A cluster that may take nodes out of the job while something of it still runs there.

    Attributes:
        taken: names of those: agents there are told to end, and are used for nothing.
    """

    taken: frozenset[str]


@runtime_checkable
class Draining(Protocol):
    """A cluster that wants nodes to get nothing new; what runs there goes on.

    Attributes:
        drained: their names, and why.
    """

    drained: Mapping[str, str]


@runtime_checkable
class Withdrawing(Protocol):
    """A cluster that may take the job itself away from this driver, to start it elsewhere.

    Attributes:
        withdrawn: how that was seen, in words; "" while the job is this driver's.
    """

    withdrawn: str


@runtime_checkable
class Outlasting(Protocol):
    """A cluster in which the end of this driver's process may end the job, though another driver has it by then."""

    def outlast(self) -> int | None:
        """Wait, touching nothing, until the job has ended elsewhere: its exit code; None: there is nothing to wait
        for."""
        ...
