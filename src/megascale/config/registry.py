"""Registries of the names that a setting accepts, and the import of plugins, which add names.

The first use of an unknown name imports modules that may register it:

1. The module of this name in the registry's home package: `model.mlp=experts` imports `experts` in megascale.model.
2. All plugins, which are modules that installed packages list in the entry points' group `megascale.plugins`.

`megascale launch` imports the plugins at every start, since they may add driver rules, which no setting names.
docs/architecture.md lists the parts that plugins can add.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

from megascale.errors import ConfigError

PLUGIN_GROUP = "megascale.plugins"
_plugin_lock = threading.RLock()  # other threads wait until all parts are registered; a plugin may use a registry
_plugins_loaded = False

T = TypeVar("T")


def load_plugins() -> None:
    """Import all plugins, once per process. Raises ConfigError naming a plugin that cannot be imported."""
    global _plugins_loaded
    with _plugin_lock:
        if _plugins_loaded:
            return
        _plugins_loaded = True
        from importlib.metadata import entry_points  # its import takes longer than the rest of this module

        for point in entry_points(group=PLUGIN_GROUP):
            try:
                point.load()
            except Exception as error:
                _plugins_loaded = False
                raise ConfigError(
                    f"the plugin {point.name} ({point.value}) cannot be loaded: {type(error).__name__}: {error}; "
                    "fix its package or uninstall it"
                ) from error


class Registry(dict[str, T]):
    """Entries by the names that a setting accepts. Looking up an unknown name raises ConfigError.

    The class derives from dict because some registries are read several times per layer.

    Args:
        key: the setting, section.key, for error messages.
        home: package with modules that register the entry of their own name when they are imported; "" for none.
        module_names: names of those modules of `home`, for error messages.

    Attributes:
        builtin_names: names of the built-in entries.
    """

    def __init__(
        self, key: str, entries: Mapping[str, T] | None = None, home: str = "", module_names: Sequence[str] = ()
    ) -> None:
        super().__init__(entries or {})
        self.key = key
        self._home = home
        self._module_names = tuple(module_names)
        self.builtin_names = frozenset(self)

    def register(self, name: str, entry: T) -> None:
        """Add a name. Raises ConfigError if it is registered already."""
        if dict.__contains__(self, name):
            raise ConfigError(f"{self.key}={name!r} is registered already; choose another name")
        self[name] = entry

    def remove(self, name: str) -> None:
        """Remove a name that `register` added."""
        del self[name]

    def __contains__(self, name: object) -> bool:
        """Return whether the name is known, after importing the modules that may register it.

        Raises ConfigError for a plugin that cannot be imported.
        """
        if dict.__contains__(self, name):
            return True
        if self._home and isinstance(name, str) and name.isidentifier() and find_spec(f"{self._home}.{name}"):
            import_module(f"{self._home}.{name}")
        if not dict.__contains__(self, name):
            load_plugins()
        return dict.__contains__(self, name)

    def __missing__(self, name: str) -> T:
        if name not in self:
            raise ConfigError(self._describe_unknown(name))
        return dict.__getitem__(self, name)

    def names(self) -> list[str]:
        """Return all names, in the order in which they were registered."""
        return list(self)

    def validate_name(self, name: str) -> str:
        """Return `name` if it is known; pydantic's validator of the setting. Raises ValueError otherwise."""
        if name not in self:
            raise ValueError(self._describe_unknown(name))
        return name

    def _describe_unknown(self, name: str) -> str:
        names = list(dict.fromkeys((*self, *self._module_names)))
        nearest = difflib.get_close_matches(name, names, n=1)
        if nearest:
            suggestion = f"did you mean {nearest[0]!r}? "
        else:
            suggestion = ""
        return f"{self.key}={name!r} is not known; {suggestion}choose among {', '.join(map(repr, names))}"
