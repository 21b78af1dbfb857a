"""`megascale doctor|diagnose|hang`: examine this machine, test it, and find the rank that makes a run hang."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.cli.common import JSON, format_optional, make_console, make_text_table, print_json

if TYPE_CHECKING:
    from megascale.observe.hang.scene import Scene
    from megascale.observe.hang.verdict import Hang
    from megascale.observe.machine_report import Finding
    from megascale.resilience.diagnose.check import SelfCheck

# Limit for the driver's answer. Agents take up to 15 s to examine ranks, and the driver then writes their reports.
_AGENT_SECONDS = 28.0
_MAX_WATCH_SECONDS = 10.0  # limit of the driver for the time in which agents watch ranks
_MAX_LISTED_RANKS = 64
_MAX_LISTED_PEERS = 8  # ranks for which a rank waits
_PAIRS_START_SECONDS = 60  # for the nodes of `diagnose --pairs` to meet
_ERROR_CHARACTERS = 200  # of the message of a lost connection


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(doctor)
    app.command()(hang)
    app.command()(diagnose)


def doctor(
    cluster: str = typer.Option("", "--cluster", help="Examine this cluster instead: slurm or kubernetes."),
    namespace: str = typer.Option("", "--namespace", help="Kubernetes: the job's namespace; default: the context's."),
    kubeconfig: str = typer.Option("", "--kubeconfig", help="Kubernetes: the kubeconfig file; default: as kubectl."),
    as_json: bool = JSON,
) -> None:
    """Print the properties of this machine or a cluster, and what is missing or slow, with the reason. Changes nothing.

    With --cluster: commands, partitions, time-outs and container runtimes of Slurm; rights, namespace, GPUs and
    extensions of Kubernetes.

    Examples:

      megascale doctor

      megascale doctor --cluster slurm

      megascale doctor --cluster kubernetes --namespace training
    """
    from rich.markup import escape

    findings = _examine(cluster, namespace, kubeconfig)
    if as_json:
        print_json([vars(finding) for finding in findings], indent=2)
        return
    table = make_text_table("", "what", "found", "what follows")
    marks = {"good": "[green]ok[/green]", "slow": "[yellow]slow[/yellow]", "missing": "[red]no[/red]"}
    for finding in findings:
        texts = map(escape, (finding.subject, finding.value, finding.advice))
        table.add_row(marks[finding.verdict], *texts)
    make_console().print(table)


def _examine(cluster: str, namespace: str, kubeconfig: str) -> list[Finding]:
    """Return findings about this machine, or about a cluster if one is named."""
    if not cluster:
        from megascale.observe.machine_report import examine_machine

        return examine_machine()
    from megascale.config import KubernetesConfig
    from megascale.errors import ConfigError
    from megascale.resilience.cluster.cluster_report import examine_kubernetes, examine_slurm

    if cluster == "slurm":
        return examine_slurm()
    if cluster != "kubernetes":
        raise ConfigError(f"--cluster={cluster} is unknown; choose slurm or kubernetes")
    from megascale.resilience.cluster.kubernetes_api import KubernetesApi

    settings = KubernetesConfig(namespace=namespace, kubeconfig=kubeconfig)
    return examine_kubernetes(KubernetesApi(settings), settings.gpu_resource)


def diagnose(
    check: list[str] = typer.Option([], "--check", help="Run only this check; repeatable. Default: all."),
    expected: Path = typer.Option(None, help="File of learned rates; default: in the user's cache."),
    learn: bool = typer.Option(True, help="Save the rates of checks that pass."),
    as_json: bool = JSON,
    pairs: str = typer.Option(
        None, "--pairs", metavar="HOST:PORT", help="Test together with other nodes; address of node 0."
    ),
    node: int = typer.Option(0, help="With --pairs: this node's number."),
    world: int = typer.Option(2, help="With --pairs: number of nodes."),
) -> None:
    """Test this node: computing, memory, links between devices, NICs.

    GEMMs and a small model must give the same bits every time and on every machine of the same kind. Rates are
    compared with the rates that machines of this kind reached before (learned in one JSON file). Missing hardware is
    reported as absent. Exit code 0: fit; 1: a check failed. A driver runs this on a suspected node.

    With --pairs, started on each node, pairs of nodes run all-reduces and are regrouped until the bad nodes are named.

    Examples:

      megascale diagnose

      megascale diagnose --check gemm --check memory --json

      megascale diagnose --pairs 10.0.0.1:29700 --node 3 --world 8
    """
    from megascale.resilience.diagnose import suite
    from megascale.resilience.diagnose.check import get_default_file

    if pairs is not None:
        results = [_check_pairs(pairs, node, world)]
        machine_kind = f"node {node} of {world}"
        if not as_json:
            _print_check(results[0], 0.0)
    else:
        file = expected or get_default_file()
        expectations = suite.load_expectations(file)
        results = []
        machine_kind = expectations.kind
        for result, seconds in suite.run_checks(check, expectations):
            results.append(result)
            if learn:
                expectations.learn(result)
            if not as_json:
                _print_check(result, seconds)
        if learn:
            expectations.save(file)
    if as_json:
        print_json(suite.make_report(machine_kind, results), indent=2)
    failed = [result for result in results if not result.has_passed]
    for result in failed:
        typer.echo(f"failed: {result.name}: {result.details}", err=True)
    if failed:
        raise typer.Exit(1)


def _check_pairs(address: str, node: int, world: int) -> SelfCheck:
    """Take part in the test of pairs of nodes, and return the result of this node."""
    import socket
    from datetime import timedelta

    import torch.distributed as dist

    from megascale.errors import ConfigError, TrainingError
    from megascale.resilience.diagnose.pairs import join_inquiry, measure_in_process

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 <= node < world:
        raise ConfigError(
            f"--pairs {address} --node {node} --world {world}: give HOST:PORT of node 0, and 0 <= node < world"
        )
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        # Without this check, TCPStore would retry for a minute and then print a C++ stack.
        raise ConfigError(
            f"--pairs {address}: this node cannot resolve the name {host} ({error.strerror}); write the IP address of "
            "node 0"
        ) from None
    try:
        timeout = timedelta(seconds=_PAIRS_START_SECONDS)
        store = dist.TCPStore(host, int(port), is_master=node == 0, timeout=timeout, wait_for_workers=False)
        findings = join_inquiry(store, node, world=world, measure=measure_in_process(host, int(port)))
        return findings.to_self_check(node)
    except dist.DistError as error:
        reason = str(error).splitlines()[0][:_ERROR_CHARACTERS]
        raise TrainingError(f"node {node} lost node 0 at {address}: {reason}") from None


def _print_check(check: SelfCheck, seconds: float) -> None:
    """Print a check on one line, with its time if it took a second or more."""
    colours = {"passed": "green", "failed": "bold red", "absent": "dim"}
    rate = format_optional(check.measured, "{:.4g} " + check.unit)
    limit = format_optional(check.expected, "(at least {:.3g})")
    line = f"{check.name:<30} {rate:>16} {limit:<18} {check.details}"
    if seconds >= 1:
        line += f"  [{seconds:.1f} s]"
    console = make_console(soft_wrap=True)
    console.print(f"[{colours[check.result]}]{check.result:<7}[/] ", end="")
    console.print(line, markup=False)


def hang(
    folder: Path = typer.Argument(
        ...,
        help="Run folder, such as runs/stdlib, or a folder with copies of status files or flight-recorder dumps.",
        show_default=False,
    ),
    ask: bool = typer.Option(True, help="Request stacks and flight records from ranks on this host."),
    watch: float = typer.Option(2.0, min=0.0, help="Seconds to watch for progress; at least as long as a step."),
    as_json: bool = JSON,
) -> None:
    """Name the rank that makes a run hang, the collective it hangs in, and the evidence.

    Joins the records of every rank (its current call, its position in the schedule) with the state of its process, its
    stack and torch's flight recorder. Ranks that have ended, stopped or do not answer are suspects. A healthy run is
    not disturbed, and is reported as moving. Exit code 0: nothing hangs; 1: something does.

    Examples:

      megascale hang runs/stdlib-3d

      megascale hang runs/stdlib-3d --json

      megascale hang dumps-from-another-cluster --no-ask
    """
    from megascale.observe.hang import verdict as hang_verdict

    # A launched job whose ranks have no files of calls here runs on other machines.
    has_remote_ranks = (folder / "driver").is_dir() and not any((folder / "status").glob("rank-*.calls"))
    if ask and has_remote_ranks:
        _request_remote_ranks(folder, watch)
    scene, verdict = hang_verdict.examine_run(folder, ask, watch)
    if as_json:
        print_json(hang_verdict.make_record(scene, verdict), indent=2)
    else:
        _print_hang(scene, verdict)
    if verdict.kind != "none":
        raise typer.Exit(1)


def _request_remote_ranks(run: Path, watch: float) -> None:
    """Let the driver collect the state of ranks on other machines. If it fails, the agents' last reports are used."""
    from megascale.errors import MegascaleError
    from megascale.resilience.driver.api.client import send_request

    try:
        send_request(run, "GET", f"/v1/ranks?watch={min(watch, _MAX_WATCH_SECONDS)}", seconds=_AGENT_SECONDS)
    except MegascaleError as error:
        typer.echo(f"the ranks are shown as their agents last reported them: {error}", err=True)


