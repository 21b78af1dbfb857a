"""`python -m tests.chaos NAME`, from the root of a clone: campaigns that break real jobs and check what follows.

Each campaign prints a table, writes JSON, and ends with exit code 1 if a result is wrong. They take minutes to hours,
so that `make test` runs a smoke test per kind only.
"""

from __future__ import annotations

import typer

from benchmarks.harness.clone import export_python_path
from megascale.cli.bench import prepare_children
from megascale.cli.lazy_group import lazy_group
from megascale.cli.main import run_app

# Each module has `register(app)`.
CAMPAIGNS: dict[str, str] = {
    "faults": "tests.chaos.faults.command",
    "hour": "tests.chaos.local.hour",
    "hang": "tests.chaos.local.hang",
    "restarts": "tests.chaos.local.restarts",
    "checkpoint": "tests.chaos.checkpoint.command",
    "loader": "tests.chaos.data.command",
    "soak": "tests.chaos.soak.command",
    "fuzz": "tests.chaos.fuzz.command",
    "hostile": "tests.chaos.hostile.command",
    "driver": "tests.chaos.driver.load",
    "many-nodes": "tests.chaos.machines.many_nodes",
    "kubernetes-scale": "tests.chaos.kubernetes.scale",
}

app = typer.Typer(
    name="python -m tests.chaos",
    cls=lazy_group(CAMPAIGNS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Break real jobs and check what follows. Example: python -m tests.chaos faults --kind kill-rank --runs 1",
)
app.callback()(prepare_children)


def main() -> None:
    """Run the campaign that the command line names."""
    export_python_path()
    run_app(lambda: app)


if __name__ == "__main__":
    main()
