"""`megascale dashboard`: serve a page for a run that is training, finished or dead."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import typer

from megascale.core.python_process import module_command, protect_children
from megascale.errors import ConfigError

PORT = 8265  # default of --port
_POLL_SECONDS = 0.2  # between checks whether a driver runs


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(dashboard)


def dashboard(
    run: Path = typer.Argument(Path("runs"), metavar="RUN|RUNS", help="A run folder, or a folder of run folders."),
    port: int = typer.Option(PORT, "--port", min=0, max=65535, help="Port to listen on; 0: any free port."),
    host: str = typer.Option(
        "127.0.0.1", "--host", help="Address to listen on; beyond loopback it needs the three files below."
    ),
    token_file: Path = typer.Option(
        None,
        "--token-file",
        help="File with the token that pages require (mode 600, made if missing); default: a new token per start.",
        show_default=False,
    ),
    no_token: bool = typer.Option(False, "--no-token", help="Let every user of this machine read; on loopback only."),
    certificate: Path = typer.Option(None, "--certificate", help="TLS certificate, a PEM file.", show_default=False),
    key: Path = typer.Option(None, "--key", help="TLS key, a PEM file.", show_default=False),
    until_stdin_ends: bool = typer.Option(False, "--until-stdin-ends", hidden=True),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open the page in this machine's browser."),
) -> None:
    """Show a run, or several in one chart, in a browser: training or ended, of 8 ranks or 12,288.

    Overview: curves, time by cause, events, checkpoints. Heat map: any timing of every rank, with outliers. Timeline: a
    step of some ranks above its planned schedule, and the reason of each wait. Grid: ranks in tensor x pipeline x data,
    and which rank waits for which in a hang. Nodes: state and history; cordon, evict, pause, restart. Plan: memory,
    bubble and step next to the measured figures.

    Reading needs a token, since other users of the machine reach the port too. On a terminal the printed address has
    the token. Acting needs the text of RUN/driver/token.act. From another machine: ssh -L 8265:127.0.0.1:8265 HOST.
    Nothing is loaded from the internet.

    Examples:

      megascale dashboard runs/stdlib

      megascale dashboard runs --port 9000 --no-browser
    """
    from megascale.cli.common import require_package

    require_package("fastapi", "dashboard")
    require_package("uvicorn", "dashboard")
    from megascale.observe.dashboard.application import Integrations
    from megascale.observe.dashboard.questions import Sources
    from megascale.observe.dashboard.run_reader import RunList
    from megascale.observe.dashboard.serve import ServerOptions, make_tls_context, serve
    from megascale.resilience.driver.api import client
    from megascale.simulate.run_plan import plan_run

    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    protect_children()  # multiprocessing starts the processes that answer queries
    server_options = ServerOptions(host, port, token_file, no_token, certificate, key)
    make_tls_context(server_options)  # raises the error of a wrong option before anything starts
    sources = Sources(client.describe_job, client.describe_nodes, plan_run)
    integrations = Integrations(sources, client.send_order)
    runs = RunList(run)
    for folder in runs.list_unlisted():
        name = folder.name.encode(errors="replace").decode()
        typer.secho(f"left out: the name of run {name!r} has characters that cannot be shown", fg="yellow", err=True)
    serve(runs, integrations, server_options, typer.echo, browser)


def _end_with_stdin() -> None:
    """End this process when stdin ends, which happens when the parent process ends in any way."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def check_port(port: int) -> None:
    """Raise ConfigError if a page cannot listen on this port of the loopback address."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"--dashboard {port}: the page cannot listen on 127.0.0.1:{port} ({error.strerror}); choose another "
                "port, or 0 for any free one"
            ) from None


@contextlib.contextmanager
def serve_in_background(run: Path, port: int) -> Iterator[None]:
    """Serve the page of a run in a process of its own, from the start of the run's driver until the context ends."""
    has_ended = threading.Event()
    processes: list[subprocess.Popen[bytes]] = []

    def start_when_driver_runs() -> None:
        # A driver writes this file when it has announced its addresses.
        while not (run / "driver" / "contact.json").exists():
            if has_ended.wait(_POLL_SECONDS):
                return
        command = module_command("megascale", "dashboard", str(run), f"--port={port}", "--no-browser")
        command.append("--until-stdin-ends")
        try:
            processes.append(subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE))
        except OSError as error:
            typer.echo(f"the dashboard cannot be started: {error}; training continues without it", err=True)

    starter = threading.Thread(target=start_when_driver_runs, daemon=True)
    starter.start()
    try:
        yield
    finally:
        has_ended.set()
        starter.join()
        for process in processes:
            process.terminate()
            process.wait()
