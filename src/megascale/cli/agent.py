"""`megascale agent`: take part in a launched job with this machine, started by a person, systemd or a container."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(agent)


def agent(
    drivers: list[str] = typer.Argument(
        ..., metavar="HOST:PORT...", help="Where the driver takes agents; several: tried in turn.", show_default=False
    ),
    job: str = typer.Option(..., "--job", help="Name of the run (train.name).", show_default=False),
    secret_file: str = typer.Option(
        None, "--secret-file", help="Private file with the job's secret; - for stdin.", show_default=False
    ),
    node: str = typer.Option(None, "--node", help="This machine's name in the job; default: its host name."),
    interface: str = typer.Option("", "--interface", help="Network of the ranks, such as eth1.", show_default=False),
    address: str = typer.Option(
        "",
        "--address",
        help="At which the others reach this machine; default: the one that leads to the driver.",
        show_default=False,
    ),
    folder: Path = typer.Option(None, "--folder", help="For logs and state of nodes; default: ~/.megascale/JOB."),
    wait: float = typer.Option(600.0, "--wait", min=0.0, help="Seconds to go on asking where no driver answers."),
) -> None:
    """Take part in a launched job with this machine, until the job ends.

    For `megascale launch --resilience.cluster=manual`, which prints the address. The secret is the text of
    RUN/driver/token on the driver's machine: hand it over privately, in a file of mode 600, on stdin, or as
    MEGASCALE_JOB_SECRET (systemd's LoadCredential or EnvironmentFile, a Kubernetes Secret); it is proved, never sent,
    and stands on no command line. Beyond loopback everything goes over TLS, to the driver that knows the secret only.

    Exit code 0 when the job is over, 2 if the driver refuses this machine (other versions, too few GPUs, a name that is
    taken), 1 if no driver answers.

    Examples:

      megascale agent head01:29400 --job stdlib --secret-file /run/secrets/stdlib

      ssh head01 cat runs/stdlib/driver/token | megascale agent head01:29400 --job stdlib --secret-file -

      megascale agent head01:29400 head02:29400 --job stdlib --secret-file s --interface eth1
    """
    import socket

    from megascale.resilience.agent.join import join_job, parse_place, read_secret

    places = [parse_place(text) for text in drivers]
    secret = read_secret(secret_file)
    name = node or socket.gethostname().partition(".")[0]
    join_job(places, job, secret, name, folder, address, interface, wait, lambda line: typer.echo(line, err=True))
