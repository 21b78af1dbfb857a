"""The command line of `python -m benchmarks` and `python -m tests.chaos`."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from benchmarks.harness.clone import export_python_path
from megascale.cli.bench import make_lazy_group, prepare_children
from megascale.cli.main import run_app


def make_app(program: str, modules: Mapping[str, str], details: str) -> typer.Typer:
    """Return a command line with one command per module.

    Args:
        program: the words that start it.
        modules: command name -> dotted module, see `make_lazy_group`.
        about: what its help says first.
    """
    app = typer.Typer(
        name=program,
        cls=make_lazy_group(modules),
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help=details,
    )
    app.callback()(prepare_children)
    return app


def run(app: typer.Typer) -> None:
    """Run a command line of the clone. Its child processes import `benchmarks` and `tests` from any folder."""
    export_python_path()
    run_app(lambda: app)
