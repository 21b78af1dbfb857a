"""Parts that commands share: options, checks of options, optional packages, JSON and tables."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json
from megascale.errors import ConfigError, DataError, describe_install

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megascale.config import Config
    from megascale.simulate.step import Scenario

# Typer passes unknown options of these commands through to `config.load_command_line`.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

# The machine that `plan` and `simulate` assume by default. They change together.
DEFAULT_CLUSTER = "h100-dgx"
DEFAULT_DEVICE = "H100"

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp", ".eps")  # formats that matplotlib writes without other packages

JSON = typer.Option(False, "--json", help="Print JSON instead of tables.")


def load_for_gpus(file: Path | None, overrides: Sequence[str]) -> Config:
    """Load the configuration of a run on GPUs on a machine that may have none: bfloat16 is the default precision.

    Without a FILE argument, typer passes the first override as `file`.
    """
    from megascale.config import load_command_line, resolve_precision

    if file is not None and str(file).startswith("--"):
        file, overrides = None, join_arguments(file, overrides)
    from megascale import api

    config = api.adopt_imported_model(load_command_line(file, list(overrides)))
    if config.model.vocab_size is None and config.data.train and config.checkpoint.start_from is None:
        try:
            config = api.resolve(config)
        except DataError as error:
            raise ConfigError(
                f"model.vocab_size is not set, and the data that would give it cannot be read: {error}; set "
                "--model.vocab_size=N"
            ) from None
    return resolve_precision(config, has_bfloat16=True)


def names_file(file: Path | None, overrides: Sequence[str]) -> bool:
    """Return whether a command line names a configuration file, before or after its settings."""
    if file is not None and not str(file).startswith("-"):
        return True
    return any(argument.endswith(".toml") and not argument.startswith("-") for argument in overrides)


def make_scenario(
    config: Config, gpus: int, cluster: str, calibration: str | None = None, software: str | None = None
) -> Scenario:
    """Return the configuration under a software stack, by default MegaScale's for the GPU.

    Parallel block and sliding window always come from the configuration.
    """
    from megascale.simulate.calibration import load_calibration
    from megascale.simulate.cluster import load_cluster
    from megascale.simulate.software import own_stack
    from megascale.simulate.software import stack as load_stack
    from megascale.simulate.step import Scenario, engine_software

    machine = load_cluster(cluster)
    stack_name = software or own_stack(machine)
    stack = load_stack(stack_name)
    constants = load_calibration(calibration, machine.name, stack.family)
    return Scenario(config, gpus, machine, constants, engine_software(config, stack), stack_name, base=stack)


def print_choice(config: Config, reason: str) -> None:
    """Print a layout and a batch as flags to paste. The line is never broken."""
    from megascale.simulate.defaults import format_flags

    make_console().print(f"[bold]{reason}[/bold] {format_flags(config)}", soft_wrap=True)


def check_picture(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the file of an option that draws a picture, after making its folder.

    Raises ConfigError that names the option and the known formats.
    """
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


def check_finite(value: float | None) -> float | None:
    """Return an option's value. Raise typer.BadParameter for NaN and infinity, which bounds let pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number; give one such as 2.5")
    return value


def require(module: str, extra: str) -> None:
    """Raise ConfigError with the remedy if an optional package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"this command needs the package {module}; {describe_install(extra)}")


def write_text(path: Path, text: str, option: str) -> None:
    """Write a small file that an option names. Raise ConfigError that names the option if it cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be written: {error.strerror or error}") from None


def parse_numbers(option: str, text: str, example: str) -> list[int]:
    """Return the integers of a comma-separated option. Raise ConfigError with an example otherwise."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}={text!r} must be whole numbers, such as {example}") from None


def split_option(text: str | None) -> list[str]:
    """Return the parts of a comma-separated option; an empty list without it."""
    if text:
        return [part.strip() for part in text.split(",")]
    return []


def print_json(record: Any, indent: int | None = None) -> None:
    """Print a record as strict JSON."""
    typer.echo(strict_json.dumps(record, indent=indent))


def make_console(**options: Any) -> Console:
    """Return a console that does not colour numbers."""
    from rich.console import Console

    return Console(highlight=False, **options)


def make_list(*headers: str) -> Table:
    """Return a table without lines, for text."""
    from rich.table import Table

    return Table(*headers, box=None, padding=(0, 2))


def make_figures(headers: Sequence[str], left_aligned: Sequence[str] = ()) -> Table:
    """Return a table of numbers, which are aligned right but for the first column and the columns `left_aligned`."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, header in enumerate(headers):
        is_left = number == 0 or header in left_aligned
        table.add_column(header, justify="left" if is_left else "right", overflow="fold")
    return table


def add_rows(table: Table, rows: Iterable[Iterable[str]]) -> None:
    """Add rows of cells to a table."""
    for row in rows:
        table.add_row(*row)


def join_first(items: Sequence[Any], limit: int) -> str:
    """Return the first items, separated by commas, with an ellipsis if there are more."""
    shown = list(map(str, items[:limit]))
    if len(items) > limit:
        shown.append("...")
    return ", ".join(shown)


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_optional(value: Any, pattern: str) -> str:
    """Return `pattern` with the value, or an empty text if the value is None."""
    return "" if value is None else pattern.format(value)


def join_arguments(file: object, overrides: Sequence[str]) -> list[str]:
    """Return FILE, if it is given, and the overrides as arguments of a command."""
    if file:
        return [str(file)] + list(overrides)
    return list(overrides)


def number_or_none(value: float) -> float | None:
    """Return a figure for JSON: None if it is infinite or NaN, which means that it is unknown."""
    return float(value) if math.isfinite(value) else None
