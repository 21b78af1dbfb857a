"""`megascale dashboard`: one page for a run, running, finished or dead."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import typer

from megascale.core.python_command import module_command, protect_children

PORT = 8265


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("dashboard")(dashboard)


def dashboard(
    run: Path = typer.Argument(Path("runs"), metavar="[RUN|RUNS]", help="A run folder, or a folder of run folders."),
    port: int = typer.Option(PORT, "--port", min=0, max=65535, help="Where it listens; 0: any port that is free."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address; one that others reach needs the three files below."),
    token_file: Path = typer.Option(
        None,
        "--token-file",
        help="Pages ask for the token in this file (mode 600, made if missing); default: a new token for each start.",
        show_default=False,
    ),
    no_token: bool = typer.Option(False, "--no-token", help="Let every user of this machine read; on loopback only."),
    certificate: Path = typer.Option(None, "--certificate", help="Of TLS, a PEM file.", show_default=False),
    key: Path = typer.Option(None, "--key", help="Of TLS, a PEM file.", show_default=False),
    until_stdin_ends: bool = typer.Option(False, "--until-stdin-ends", hidden=True),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open the page in this machine's browser."),
) -> None:
    """Show a run, or several over each other, in a browser: alive or dead, of 8 ranks or 12,288.

    Overview: curves, where the time went, events, checkpoints. Heat map: any timing of every rank, outliers marked.
    Timeline: a step of some ranks over its planned schedule, and what each wait was for. Grid: ranks in tensor x
    pipeline x data, who waits for whom in a hang. Nodes: state and history; cordon, evict, pause, restart. Plan:
    memory, bubble and step beside what is measured.

    Reading asks for a token: other users of the machine reach the port, too. On a terminal the printed address holds
    it. Acting asks for the text of RUN/driver/token.act. From elsewhere: ssh -L 8265:127.0.0.1:8265 HOST. Nothing is
    loaded from the internet.

    Examples:

      megascale dashboard runs/stdlib

      megascale dashboard runs --port 9000 --no-browser
    """
    from megascale.cli.common import need

    need("fastapi", "dashboard")
    need("uvicorn", "dashboard")
    from megascale.observe.dashboard.application import Outside
    from megascale.observe.dashboard.questions import Sources
    from megascale.observe.dashboard.run_list import RunList
    from megascale.observe.dashboard.serve import Listening, make_tls_context, serve
    from megascale.resilience.driver.api import client
    from megascale.simulate.run_plan import run_plan

    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    protect_children()  # the processes that answer queries are started by multiprocessing
    at = Listening(host, port, token_file, no_token, certificate, key)
    make_tls_context(at)
    outside = Outside(Sources(client.describe_job, client.describe_nodes, run_plan), client.send_order)
    serve(RunList(run), outside, at, typer.echo, browser)


def _end_with_stdin() -> None:
    """Whoever launched this holds the other end, and lets go of it however it ends."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def serving(run: Path, port: int) -> Iterator[None]:
    """Serve the page of a run that is being launched, from the moment its driver is there until this ends."""
    over, started = threading.Event(), []

    def begin() -> None:
        while not (run / "driver" / "contact.json").exists():
            if over.wait(0.2):
                return
        words = module_command("megascale", "dashboard", str(run), f"--port={port}", "--no-browser")
        words.append("--until-stdin-ends")
        try:
            started.append(subprocess.Popen(words, start_new_session=True, stdin=subprocess.PIPE))
        except OSError as error:
            typer.echo(f"the dashboard cannot be started: {error}; training goes on without it", err=True)

    waits = threading.Thread(target=begin, daemon=True)
    waits.start()
    try:
        yield
    finally:
        over.set()
        waits.join()
        for process in started:
            process.terminate()
            process.wait()
