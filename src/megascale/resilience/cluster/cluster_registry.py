"""The clusters that `resilience.cluster` may name; another package adds one with `CLUSTERS.register(name, make)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
        devices: GPUs of this machine to be shared out, one group a node in order of creation; empty on CPU.
    """

    run: Path
    config: Config
    devices: tuple[tuple[int, ...], ...] = ()


def _local(request: ClusterRequest) -> Cluster:
    return LocalCluster(request.run, request.devices)


def _apart(request: ClusterRequest) -> Cluster:
    return LocalCluster(request.run, request.devices, apart=True)


MakeCluster = Callable[[ClusterRequest], Cluster]
# local: processes of this machine that share the run folder; apart: as on other machines, each has a folder of its own.
CLUSTERS: Registry[MakeCluster] = Registry(
    "resilience.cluster", {"local": _local, "apart": _apart}, home="megascale.resilience.cluster"
)
