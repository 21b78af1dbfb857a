"""`megascale launch|agent`: train with a driver, agents and spares; run an agent on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import OVERRIDES, join_arguments, make_console, require_package
from megascale.cli.help_pages import ReadableCommand
from megascale.errors import ConfigError, DataError, FitError

if TYPE_CHECKING:
    from megascale.config import Config
    from megascale.core.layout import Layout
    from megascale.resilience.driver.launch_checks import JobSize

_COMMON_VOCABULARY = 32_768  # assumed if the tokenizer of a job is not on this machine


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=LaunchCommand, context_settings=OVERRIDES)(launch)
    app.command()(agent)


class LaunchCommand(ReadableCommand):
    """The command `launch`. Arguments after `--` are the command line of another trainer."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before `--`, and keep those after it in `ctx.obj` (None without `--`)."""
        if "--" in args:
            position = args.index("--")
            ctx.obj = args[position + 1 :]
            args = args[:position]
        return super().parse_args(ctx, args)


def launch(
    context: typer.Context,
    file: str = typer.Argument(
        None, metavar="FILE", help="Configuration, such as examples/stdlib.toml.", show_default=False
    ),
    nodes: int = typer.Option(
        None,
        "--nodes",
        help="Number of nodes with ranks (default 1). Of cluster local, nodes are processes of this machine.",
    ),
    spares: int = typer.Option(None, "--spares", help="Number of spare nodes, which replace failed nodes."),
    dashboard: int = typer.Option(
        None, "--dashboard", metavar="PORT", min=0, max=65535, help="Serve the run's page on this port (0: any)."
    ),
    cluster: str = typer.Option(
        None, "--cluster", help="Source of nodes: local (default), ssh, slurm, kubernetes, manual."
    ),
    hosts: Path = typer.Option(None, "--hosts", help="With ssh: file with one machine per line.", show_default=False),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="With slurm, kubernetes: print the batch script or the manifests; start nothing."
    ),
    per_node: int = typer.Option(
        None, "--per-node", min=1, help="With -- COMMAND: ranks per node. Default: one per GPU."
    ),
    form: str = typer.Option(
        "nodes",
        "--form",
        help="Manifests to print: nodes (as a driver on this machine makes them), driver (as a Job), jobset.",
    ),
) -> None:
    """Train unattended: faults are detected, explained and recovered from.

    A driver watches one agent per node. Each agent forks its ranks from a process that has imported everything. Every
    decision and its evidence goes to runs/NAME/journal.sqlite, and `megascale events runs/NAME` prints them. If the
    driver dies, the same command takes over the running job. Ctrl-C saves and ends; the same command resumes. Settings
    are given as --section.key=value, as for `train`; [resilience] has the windows and budgets.

    Words after `--` are the command of another trainer, which then runs in torchrun's environment instead of this
    package's trainer (docs/keep-your-trainer.md).

    Examples:

    - this machine as four nodes and a spare:
      `megascale launch examples/stdlib.toml --nodes 4 --spares 1 --train.micro_batch=1`

    - with a page in the browser: `megascale launch examples/stdlib.toml --nodes 2 --dashboard 8265`

    - detect a silent node after 3 s: `megascale launch examples/stdlib.toml --nodes 2 --resilience.window=3`

    - another trainer: `megascale launch --nodes 2 --spares 1 --per-node 8 -- python train.py --config base.yaml`

    - a list of machines: `megascale launch job.toml --cluster ssh --hosts hosts --nodes 4 --spares 1`

    - a batch script for Slurm: `megascale launch job.toml --cluster slurm --nodes 4 --spares 1 --dry-run > job.sbatch`

    - pods of Kubernetes:
      `megascale launch job.toml --cluster kubernetes --nodes 4 --spares 1 --kubernetes.image=registry/megascale:1`

    - a driver that is a pod, too:
      `megascale launch job.toml --cluster kubernetes --dry-run --form driver | kubectl apply -f -`

    - agents that you start yourself:
      `megascale launch job.toml --cluster manual --nodes 2 --resilience.listen=10.0.0.1 --resilience.port=29400`

    - ranks near each other in the network:
      `megascale launch job.toml --resilience.placement=placement.json --resilience.environment=network.env`

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit or divide, 4 bad data or checkpoint, 130 interrupted.
    """
    options = {"nodes": nodes, "spares": spares, "cluster": cluster, "hosts": hosts}
    overrides = [f"--resilience.{key}={value}" for key, value in options.items() if value is not None]
    overrides = context.args + overrides
    if context.obj is not None:
        overrides += _make_foreign_overrides(context.obj, per_node)
    elif per_node is not None:
        raise ConfigError(
            f"--per-node={per_node} is for another trainer's command; add -- COMMAND, or use parallel.data"
        )
    from megascale.config import load_command_line

    config = load_command_line(file, overrides)
    if config.foreign.per_node is not None:
        # Clusters request one GPU per rank.
        parallel = config.parallel.model_copy(update={"gpus_per_host": config.foreign.per_node})
        config = config.model_copy(update={"parallel": parallel})
    if not dry_run:
        raise typer.Exit(_drive(config, dashboard))
    if config.resilience.cluster == "kubernetes":
        _print_manifests(config, form)
    else:
        _print_batch_script(config, join_arguments(file, overrides))


