"""`megascale bench NAME`: measurements, each a module of `megascale.bench` that prints a table and writes JSON."""

from __future__ import annotations

import importlib
import signal
from types import FrameType

import typer

# Each module of megascale.bench has `register(app)` and imports heavy packages only inside its functions.
BENCHES: tuple[str, ...] = (
    "ablation",
    "alternate",
    "convergence",
    "exposed",
    "init",
    "kernels",
    "layouts",
    "loader",
    "overlap",
    "peers",
    "restarts",
    "schedules",
    "soak",
    "targets",
    "tokenize",
    "train",
    "checkpoint",
    "hang",
    "driver",
    "resilience",
)


def register(app: typer.Typer) -> None:
    """Add `bench` with one sub-command a module."""
    bench = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="rich",
        help="Measure: each prints a table and writes JSON.",
    )

    @bench.callback()
    def _several() -> None:
        """Measure: each bench prints a table and writes JSON. Example: megascale bench kernels --out kernels.json"""
        signal.signal(signal.SIGTERM, _interrupt)  # so that a bench ends the processes that it has started

    for name in BENCHES:
        importlib.import_module(f"megascale.bench.{name}").register(bench)
    app.add_typer(bench, name="bench")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
