"""What commands share: options that are settings, and packages that a command needs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megascale.errors import ConfigError, remedy

# Commands that take overrides let typer pass unknown options through to `config.load_command_line`.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

# The machine that `plan` and `simulate` plan for where none is named: the MegaScale paper's, A100 80 GB.
DEFAULT_CLUSTER, DEFAULT_DEVICE = "a100-roce", "A100"


def need(module: str, extra: str) -> None:
    """ConfigError with the remedy if an optional package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"this command needs the package {module}; {remedy(extra)}")


def write_text(path: Path, text: str, option: str) -> None:
    """Write a small file that an option named; ConfigError naming it if that cannot be."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be written: {error.strerror or error}") from None
