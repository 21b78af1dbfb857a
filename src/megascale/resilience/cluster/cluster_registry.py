"""The clusters that `resilience.cluster` may name; another package adds one with `CLUSTERS.register(name, class)`."""

from __future__ import annotations

from megascale.config.registry import Registry
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.cluster.local import ApartCluster, LocalCluster

# Other clusters register themselves in the module of their name, which is imported when the name is first used.
CLUSTERS: Registry[type[Cluster]] = Registry(
    "resilience.cluster",
    {"local": LocalCluster, "apart": ApartCluster},
    home="megascale.resilience.cluster",
    module_names=("ssh", "slurm", "kubernetes"),
)
