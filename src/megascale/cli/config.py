"""`megascale config`: describe the settings, their types, defaults and ranges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.cli.common import make_console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from megascale.config.reference import Setting


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(config)


def config(
    name: str = typer.Argument(
        "", metavar="SECTION|KEY", help="A section, a key or a part of one; default: all sections.", show_default=False
    ),
    file: Path | None = typer.Option(
        None, "--file", "-f", help="Print this configuration's differences from the defaults.", show_default=False
    ),
    schema: bool = typer.Option(False, "--schema", help="Print a JSON schema of configuration files, for editors."),
    markdown: bool = typer.Option(False, "--markdown", help="Print all settings as the page of the documents."),
) -> None:
    """Describe settings: type, default, range. Changes nothing.

    Examples:

      megascale config

      megascale config parallel

      megascale config train.micro_batch

      megascale config precision

      megascale config --file examples/stdlib.toml

      megascale config --schema > megascale.schema.json
    """
    from megascale.config import reference
    from megascale.config.registry import load_plugins

    if not markdown:  # the page in docs/ has no settings of plugins
        load_plugins()
    if schema:
        print_json(reference.make_json_schema(), indent=1)
    elif markdown:
        typer.echo(reference.render_markdown(), nl=False)
    elif file is not None:
        from megascale.config import load

        _print_differences(reference.list_differences(load(file)), name)
    elif not name:
        _print_sections()
    else:
        settings = reference.find_settings(name)
        if len(settings) == 1:
            _print_setting(settings[0])
        else:
            _print_settings(settings)


def _make_table(*headers: str, gap: int = 2) -> Table:
    """Return a table without lines. `gap` is the number of blanks on either side of a column."""
    from rich.table import Table

    return Table(*headers, box=None, padding=(0, gap), header_style="bold")


def _print_differences(rows: list[tuple[str, str, str]], prefix: str) -> None:
    """Print the settings whose value differs from the default and whose key begins with `prefix`."""
    table = _make_table("setting", "value", "default")
    for key, value, default in rows:
        if key.startswith(prefix):
            table.add_row(f"[bold]{key}[/bold]", _format_value(value), f"[dim]{_format_value(default)}[/dim]")
    make_console().print(table if table.row_count else "every setting is at its default")


def _format_value(value: str) -> str:
    from rich.markup import escape

    return escape(value) if value else "unset"


def _print_sections() -> None:
    """Print a row per section."""
    from rich.markup import escape

    from megascale.config import reference

    table = _make_table("section", "keys", "what it sets")
    for name, description in reference.describe_sections().items():
        table.add_row(f"[bold]{name}[/bold]", str(len(reference.list_settings(name))), escape(description))
    console = make_console()
    console.print(table)
    console.print("\nmegascale config SECTION lists its keys, megascale config SECTION.KEY explains one.", markup=False)


def _print_settings(settings: list[Setting]) -> None:
    """Print a row per setting."""
    from rich.markup import escape

    table = _make_table("key", "default", "what it does", gap=1)
    for setting in settings:
        description = f"{escape(setting.description)} [dim]({escape(setting.describe_values())})[/dim]"
        table.add_row(f"[bold]{setting.key}[/bold]", _format_value(setting.default), description)
    make_console().print(table)


def _print_setting(setting: Setting) -> None:
    """Print one setting in full, with an example for the command line and one for a file."""
    from rich.markup import escape
    from rich.table import Table

    section, _, key = setting.key.partition(".")
    example = setting.default
    if not example:
        example = setting.choices[0] if setting.choices else "VALUE"
    table = Table.grid(padding=(0, 2))
    table.add_row("[bold]does[/bold]", escape(setting.description))
    table.add_row("[bold]values[/bold]", escape(setting.describe_values()))
    table.add_row("[bold]default[/bold]", _format_value(setting.default))
    argument = example.strip('"')  # the shell needs no quotation marks
    table.add_row("[bold]command line[/bold]", escape(f"--{setting.key}={argument}"))
    table.add_row("[bold]file[/bold]", escape(f"[{section}]\n{key} = {example}"))
    console = make_console()
    console.print(f"[bold]{setting.key}[/bold]")
    console.print(table)
