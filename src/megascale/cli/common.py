"""What commands share: reading a configuration file with `--section.key=value` overrides."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megascale import config
from megascale.errors import ConfigError, remedy

# Commands that take overrides let typer pass unknown options through to `load`.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def load(file: Path | None, extra: list[str]) -> config.Config:
    """The validated configuration of FILE with overrides, `--a.b=c` or `--a.b c`."""
    overrides: list[str] = []
    words = iter(extra)
    for word in words:
        if not word.startswith("--") or "." not in word.split("=")[0]:
            raise ConfigError(f"unknown argument {word!r}; settings are given as --section.key=value")
        if "=" not in word:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{word} has no value; write {word}=VALUE")
            word = f"{word}={value}"
        overrides.append(word)
    return config.load(file, overrides)


def need(module: str, extra: str) -> None:
    """ConfigError with the remedy if an optional package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"this command needs the package {module}; {remedy(extra)}")