def _make_foreign_overrides(command: list[str], per_node: int | None) -> list[str]:
    """Return the settings [foreign] of another trainer's command line, as overrides."""
    if not command:
        raise ConfigError("-- is not followed by a command; write -- python train.py, for example")
    overrides = [f"--foreign.command={json.dumps(command)}"]
    if per_node is not None:
        overrides.append(f"--foreign.per_node={per_node}")
    return overrides


def _drive(config: Config, dashboard: int | None) -> int:
    """Check the job, run its driver, and return the exit code."""
    require_package("fastapi", "driver")
    if dashboard is not None:
        from megascale.cli.dashboard import check_port

        check_port(dashboard)
    if config.resilience.otlp:
        require_package("opentelemetry", "otel")
    from megascale.resilience.driver import start_driver
    from megascale.resilience.driver.launch_checks import check_timeouts, read_job_files

    config, size = start_driver.prepare(config)
    check_timeouts(config)  # after `prepare`, which sets timeouts that depend on the cluster
    is_foreign = bool(config.foreign.command)  # another trainer's command runs instead of this package's trainer
    if not is_foreign:
        # A wrong layout raises its error here once, and not on each rank.
        resolved, layout = _resolve_layout(config, size)
    console = make_console(soft_wrap=True)

    def log_line(source: str, text: str) -> None:
        style = "bold cyan" if source == "driver" else "dim"
        console.print(f"[{style}]{source:>8}[/] ", end="")
        console.print(text, markup=False)

    # This driver takes over a job that is running, with the files and data that the job started with.
    is_running = start_driver.is_running(config)
    if not is_running:
        read_job_files(config)  # raises an error for a missing or malformed file
    if start_driver.uses_other_machines(config):
        log_line("driver", "data and memory are those of other machines: each node checks its own")
    elif not is_running and not is_foreign:
        _check_machine(resolved, layout, size, lambda line: log_line("driver", line))
    if dashboard is None:
        return start_driver.drive(config, size, log_line)
    from megascale.cli.dashboard import serve_in_background

    with serve_in_background(config.run_folder, dashboard):
        return start_driver.drive(config, size, log_line)


def _resolve_layout(config: Config, size: JobSize) -> tuple[Config, Layout]:
    """Return the resolved configuration and the layout of this package's trainer."""
    from megascale import api
    from megascale.config import resolve_precision
    from megascale.core.layout import lay_out

    resolved = resolve_precision(api.resolve(config), bool(size.devices))
    return resolved, lay_out(resolved, size.world)


def _check_layout(config: Config, gpus: int) -> None:
    """Check the layout of a job for other machines before the job waits in a queue.

    If this machine does not have the data, the vocabulary of its tokenizer is replaced by a common size.

    Args:
        gpus: GPUs per node; 0: nodes without GPUs.
    """
    from megascale.resilience.driver.launch_checks import compute_size

    if config.foreign.command:
        return
    size = compute_size(config, gpus, shared=False)
    parallel = config.parallel.model_copy(update={"data": size.data, "gpus_per_host": size.ranks_per_node})
    config = config.model_copy(update={"parallel": parallel})
    try:
        _resolve_layout(config, size)
    except DataError as error:
        typer.echo(
            f"note: the nodes will check the model against its data, which this machine lacks: {error}", err=True
        )
        model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or _COMMON_VOCABULARY})
        data = config.data.model_copy(update={"train": []})
        _resolve_layout(config.model_copy(update={"model": model, "data": data}), size)


def _check_machine(config: Config, layout: Layout, size: JobSize, report: Callable[[str], None]) -> None:
    """Check that this machine has the data, the memory and the disk space that the job needs."""
    from megascale.core.preflight import HostShare, check_host
    from megascale.data.dataset.data_checks import check_data

    check_data(config.data, config.model.sequence_length, needs_tokenizer=config.train.sample_prompt is not None)
    nodes = config.resilience.nodes + config.resilience.spares
    share = HostShare(size.world, first_rank=0, ranks=size.world, nodes=nodes, uses_gpus=bool(size.devices))
    check_host(layout, share, report=report)
    if config.resilience.continue_replicas:
        _check_missing_replicas(config, size, report)


