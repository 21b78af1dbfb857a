"""`megascale config`: what settings do, their types, defaults and ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from megascale.config.reference import Setting


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(config)


def config(
    words: str = typer.Argument(
        "", metavar="SECTION|KEY", help="A section, a key or a part of one; none: the sections.", show_default=False
    ),
    file: Path | None = typer.Option(
        None, "--file", "-f", help="Say what this configuration sets otherwise than the defaults.", show_default=False
    ),
    schema: bool = typer.Option(False, "--schema", help="Print a JSON schema of configuration files, for editors."),
    markdown: bool = typer.Option(False, "--markdown", help="Print all settings as the documents' page."),
) -> None:
    """Say what settings do: type, default, range. Changes nothing.

    Examples:

      megascale config

      megascale config parallel

      megascale config train.micro_batch

      megascale config precision

      megascale config --file examples/stdlib.toml

      megascale config --schema > megascale.schema.json
    """
    from megascale.config import reference

    if schema:
        typer.echo(json.dumps(reference.make_json_schema(), indent=1))
        return
    if markdown:
        typer.echo(reference.markdown(), nl=False)
        return
    if file is not None:
        from megascale.config import load

        print_differences(reference.list_differences(load(file)), words)
        return
    if not words:
        _print_sections(reference.describe_sections())
        return
    found = reference.find_settings(words)
    if len(found) == 1:
        _print_one(found[0])
    else:
        _print_table(found, words)


def print_differences(rows: list[tuple[str, str, str]], words: str = "") -> None:
    """Settings that are not at their defaults, as one table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "default", box=None, padding=(0, 2), header_style="bold")
    for key, value, default in rows:
        if key.startswith(words):
            table.add_row(f"[bold]{key}[/bold]", _shown(value), f"[dim]{_shown(default)}[/dim]")
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    else:
        console.print("every setting is at its default")


def _shown(value: str) -> str:
    from rich.markup import escape

    return escape(value) if value else "unset"


def _print_sections(sections: dict[str, str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from megascale.config import reference

    table = Table("section", "keys", "what it sets", box=None, padding=(0, 2), header_style="bold")
    for name, about in sections.items():
        table.add_row(f"[bold]{name}[/bold]", str(len(reference.list_settings(name))), escape(about))
    console = Console(highlight=False)
    console.print(table)
    console.print("\nmegascale config SECTION lists its keys, megascale config SECTION.KEY explains one.", markup=False)


def _print_table(found: list[Setting], words: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("key", "default", "what it does", box=None, padding=(0, 1), header_style="bold")
    for setting in found:
        about = f"{setting.description} [dim]({escape(setting.describe_values())})[/dim]"
        table.add_row(f"[bold]{setting.key}[/bold]", _shown(setting.default), about)
    Console(highlight=False).print(table)


def _print_one(setting: Setting) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    section, _, key = setting.key.partition(".")
    example = setting.default or (setting.choices[0] if setting.choices else "VALUE")
    table = Table.grid(padding=(0, 2))
    table.add_row("[bold]does[/bold]", escape(setting.description))
    table.add_row("[bold]values[/bold]", escape(setting.describe_values()))
    table.add_row("[bold]default[/bold]", _shown(setting.default))
    table.add_row("[bold]command line[/bold]", escape(f"--{setting.key}={example.strip(chr(34))}"))
    table.add_row("[bold]file[/bold]", escape(f"[{section}]\n{key} = {example}"))
    console = Console(highlight=False)
    console.print(f"[bold]{setting.key}[/bold]")
    console.print(table)
