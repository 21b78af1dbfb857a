"""`python -m benchmarks NAME`, from the root of a clone: each benchmark prints a table and writes JSON."""

from __future__ import annotations

import typer

from benchmarks.harness.clone import export_python_path
from megascale.cli.bench import prepare_children
from megascale.cli.lazy_group import lazy_group
from megascale.cli.main import run_app

# Each module has `register(app)`.
BENCHMARKS: dict[str, str] = {
    "train": "megascale.bench.train",
    "kernels": "megascale.bench.kernels.command",
    "ablation": "benchmarks.training.ablation",
    "alternate": "benchmarks.training.alternate",
    "convergence": "benchmarks.training.convergence",
    "exposed": "benchmarks.training.exposed",
    "gradients": "benchmarks.training.gradient_error",
    "layouts": "benchmarks.training.layouts",
    "overlap": "benchmarks.training.overlap",
    "peers": "benchmarks.training.peer_comparison",
    "schedules": "benchmarks.training.schedules",
    "targets": "benchmarks.targets.command",
    "checkpoint": "benchmarks.checkpoint.command",
    "loader": "benchmarks.data.loader",
    "tokenize": "benchmarks.data.tokenize",
    "init": "benchmarks.rendezvous.init",
    "observe": "benchmarks.observe.command",
    "dashboard": "benchmarks.observe.dashboard",
}

app = typer.Typer(
    name="python -m benchmarks",
    cls=lazy_group(BENCHMARKS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure MegaScale: each benchmark prints a table and writes JSON. Example: python -m benchmarks schedules",
)
app.callback()(prepare_children)


def main() -> None:
    """Run the benchmark that the command line names."""
    export_python_path()
    run_app(lambda: app)


if __name__ == "__main__":
    main()