def _check_missing_replicas(config: Config, size: JobSize, report: Callable[[str], None]) -> None:
    """Check that the memory of this machine also suffices when replicas are missing.

    Fewer replicas share the optimizer state, so each rank then needs more memory.
    """
    from megascale.core.layout import lay_out
    from megascale.core.preflight import HostShare, check_host
    from megascale.resilience.driver.recovery.missing_replicas import list_continued_sizes

    # The smallest size with which the job continues needs the most memory per rank.
    data, nodes = list_continued_sizes(config, size.ranks_per_node, config.resilience.nodes)[-1]
    parallel = config.parallel.model_copy(update={"data": data})
    world = data * parallel.model_ranks
    share = HostShare(world, first_rank=0, ranks=world, nodes=nodes, uses_gpus=bool(size.devices))
    try:
        check_host(lay_out(config.model_copy(update={"parallel": parallel}), world), share, report=report)
    except FitError as error:
        raise FitError(
            f"resilience.continue_replicas=true with {size.data - data} of {size.data} replicas missing "
            f"(resilience.max_missing_replicas={config.resilience.max_missing_replicas}): {error}"
        ) from None


def _print_manifests(config: Config, form: str) -> None:
    """Print Kubernetes manifests for `kubectl apply`."""
    from typing import cast

    from megascale.resilience.cluster.base import count_configured_gpus
    from megascale.resilience.cluster.kubernetes_manifests import FORMS, Form, make_manifests, to_yaml

    if form not in FORMS:
        raise ConfigError(f"--form={form} is unknown; choose one of {', '.join(FORMS)}")
    if not config.kubernetes.image:
        raise ConfigError("cluster kubernetes needs the image of the nodes: --kubernetes.image=REGISTRY/NAME:TAG")
    gpus = count_configured_gpus(config)
    _check_layout(config, gpus)
    run_folder = str(config.run_folder.absolute())
    typer.echo(to_yaml(make_manifests(config, cast(Form, form), gpus, run_folder)), nl=False)


def _print_batch_script(config: Config, arguments: list[str]) -> None:
    """Print a Slurm batch script for `sbatch`."""
    import os

    from megascale.resilience.cluster.slurm import count_gpus_per_node
    from megascale.resilience.cluster.slurm_script import make_batch_script
    from megascale.resilience.driver.state.journal_reader import list_evicted_nodes

    if config.resilience.cluster != "slurm":
        raise ConfigError(
            f"--dry-run is for Slurm and Kubernetes, but resilience.cluster={config.resilience.cluster}; add "
            "--cluster slurm or --cluster kubernetes"
        )
    gpus = count_gpus_per_node(config)
    _check_layout(config, gpus)
    config.run_folder.parent.mkdir(parents=True, exist_ok=True)  # Slurm writes no log if this folder is missing
    evicted = list_evicted_nodes(config.run_folder)
    python_path = os.environ.get("PYTHONPATH", "")
    typer.echo(make_batch_script(config, gpus, arguments, evicted, python_path), nl=False)


def agent(
    drivers: list[str] = typer.Argument(
        ..., metavar="HOST:PORT...", help="Addresses of the driver, tried in turn.", show_default=False
    ),
    job: str = typer.Option(..., "--job", help="Name of the run (train.name).", show_default=False),
    secret_file: str = typer.Option(
        None, "--secret-file", help="Private file with the job's secret; - for stdin.", show_default=False
    ),
    node: str = typer.Option(None, "--node", help="This machine's name in the job; default: its host name."),
    interface: str = typer.Option(
        "", "--interface", help="Network interface of the ranks, such as eth1.", show_default=False
    ),
    address: str = typer.Option(
        "",
        "--address",
        help="Address by which other nodes reach this machine; default: the one on the route to the driver.",
        show_default=False,
    ),
    folder: Path = typer.Option(None, "--folder", help="For logs and state of nodes; default: ~/.megascale/JOB."),
    wait: float = typer.Option(600.0, "--wait", min=0.0, help="Seconds to retry while no driver answers."),
) -> None:
    """Run an agent on this machine, which takes part in a launched job until the job ends.

    Use it with `megascale launch --resilience.cluster=manual`, which prints the address. The secret is the text of
    RUN/driver/token on the driver's machine. Pass it privately: in a file of mode 600, on stdin, or as
    MEGASCALE_JOB_SECRET (systemd's LoadCredential or EnvironmentFile, a Kubernetes Secret). The agent proves that
    it knows the secret without sending it. Beyond loopback the connection uses TLS, and the driver must also prove
    that it knows the secret.

    Exit code 0: the job is over. 1: no driver answers. 2: the driver refuses this machine (other versions, too few
    GPUs, a name that is in use).

    Examples:

      megascale agent head01:29400 --job stdlib --secret-file /run/secrets/stdlib

      ssh head01 cat runs/stdlib/driver/token | megascale agent head01:29400 --job stdlib --secret-file -

      megascale agent head01:29400 head02:29400 --job stdlib --secret-file s --interface eth1
    """
    import socket

    from megascale.resilience.agent.join import join_job, parse_driver_address, read_secret

    addresses = [parse_driver_address(text) for text in drivers]
    secret = read_secret(secret_file)
    name = node or socket.gethostname().partition(".")[0]
    join_job(
        addresses,
        job,
        secret=secret,
        node=name,
        folder=folder,
        address=address,
        interface=interface,
        timeout=wait,
        report=lambda line: typer.echo(line, err=True),
    )
