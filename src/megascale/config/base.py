"""Base class of the sections, and checks that they share."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from megascale.errors import ConfigError

# Upper bounds stop typing errors (2e9 for 2e3) from starting loops and allocations of that size. They are far above
# practical values; core/preflight.py compares smaller values with the machine before anything starts.
MAX_LAYERS = 10_000  # layers and pipeline stages
MAX_GLOBAL_BATCH = 100_000_000  # samples of a step
MAX_COUNT = 1_000_000_000_000  # counts that allocate nothing, such as steps

# Value that removes a key of a preset or a file, so that the default applies.
UNSET = "unset"


class Section(BaseModel):
    """Section of the configuration: unknown keys are refused, and values are immutable after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _wrap_single_values(cls, tree: Any) -> Any:
        """Accept one value for a list of values, except for a field whose own validator splits text into names."""
        if not isinstance(tree, dict):
            return tree
        list_fields = find_list_fields(cls)
        return {key: wrap_single_value(value) if key in list_fields else value for key, value in tree.items()}


@cache
def find_list_fields(section: type[Section]) -> frozenset[str]:
    """Return the names of the fields with lists of values, without those whose own validator splits text.

    Before-validators of list fields split text, such as "attention.query,mlp.out".
    """
    return frozenset(
        name
        for name, field in section.model_fields.items()
        if "list[" in str(field.annotation) and not any(isinstance(item, BeforeValidator) for item in field.metadata)
    )


def wrap_single_value(value: Any) -> Any:
    """Return text or a number as a list with one item, and other values unchanged.

    Empty text stays text, so that validation refuses it: in a shell it comes from a variable that is not set.
    """
    if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
        return [value]
    return value


def expand_home(value: Any) -> Any:
    """Return a path, or a list of paths, with a leading ~ or ~USER replaced by the home folder.

    A shell expands words of a command line, but not text in a file or after an equals sign. Raises a pydantic error if
    the home folder is unknown.
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


def check_encoding(name: str, value: Any) -> None:
    """Raise ConfigError for text that cannot be written to a file: command-line bytes that are not UTF-8."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{name}={text!r} contains bytes that are not UTF-8; write it in UTF-8")
