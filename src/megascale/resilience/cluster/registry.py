"""Which clusters there are, by the name that `resilience.cluster` gives: here, or registered by another package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.config import Config
from megascale.errors import ConfigError
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


MakeCluster = Callable[[ClusterRequest], Cluster]


def _local(request: ClusterRequest) -> Cluster:
    return LocalCluster(request.run, [list(group) for group in request.devices])


_MAKERS: dict[str, MakeCluster] = {"local": _local}


def register_cluster(name: str, make: MakeCluster) -> None:
    """Let `resilience.cluster=name` mean what `make` makes. ConfigError for a name that means another one already."""
    if _MAKERS.setdefault(name, make) is not make:
        raise ConfigError(f"a cluster {name!r} is registered already; register yours under another name")


def check_cluster(name: str) -> None:
    """ConfigError, with the list, for a name that none has."""
    if name not in _MAKERS:
        known = ", ".join(sorted(_MAKERS))
        raise ConfigError(
            f"resilience.cluster={name} is not known; there are: {known}; others come with a package that registers "
            "them (docs/resilience.md)"
        )


def make_cluster(request: ClusterRequest) -> Cluster:
    """The cluster that the configuration names. ConfigError for an unknown one."""
    check_cluster(request.config.resilience.cluster)
    return _MAKERS[request.config.resilience.cluster](request)
