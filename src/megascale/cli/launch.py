"""`megascale launch`: train with a driver, agents and spares that keep the run going by themselves."""

from __future__ import annotations

from pathlib import Path

import typer

from megascale.cli.common import OVERRIDES


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(context_settings=OVERRIDES)
    def launch(
        context: typer.Context,
        file: Path = typer.Argument(..., help="Configuration, such as examples/stdlib.toml.", show_default=False),
        nodes: int = typer.Option(None, "--nodes", help="Nodes with ranks; here each is a local process."),
        spares: int = typer.Option(None, "--spares", help="Nodes that stand by."),
    ) -> None:
        """Train unattended: faults are found, explained and recovered from.

        A driver watches one agent a node; each agent runs its ranks from a process that has everything imported.
        Every decision and its evidence goes to runs/NAME/journal.sqlite: `megascale events runs/NAME` prints them.
        Kill the driver, and the same command takes the running job over. Ctrl-C saves and ends; the same command
        goes on. Settings as --section.key=value, as for `train`; [resilience] has the windows and budgets.

        Examples:

          megascale launch examples/stdlib.toml --nodes 4 --spares 1 --train.micro_batch=1

          megascale launch examples/stdlib.toml --nodes 2 --resilience.window=3 --checkpoint.interval=20
        """
        extra = list(context.args)
        extra += [f"--resilience.nodes={nodes}"] * (nodes is not None)
        extra += [f"--resilience.spares={spares}"] * (spares is not None)
        from megascale.config import load_command_line

        config = load_command_line(file, extra)
        from rich.console import Console

        from megascale import api
        from megascale.cli.common import need
        from megascale.core.layout import lay_out
        from megascale.core.preflight import Share, preflight
        from megascale.data.dataset.presence import check_data

        need("fastapi", "driver")
        from megascale.resilience.driver import start_driver
        from megascale.resilience.driver.timeouts import check_timeouts

        check_timeouts(config)
        config, size = start_driver.prepare(config)
        resolved = api.resolve(config)
        lay_out(resolved, size.world)  # what does not divide is said once, before any process starts
        console = Console(highlight=False, soft_wrap=True)

        def say(who: str, text: str) -> None:
            style = "bold cyan" if who == "driver" else "dim"
            console.print(f"[{style}]{who:>8}[/] ", end="")
            console.print(text, markup=False)

        if not start_driver.is_running(config):  # a job that runs is taken over as it is
            check_data(resolved)
            nodes_here = config.resilience.nodes + config.resilience.spares
            share = Share(size.world, 0, size.world, nodes=nodes_here, gpus=bool(size.devices))
            preflight(resolved, share, say=lambda line: say("driver", line))
        raise typer.Exit(start_driver.drive(config, size, say))