def _print_hang(scene: Scene, verdict: Hang) -> None:
    """Print the verdict, its evidence, and a table of the ranks with the calls in which they wait."""
    from megascale.observe.hang.sentences import describe_position
    from megascale.observe.hang.verdict import format_headline

    console = make_console()
    colour = "green" if verdict.kind == "none" else "red"
    console.print(f"[bold {colour}]{format_headline(verdict)}[/]")
    if scene.from_agents:
        seen_at = time.strftime("%H:%M:%S", time.localtime(scene.now_ns / 1e9))
        console.print(f"as their agents saw the ranks at {seen_at}")
    for line in verdict.evidence:
        console.print(f"  - {line}", markup=False)
    table = make_text_table("rank", "process", "position", "waits in", "for", "s")
    waits = {wait.rank: wait for wait in verdict.waits}
    for rank in sorted(scene.ranks)[:_MAX_LISTED_RANKS]:
        rank_state = scene.ranks[rank]
        wait = waits.get(rank)
        name = str(rank)
        if rank in verdict.ranks:
            name = f"[red]{rank}[/]"
        row = [name, rank_state.process, describe_position(rank_state)]
        if wait is not None:
            if wait.all_came:
                waits_for = "all joined"
            else:
                waits_for = ", ".join(map(str, wait.on[:_MAX_LISTED_PEERS]))
            row += [f"{wait.group} call {wait.sequence} {wait.op}", waits_for, f"{wait.seconds:.1f}"]
        table.add_row(*row)
    console.print(table)
    if len(scene.ranks) > _MAX_LISTED_RANKS:
        console.print(f"and {len(scene.ranks) - _MAX_LISTED_RANKS} more ranks (--json lists all)")
