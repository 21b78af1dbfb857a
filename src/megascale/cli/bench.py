"""`megascale bench NAME`: the measurements behind the documents, one module of `megascale.bench` each."""

from __future__ import annotations

import importlib

import typer

# Each module has `register(app)` that adds one command and imports heavy packages only inside its functions.
BENCHES: tuple[str, ...] = ("init",)


def register(app: typer.Typer) -> None:
    """Add the `bench` group."""
    bench = typer.Typer(
        name="bench",
        help="Measure a part of the system: a table on the terminal, figures in a JSON file.",
        no_args_is_help=True,
    )
    for name in BENCHES:
        importlib.import_module(f"megascale.bench.{name}").register(bench)
    app.add_typer(bench)
