"""Which clusters there are, by the name that `resilience.cluster` gives: here, or registered by another package.

A package registers one with `register_cluster` when it is imported, or without an import by an entry point of the group
`megascale.clusters` whose object is the function that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from megascale.config import Config
from megascale.errors import ConfigError
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.cluster.local import LocalCluster

GROUP = "megascale.clusters"


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


MakeCluster = Callable[[ClusterRequest], Cluster]

_MAKERS: dict[str, MakeCluster] = {
    "local": lambda request: LocalCluster(request.run, [list(group) for group in request.devices])
}


def register_cluster(name: str, make: MakeCluster) -> None:
    """Let `resilience.cluster=name` mean what `make` makes. ConfigError for a name that means another one already."""
    if _MAKERS.get(name, make) is not make:
        raise ConfigError(f"a cluster {name!r} is registered already; register yours under another name")
    _MAKERS[name] = make


def known_clusters() -> list[str]:
    """Names that `resilience.cluster` may have."""
    return sorted({*_MAKERS, *(point.name for point in entry_points(group=GROUP))})


def check_cluster(name: str) -> None:
    """ConfigError, with the list, for a name that none has."""
    if name not in known_clusters():
        raise ConfigError(f"resilience.cluster={name} is not known; there are: {', '.join(known_clusters())}")


def make_cluster(request: ClusterRequest) -> Cluster:
    """The cluster that the configuration names. ConfigError for an unknown one."""
    name = request.config.resilience.cluster
    check_cluster(name)
    make = _MAKERS.get(name)
    if make is None:
        (point, *_) = entry_points(group=GROUP, name=name)
        make = point.load()
    return make(request)
