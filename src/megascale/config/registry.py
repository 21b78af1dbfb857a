"""Names that a setting may have, each with what stands behind it: how a part is added without touching its users.

A name is registered by whoever has the part: beside the registry, or by a module that is imported when it is first
asked for. That is the module of the same name in the part's own package (`model.mlp=experts`: module experts in
model/), or what installed packages name as plugins (plugins.py). So a part, whatever it consists of, may be one file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, TypeVar

from megascale.config.plugins import load_plugins
from megascale.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """What a setting may say, by name.

    Args:
        key: the setting, section.key; errors name it.
        known: entries to begin with.
        home: package in which a module may stand that registers the name it is called by.
    """

    def __init__(self, key: str, known: Mapping[str, T] | None = None, home: str = "") -> None:
        self.key, self._entries, self._home = key, dict(known or {}), home

    def register(self, name: str, entry: T) -> None:
        """Add a name; ConfigError if it is taken."""
        if name in self._entries:
            raise ConfigError(f"{self.key}={name!r} is registered already; choose another name")
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Forget a name that `register` added."""
        del self._entries[name]

    def __contains__(self, name: str) -> bool:
        """Whether it is known; imports what may register it. ConfigError for a plugin that cannot be imported."""
        if name not in self._entries and self._home and name.isidentifier() and find_spec(f"{self._home}.{name}"):
            import_module(f"{self._home}.{name}")
        if name not in self._entries:
            load_plugins()
        return name in self._entries

    def __getitem__(self, name: str) -> T:
        """The entry; ConfigError with the names there are."""
        if name not in self:
            raise ConfigError(self._unknown(name))
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, in the order in which they were added."""
        return list(self._entries)

    def check(self, name: str) -> str:
        """`name`, if it is known; as a validator of the setting."""
        if name not in self:
            raise ValueError(self._unknown(name))
        return name

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{self.key}={name!r} is not known; {hint}choose among {', '.join(map(repr, self._entries))}"
