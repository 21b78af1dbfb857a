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
from typing import TypeVar

from megascale.config.plugins import load_plugins
from megascale.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, T]):
    """What a setting may say, by name; to ask for a name that is not there is a ConfigError with those that are.

    A dictionary, since some are asked several times a layer.

    Args:
        key: the setting, section.key; errors name it.
        known: entries to begin with.
        home: package in which a module may stand that registers the name it is called by.

    Attributes:
        own: the entries to begin with, which nobody added.
    """

    def __init__(self, key: str, known: Mapping[str, T] | None = None, home: str = "") -> None:
        super().__init__(known or {})
        self.key, self._home, self.own = key, home, frozenset(self)

    def register(self, name: str, entry: T) -> None:
        """Add a name; ConfigError if it is taken."""
        if dict.__contains__(self, name):
            raise ConfigError(f"{self.key}={name!r} is registered already; choose another name")
        self[name] = entry

    def remove(self, name: str) -> None:
        """Forget a name that `register` added."""
        del self[name]

    def __contains__(self, name: object) -> bool:
        """Whether it is known; imports what may register it. ConfigError for a plugin that cannot be imported."""
        if dict.__contains__(self, name):
            return True
        if self._home and isinstance(name, str) and name.isidentifier() and find_spec(f"{self._home}.{name}"):
            import_module(f"{self._home}.{name}")
        if not dict.__contains__(self, name):
            load_plugins()
        return dict.__contains__(self, name)

    def __missing__(self, name: str) -> T:
        if name not in self:
            raise ConfigError(self._unknown(name))
        return dict.__getitem__(self, name)

    def names(self) -> list[str]:
        """All names, in the order in which they were added."""
        return list(self)

    def validate_name(self, name: str) -> str:
        """`name`, if it is known; as a validator of the setting."""
        if name not in self:
            raise ValueError(self._unknown(name))
        return name

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{self.key}={name!r} is not known; {hint}choose among {', '.join(map(repr, self))}"
