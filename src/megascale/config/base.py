"""What every section of the configuration shares."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from megascale.errors import ConfigError

# Upper bounds keep a slip (2e9 for 2e3) from starting loops and allocations of that size: far above what anybody
# trains, and what they let through is checked against the machine before anything starts (core/preflight.py).
MAX_LAYERS = 10_000  # layers and pipeline stages


MAX_COUNT = 1_000_000_000_000  # counts that cost nothing by themselves


class Section(BaseModel):
    """A section of the tree: unknown keys are refused, values may not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def expand_home(value: Any) -> Any:
    """Return a path, or a list of paths, with a leading ~ or ~USER replaced by the home folder.

    A shell does so for words of a command line, but not for text in a file or after an equals sign. Raises an error
    of pydantic's where no such folder is known.
    """
    if isinstance(value, list):
        return [expand_home(item) for item in value]
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        text = "this machine knows no such home folder; write the path in full, or ./ before a name that begins with ~"
        raise PydanticCustomError("home_folder", text)  # type: ignore[misc]
    return expanded


def _check_text(name: str, value: Any) -> None:
    """ConfigError for text that no file can hold: bytes of a command line that are not UTF-8."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{name}={text!r} holds bytes that are not UTF-8; write it in UTF-8")
