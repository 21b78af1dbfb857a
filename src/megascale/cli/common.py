"""What commands share: options that are settings, and packages that a command needs."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.errors import ConfigError, describe_install

if TYPE_CHECKING:
    from megascale.config import Config

# Commands that take overrides let typer pass unknown options through to `config.load_command_line`.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

# The machine that `plan` and `simulate` plan for where none is named: the MegaScale paper's, A100 80 GB.
DEFAULT_CLUSTER, DEFAULT_DEVICE = "a100-roce", "A100"


def load_for_gpus(file: Path | None, words: list[str]) -> Config:
    """Settings of what GPUs would do, asked of a machine that may have none: bfloat16 where nobody says otherwise."""
    from megascale.config import load_command_line, with_precision

    return with_precision(load_command_line(file, words), bfloat16=True)


PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp", ".eps")  # formats that matplotlib writes by itself


def check_picture(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the file of an option that draws a picture, its folder made; ConfigError naming the option and formats."""
    if path is None:
        return None
    option = parameter.opts[0]
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"{option}={path}: pictures are written as {', '.join(PICTURES)}; give one of these suffixes")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be written: {error.strerror or error}") from None
    return path


def need(module: str, extra: str) -> None:
    """ConfigError with the remedy if an optional package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"this command needs the package {module}; {describe_install(extra)}")


def finite(value: float | None) -> float | None:
    """Return an option's value; typer.BadParameter for NaN and infinity, which its bounds let pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number; give one such as 2.5")
    return value


def write_text(path: Path, text: str, option: str) -> None:
    """Write a small file that an option named; ConfigError naming it if that cannot be."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be written: {error.strerror or error}") from None
