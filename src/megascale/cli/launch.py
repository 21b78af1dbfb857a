"""`megascale launch`: train with a driver, agents and spares that keep the run going by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.cli.common import OVERRIDES

if TYPE_CHECKING:
    from megascale.config import Config


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(context_settings=OVERRIDES)
    def launch(
        context: typer.Context,
        file: str = typer.Argument(
            None, metavar="FILE", help="Configuration, such as examples/stdlib.toml.", show_default=False
        ),
        nodes: int = typer.Option(None, "--nodes", help="Nodes with ranks; local: a process each."),
        spares: int = typer.Option(None, "--spares", help="Nodes that stand by."),
        dashboard: int = typer.Option(
            None, "--dashboard", metavar="PORT", min=0, max=65535, help="Serve the run's page there meanwhile (0: any)."
        ),
        cluster: str = typer.Option(
            None, "--cluster", help="Where nodes come from: local, ssh, slurm, kubernetes, manual."
        ),
        hosts: Path = typer.Option(None, "--hosts", help="With ssh: file with a machine a line.", show_default=False),
        dry_run: bool = typer.Option(
            False, "--dry-run", help="With slurm, kubernetes: print the batch script or the manifests; start nothing."
        ),
        form: str = typer.Option(
            "nodes", "--form", help="Manifests printed: nodes (as a driver here makes them), driver (as a Job), jobset."
        ),
    ) -> None:
        """Train unattended: faults are found, explained and recovered from.

        A driver watches one agent a node; each agent runs its ranks from a process that has everything imported.
        Every decision and its evidence goes to runs/NAME/journal.sqlite: `megascale events runs/NAME` prints them.
        Kill the driver, and the same command takes the running job over. Ctrl-C saves and ends; the same command
        goes on. Settings as --section.key=value, as for `train`; [resilience] has the windows and budgets.

        Examples:

          megascale launch examples/stdlib.toml --nodes 4 --spares 1 --train.micro_batch=1

          megascale launch examples/stdlib.toml --nodes 2 --resilience.window=3 --checkpoint.interval=20

          megascale launch examples/stdlib.toml --nodes 2 --dashboard 8265

          megascale launch job.toml --resilience.placement=placement.json --resilience.environment=network.env

          megascale launch job.toml --cluster ssh --hosts hosts --nodes 4 --spares 1

          megascale launch job.toml --cluster slurm --nodes 4 --spares 1 --dry-run > job.sbatch

          megascale launch job.toml --cluster kubernetes --nodes 4 --spares 1 --kubernetes.image=registry/megascale:1

          megascale launch job.toml --cluster kubernetes --dry-run --form driver | kubectl apply -f -

          megascale launch job.toml --cluster manual --nodes 2 --resilience.listen=10.0.0.1 --resilience.port=29400
        """
        extra = list(context.args)
        extra += [f"--resilience.nodes={nodes}"] * (nodes is not None)
        extra += [f"--resilience.spares={spares}"] * (spares is not None)
        extra += [f"--resilience.cluster={cluster}"] * (cluster is not None)
        extra += [f"--resilience.hosts={hosts}"] * (hosts is not None)
        from megascale.config import load_command_line, with_precision

        config = load_command_line(file, extra)
        if dry_run:
            if config.resilience.cluster == "kubernetes":
                _print_manifests(config, form)
            else:
                _print_batch_script(config, [*([file] if file else []), *extra])
            return
        from rich.console import Console

        from megascale import api
        from megascale.cli.common import need
        from megascale.core.layout import lay_out
        from megascale.core.preflight import Share, check_host
        from megascale.data.dataset.presence import check_data

        need("fastapi", "driver")
        from megascale.resilience.driver import start_driver
        from megascale.resilience.driver.launch_checks import check_timeouts, read_job_files

        config, size = start_driver.prepare(config)
        check_timeouts(config)  # with what the cluster chose
        resolved = with_precision(api.resolve(config), bool(size.devices))
        lay_out(resolved, size.world)  # what does not divide is said once, before any process starts
        console = Console(highlight=False, soft_wrap=True)

        def say(who: str, text: str) -> None:
            style = "bold cyan" if who == "driver" else "dim"
            console.print(f"[{style}]{who:>8}[/] ", end="")
            console.print(text, markup=False)

        if not start_driver.is_running(config):  # a job that runs is taken over as it is
            read_job_files(config)
        if start_driver.uses_other_machines(config):
            say("driver", "data, memory and disks are those of other machines: each rank checks its own")
        elif not start_driver.is_running(config):
            check_data(resolved)
            nodes_here = config.resilience.nodes + config.resilience.spares
            share = Share(size.world, 0, size.world, nodes=nodes_here, gpus=bool(size.devices))
            check_host(resolved, share, report=lambda line: say("driver", line))
        if dashboard is None:
            raise typer.Exit(start_driver.drive(config, size, say))
        from megascale.cli.dashboard import serving

        with serving(config.run_folder, dashboard):
            code = start_driver.drive(config, size, say)
        raise typer.Exit(code)


def _print_manifests(config: Config, form: str) -> None:
    """What `kubectl apply` takes, on stdout."""
    from typing import cast

    from megascale.errors import ConfigError
    from megascale.resilience.cluster.kubernetes import gpus_of_a_node
    from megascale.resilience.cluster.kubernetes_manifests import FORMS, Form, manifests, to_yaml

    if form not in FORMS:
        raise ConfigError(f"--form={form} is none of {', '.join(FORMS)}")
    if not config.kubernetes.image:
        raise ConfigError("cluster kubernetes needs the image of the nodes: --kubernetes.image=REGISTRY/NAME:TAG")
    found = manifests(config, cast(Form, form), gpus_of_a_node(config), str(config.run_folder.absolute()))
    typer.echo(to_yaml(found), nl=False)


def _print_batch_script(config: Config, words: list[str]) -> None:
    """What `sbatch` takes, on stdout."""
    import os

    from megascale.errors import ConfigError
    from megascale.resilience.cluster.slurm import gpus_of_a_node
    from megascale.resilience.cluster.slurm_script import batch_script
    from megascale.resilience.driver.state.journal_reader import list_evicted_nodes

    if config.resilience.cluster != "slurm":
        raise ConfigError(
            f"--dry-run is for Slurm and Kubernetes, but resilience.cluster={config.resilience.cluster}; add "
            "--cluster slurm or --cluster kubernetes"
        )
    config.run_folder.parent.mkdir(parents=True, exist_ok=True)  # Slurm writes its log there, or nothing at all
    blocked = list_evicted_nodes(config.run_folder)
    path = os.environ.get("PYTHONPATH", "")
    typer.echo(batch_script(config, gpus_of_a_node(config), words, blocked, path), nl=False)
