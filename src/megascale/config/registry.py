"""What a key of the configuration may name: parts that stand in a registry, ours and those of other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from megascale.errors import ConfigError

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """Parts by name; `key` is the setting that names one."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._parts: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """A decorator that puts a part under `name`; ValueError where another stands there."""

        def put(part: Part) -> Part:
            if self._parts.get(name, part) is not part:
                raise ValueError(f"{self.key}={name} is registered already")
            self._parts[name] = part
            return part

        return put

    def __getitem__(self, name: str) -> Part:
        """The part under `name`; ConfigError with the list of names if there is none."""
        if name not in self._parts:
            raise ConfigError(
                f"{self.key}={name} is unknown; it is one of {', '.join(self._parts)}, or what a package of your own "
                "has registered before the run starts"
            )
        return self._parts[name]

    def names(self) -> list[str]:
        """All names, in the order of their registration."""
        return list(self._parts)
