"""`megascale diagnose`: is this node fit to train?"""

from __future__ import annotations

from pathlib import Path

import typer

from megascale.core import strict_json


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def diagnose(
        check: list[str] = typer.Option([], "--check", help="Only this check; may be repeated. Default: all."),
        expected: Path = typer.Option(None, help="File of learned rates; default: in the user's cache."),
        learn: bool = typer.Option(True, help="Remember the rates of checks that pass."),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        pairs: str = typer.Option(
            None, "--pairs", metavar="HOST:PORT", help="Test with other nodes; node 0's address."
        ),
        node: int = typer.Option(0, help="With --pairs: this node's number."),
        world: int = typer.Option(2, help="With --pairs: how many nodes take part."),
    ) -> None:
        """Test this node: computing, memory, links between devices, NICs.

        GEMMs and a small model must give the same bits every time and on every machine of the kind; rates
        are compared with what machines of the kind reached before (learned in one JSON file). Hardware that is not
        there is said to be absent. Exit code 0: fit; 1: something failed. A driver runs this on suspicion.

        With --pairs, started on each node, pairs of nodes all-reduce, regrouped until the bad ones are named.

        Examples:

          megascale diagnose

          megascale diagnose --check gemm --check memory --json

          megascale diagnose --pairs 10.0.0.1:29700 --node 3 --world 8
        """

        from megascale.resilience.diagnose import suite
        from megascale.resilience.diagnose.expected import default_file

        if pairs is not None:
            found = [_pairs(pairs, node, world)]
            kind = f"node {node} of {world}"
        else:
            file = expected or default_file()
            known = suite.expectations(file)
            kind, found = known.kind, []
            for result, seconds in suite.run_checks(check, known):
                found.append(result)
                if learn:
                    known.learn(result)
                if not as_json:
                    _say(result, seconds)
            if learn:
                known.save(file)
        if as_json:
            typer.echo(strict_json.dumps(suite.as_json(kind, found), indent=2))
        elif pairs is not None:
            _say(found[0], 0.0)
        failed = [result for result in found if not result.passed]
        for result in failed:
            typer.echo(f"failed: {result.name}: {result.details}", err=True)
        if failed:
            raise typer.Exit(1)


def _pairs(address: str, node: int, world: int):
    """Take part in the inquiry of all nodes."""
    from datetime import timedelta

    import torch.distributed as dist

    from megascale.errors import ConfigError, TrainingError
    from megascale.resilience.diagnose.pairs import in_a_process, take_part

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 <= node < world:
        raise ConfigError(
            f"--pairs {address} --node {node} --world {world}: give HOST:PORT of node 0, and 0 <= node < world"
        )
    try:
        store = dist.TCPStore(
            host, int(port), is_master=node == 0, timeout=timedelta(seconds=60), wait_for_workers=False
        )
        return take_part(store, node, world, in_a_process(host, int(port))).to_self_check(node)
    except dist.DistError as error:
        raise TrainingError(f"node {node} lost node 0 at {address}: {str(error).splitlines()[0][:200]}") from None


def _say(check, seconds: float) -> None:
    from rich.console import Console

    colours = {"passed": "green", "failed": "bold red", "absent": "dim"}
    rate = "" if check.measured is None else f"{check.measured:.4g} {check.unit}"
    least = "" if check.expected is None else f"(at least {check.expected:.3g})"
    console = Console(highlight=False, soft_wrap=True)
    line = f"{check.name:<30} {rate:>16} {least:<18} {check.details}"
    console.print(f"[{colours[check.result]}]{check.result:<7}[/] ", end="")
    console.print(line + (f"  [{seconds:.1f} s]" if seconds >= 1 else ""), markup=False)
