"""The clusters that `resilience.cluster` may name; another package adds one with `CLUSTERS.register(name, make)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from megascale.config import Config
from megascale.config.registry import Registry
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.cluster.local import LocalCluster


@dataclass(frozen=True)
class ClusterRequest:
    """What a cluster is made for.

    Attributes:
        run: the run folder, absolute.
        config: resolved.
        devices: GPUs of this machine to be shared out, as CUDA_VISIBLE_DEVICES names them, one group a node in order of
            creation; empty on CPU.
        say: called with each line for the terminal: (who, text).
    """

    run: Path
    config: Config
    devices: tuple[tuple[str, ...], ...] = ()
    say: Callable[[str, str], None] = lambda who, text: None


def _local(request: ClusterRequest) -> Cluster:
    return LocalCluster(request.run, request.devices)


def _apart(request: ClusterRequest) -> Cluster:
    return LocalCluster(request.run, request.devices, apart=True)


MakeCluster = Callable[[ClusterRequest], Cluster]


@runtime_checkable
class Elsewhere(Protocol):
    """What makes a cluster whose nodes are other machines says so by having this: neither their devices nor their cores
    are this machine's to share out."""

    def on_other_machines(self, config: Config) -> tuple[int, str]:
        """(GPUs of each, 0: none; the address of this machine that they reach), before anything starts."""
        ...


# local: processes of this machine that share the run folder; apart: as on other machines, each has a folder of its own.
# Others stand in modules of their names beside this one.
CLUSTERS: Registry[MakeCluster] = Registry(
    "resilience.cluster", {"local": _local, "apart": _apart}, home="megascale.resilience.cluster"
)
