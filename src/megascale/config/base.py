"""What every section of the configuration shares."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from megascale.errors import ConfigError

# Upper bounds keep a slip (2e9 for 2e3) from starting loops and allocations of that size: far above what anybody
# trains, and what they let through is checked against the machine before anything starts (core/preflight.py).
DEEP = 10_000  # layers and pipeline stages


MOST = 1_000_000_000_000  # counts that cost nothing by themselves


class Section(BaseModel):
    """A section of the tree: unknown keys are refused, values may not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _check_text(name: str, value: Any) -> None:
    """ConfigError for text that no file can hold: bytes of a command line that are not UTF-8."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{name}={text!r} holds bytes that are not UTF-8; write it in UTF-8")
