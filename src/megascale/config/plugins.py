"""Packages that add to the driver from outside: a cluster, a rule.

A package names a module in its entry points' group `megascale.plugins`; `megascale launch` imports it, and it calls
`CLUSTERS.register` (cluster/cluster_registry.py) or `register_rule` (rules/).
"""

from __future__ import annotations

from importlib.metadata import entry_points

from megascale.errors import ConfigError

GROUP = "megascale.plugins"


def load_plugins() -> None:
    """Import them all. ConfigError naming the one that cannot be imported."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            raise ConfigError(
                f"the plugin {point.name} ({point.value}) cannot be loaded: {type(error).__name__}: {error}; "
                "mend its package or uninstall it"
            ) from error
