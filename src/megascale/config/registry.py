"""Names that a setting may have, each with what stands behind it: how a part is added without touching its users."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from megascale.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, T]):
    """What a setting may say, by name; a name that is not there is a ConfigError with those that are.

    A dictionary, since some are asked several times a layer.

    Args:
        key: the setting, section.key; errors name it.
        known: entries to begin with.
    """

    def __init__(self, key: str, known: Mapping[str, T] | None = None) -> None:
        super().__init__(known or {})
        self.key = key

    def register(self, name: str, entry: T) -> None:
        """Add a name; ConfigError if it is taken."""
        if name in self:
            raise ConfigError(f"{self.key}={name!r} is registered already; choose another name")
        self[name] = entry

    def remove(self, name: str) -> None:
        """Forget a name that `register` added."""
        del self[name]

    def __missing__(self, name: str) -> T:
        raise ConfigError(self._unknown(name))

    def names(self) -> list[str]:
        """All names, in the order in which they were added."""
        return list(self)

    def check(self, name: str) -> str:
        """`name`, if it is known; as a validator of the setting."""
        if name not in self:
            raise ValueError(self._unknown(name))
        return name

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{self.key}={name!r} is not known; {hint}choose among {', '.join(map(repr, self))}"
