"""`megascale access|logs`: look at a launched job from another machine, and read its ranks' logs."""

from __future__ import annotations

from pathlib import Path

import typer

from megascale.cli.jobs import RUN


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(access)
    app.command()(logs)


def access(
    run: Path = typer.Argument(..., help="The run folder, on the driver's machine.", show_default=False),
    act: bool = typer.Option(False, "--act", help="For orders too (evict, pause ...), not for looking only."),
    host: str = typer.Option("", "--host", help="Where others reach the driver; default: where it listens."),
) -> None:
    """Print what `nodes`, `events`, `logs`, `evict`, `cordon` ... take in place of a run folder on another machine.

    Address, certificate and token of the driver that runs now, one line of JSON: whoever has it may look, with --act
    steer too. Keep it in a file of mode 600. It lasts as long as this driver; with resilience.tls_certificate and
    resilience.api_port as long as those.

    Examples:

      (umask 77; ssh head01 megascale access runs/stdlib > stdlib.access)

      megascale nodes stdlib.access
    """
    from megascale.resilience.driver.api.access import create_access

    typer.echo(create_access(run, act, host).to_text(), nl=False)


def logs(
    run: Path = RUN,
    rank: int = typer.Option(0, "--rank", min=0, help="Whose log."),
    lines: int = typer.Option(50, "--lines", "-n", min=0, help="Of its end; up to 64 KiB."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on as it grows; Ctrl-C ends."),
) -> None:
    """Print the end of a rank's log, from a run folder or through the driver.

    Example: megascale logs runs/stdlib --rank 3 -f
    """
    import sys
    import time

    from megascale.resilience.driver.api.access import LOG_PIECE

    start, end, text = _piece(run, rank, -LOG_PIECE)
    kept = text.splitlines(keepends=True)[1 if start else 0 :]
    sys.stdout.write("".join(kept[-lines:] if lines else []))
    while follow:
        sys.stdout.flush()
        time.sleep(0.5)
        _, end, text = _piece(run, rank, end)
        sys.stdout.write(text)


def _piece(run: Path, rank: int, after: int) -> tuple[int, int, str]:
    """(first byte, byte after the last, text) of a log."""
    from megascale.errors import DataError
    from megascale.resilience.driver.api.access import read_log_piece
    from megascale.resilience.driver.api.client import send_request

    if run.is_file():
        told = send_request(run, "GET", f"/v1/logs/{rank}?after={after}")
        return told["start"], told["end"], told["text"]
    file = run / "logs" / f"rank-{rank}.log"
    found = read_log_piece(file, after)
    if found is None:
        there = sorted(int(f.stem[5:]) for f in file.parent.glob("rank-*.log") if f.stem[5:].isdigit())
        shown = ", ".join(map(str, there[:16])) + (" ..." if len(there) > 16 else "")
        raise DataError(f"{file} is not there; {f'there are logs of ranks {shown}' if there else 'no rank has one'}")
    return found[0], found[0] + len(found[1]), found[1].decode(errors="replace")
