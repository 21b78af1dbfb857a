"""Packages that add parts from outside: an activation, an optimizer, a cluster, a sink, a storage, a rule ...

A package names a module in its entry points' group `megascale.plugins`, and importing that registers what it has
(docs/architecture.md says how for each kind of part). `megascale launch` imports them all, since rules are not named by
a setting; every other process does so when a setting names what nobody has registered (config/registry.py).
"""

from __future__ import annotations

import threading
from importlib.metadata import entry_points

from megascale.errors import ConfigError

GROUP = "megascale.plugins"
_loading = threading.RLock()  # a second thread waits until all is registered; a plugin that asks itself does not
_begun = False


def load_plugins() -> None:
    """Import them all, once a process. ConfigError naming the one that cannot be imported."""
    global _begun
    with _loading:
        if _begun:
            return
        _begun = True
        for point in entry_points(group=GROUP):
            try:
                point.load()
            except Exception as error:
                _begun = False
                raise ConfigError(
                    f"the plugin {point.name} ({point.value}) cannot be loaded: {type(error).__name__}: {error}; "
                    "mend its package or uninstall it"
                ) from error
