"""Options, checks of options, and output as JSON or tables that several commands share."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json
from megascale.errors import ConfigError, DataError, describe_install

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megascale.config import Config
    from megascale.simulate.scenario import Scenario

# Settings of typer for commands that take --section.key=value: unknown options go to `config.load_command_line`.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

# Default machine of `simulate` (a cluster) and of `plan` (a device). Both must name the same GPU.
DEFAULT_CLUSTER = "h100-dgx"
DEFAULT_DEVICE = "H100"

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp", ".eps")  # formats that matplotlib writes without other packages

JSON = typer.Option(False, "--json", help="Print JSON instead of tables.")


def load_for_gpus(file: Path | None, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run on GPUs, with bfloat16 as default precision. This machine needs no GPU.

    Without a FILE argument, typer passes the first override as `file`. Raises ConfigError if the vocabulary is unknown.
    """
    from megascale.config import load_command_line, resolve_precision

    if file is not None and str(file).startswith("--"):
        overrides = join_arguments(file, overrides)
        file = None
    from megascale import api

    config = api.adopt_imported_model(load_command_line(file, list(overrides)))
    if config.model.vocab_size is None and config.data.train and config.checkpoint.start_from is None:
        try:
            config = api.resolve(config)
        except DataError as error:
            raise ConfigError(
                f"model.vocab_size is not set, and the data set with the tokenizer cannot be read: {error}; set "
                "--model.vocab_size=N"
            ) from None
    return resolve_precision(config, has_bfloat16=True)


def has_file_argument(file: Path | None, overrides: Sequence[str]) -> bool:
    """Return whether a command line has a configuration file, before or after its settings."""
    if file is not None and not str(file).startswith("-"):
        return True
    return any(argument.endswith(".toml") and not argument.startswith("-") for argument in overrides)


def make_scenario(
    config: Config, gpus: int, cluster: str, calibration: str | None = None, software: str | None = None
) -> Scenario:
    """Return the scenario of a configuration on a cluster.

    Args:
        cluster: name of a shipped cluster, or TOML file.
        calibration: name of a shipped calibration, or TOML file; None: the cluster's own.
        software: name of the software stack; None: MegaScale's for the GPU. Whether blocks are parallel and attention
            has a window is taken from the configuration.
    """
    from megascale.simulate.calibration import load_calibration
    from megascale.simulate.cluster import load_cluster
    from megascale.simulate.scenario import Scenario, make_engine_software, match_hosts
    from megascale.simulate.software import choose_engine_stack
    from megascale.simulate.software import find_stack as load_stack

    config, machine = match_hosts(config, load_cluster(cluster))
    stack_name = software or choose_engine_stack(machine)
    stack = load_stack(stack_name)
    constants = load_calibration(calibration, machine.name, stack.family)
    return Scenario(
        config,
        gpus,
        cluster=machine,
        calibration=constants,
        software=make_engine_software(config, stack),
        label=stack_name,
        base=stack,
    )


def print_choice(config: Config, reason: str) -> None:
    """Print layout and batch of a configuration as flags, on one line that can be pasted.

    Args:
        reason: text before the flags.
    """
    from megascale.simulate.defaults import format_flags

    make_console().print(f"[bold]{reason}[/bold] {format_flags(config)}", soft_wrap=True)


def check_picture(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path of an option that draws a picture, after making its folder; a callback for typer.

    Raises ConfigError for an unknown format, or if the folder cannot be made.
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
    """Return an option's value; a callback for typer. Raises typer.BadParameter for NaN, and for infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number; give one such as 2.5")
    return value


def require_package(module: str, extra: str) -> None:
    """Raise ConfigError if a package of an extra is not installed.

    Args:
        module: module of the package.
        extra: extra that installs the package.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"this command needs the package {module}; {describe_install(extra)}")


def write_text(path: Path, text: str, option: str) -> None:
    """Write the file that an option names. Raises ConfigError that names the option if it cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be written: {error.strerror or error}") from None


def parse_numbers(option: str, text: str, example: str) -> list[int]:
    """Return the integers of a comma-separated option. Raises ConfigError with `example` for other text."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}={text!r} must be integers, such as {example}") from None


def split_option(text: str | None) -> list[str]:
    """Return the words of a comma-separated option; an empty list for None or empty text."""
    if text:
        return [word.strip() for word in text.split(",")]
    return []


def print_json(record: Any, indent: int | None = None) -> None:
    """Print a record as strict JSON."""
    typer.echo(strict_json.dumps(record, indent=indent))


def make_console(**options: Any) -> Console:
    """Return a console that does not colour numbers, and does not cut words of tables."""
    from megascale.core.output_console import OutputConsole

    return OutputConsole(highlight=False, **options)


@contextmanager
def show_progress(action: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal how far an action is. Yield the function that receives the progress as text."""
    with make_console(stderr=True).status(action) as status:
        yield lambda text: status.update(f"{action}: {text}")


def make_text_table(*headers: str) -> Table:
    """Return a table of text, without lines."""
    from rich.table import Table

    return Table(*headers, box=None, padding=(0, 2))


def make_number_table(headers: Sequence[str], left_aligned: Sequence[str] = ()) -> Table:
    """Return a table of numbers. All columns but the first and those in `left_aligned` are aligned right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        is_left = index == 0 or header in left_aligned
        table.add_column(header, justify="left" if is_left else "right", overflow="fold")
    return table


def add_rows(table: Table, rows: Iterable[Iterable[str]]) -> None:
    """Add rows of cells to a table. Brackets in cells are markup."""
    for row in rows:
        table.add_row(*row)


def print_marked(console: Console, mark: str, style: str, text: str) -> None:
    """Print a line that begins with a coloured word. Brackets in `text` are printed as they are."""
    from rich.text import Text

    console.print(Text.assemble((mark, style), " ", text), soft_wrap=True)


def join_limited(values: Sequence[Any], limit: int) -> str:
    """Return at most `limit` values, separated by commas, with an ellipsis if there are more."""
    texts = [str(value) for value in values[:limit]]
    if len(values) > limit:
        texts.append("...")
    return ", ".join(texts)


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, which is in the plural unless the count is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_optional(value: Any, pattern: str) -> str:
    """Return `pattern.format(value)`, or "" for None."""
    return "" if value is None else pattern.format(value)


def join_arguments(file: object, overrides: Sequence[str]) -> list[str]:
    """Return the overrides as arguments of a command, after `file` unless it is None."""
    if file:
        return [str(file)] + list(overrides)
    return list(overrides)


def number_or_none(value: float) -> float | None:
    """Return a number for JSON, or None for infinity and NaN, which stand for an unknown number."""
    return float(value) if math.isfinite(value) else None
