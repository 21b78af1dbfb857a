"""Most nodes of a job lost at once, as when their switch fails, and given back: how soon all train again.

Two machines of network namespaces hold the agents (one a few, the other those that are lost) and a third the driver;
only the agents themselves can bring them back (`--cluster manual`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.launched import Launched, make
from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from tests.chaos.machines.network import Machines, impossible, wait

_PORT = 29400
_START = 280.0  # seconds until all train for the first time, and until they do again; a busy machine takes them
_STEPS = 100_000  # more than are trained
_PACE = 0.2  # least seconds of a step


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos many-nodes`."""
    app.command("many-nodes")(many_nodes)


def many_nodes(
    nodes: int = typer.Option(32, min=2, help="Nodes, each an agent with one rank."),
    lost: int = typer.Option(30, min=1, help="Those whose link is cut."),
    seconds: float = typer.Option(0.0, min=0, help="How long they stay away after they were missed."),
    out: Path = typer.Option(Path("bench-many-nodes.json"), help="JSON file for the figures."),
    keep: Path = typer.Option(None, "--keep", help="Folder for the run, logs and consoles; default: none is kept."),
) -> None:
    """Cut most nodes of a job off at once, give them back, and time what follows. CPU; needs root, ip and iptables.

    Every node is an agent with a fork server and a rank of its own; all share this machine's cores. Exit code 1 if not
    all train again.

    Examples:

      python -m tests.chaos many-nodes

      python -m tests.chaos many-nodes --nodes 8 --lost 6
    """
    from megascale.errors import ConfigError

    if lost >= nodes:
        raise ConfigError(f"--lost={lost} must leave a node of --nodes={nodes}")
    why = impossible()
    if why:
        raise ConfigError(f"the many-nodes campaign cannot run here: {why}")
    with temporary_folder() as name:
        folder = Path(name) if keep is None else keep.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        row = _once(folder, nodes, lost, seconds)
    row |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
    out.write_text(strict_json.dumps(row | {"load": list(os.getloadavg())}, indent=1))
    typer.echo(strict_json.dumps(row))
    if not row["right"]:
        raise typer.Exit(1)


class _Job(Launched):
    """A job whose driver is on a machine of a network."""

    def __init__(self, machines: Machines, file: Path, nodes: int) -> None:
        self._machines = machines
        arguments = ["--resilience.cluster=manual", f"--resilience.nodes={nodes}", "--resilience.spares=0"]
        arguments += [f"--resilience.listen={machines['head'].address}", f"--resilience.port={_PORT}"]
        arguments += [f"--parallel.data={nodes}", f"--train.global_batch={nodes}", "--train.micro_batch=1"]
        arguments += [f"--checkpoint.location={file.parent / 'shared'}", "--checkpoint.replicas=false"]
        arguments += ["--checkpoint.memory_interval=0", "--checkpoint.background=false", "--checkpoint.interval=5"]
        super().__init__(file, "many", arguments + [f"--train.steps={_STEPS}"], _PACE)

    def start(self) -> Any:
        """The driver, on its machine."""
        self.command = self._machines["head"].inside(self.command)
        return super().start()


def _agents(machines: Machines, on: str, names: list[str], job: _Job) -> list[subprocess.Popen[bytes]]:
    secret, location = job.run / "driver" / "token", f"{machines['head'].address}:{_PORT}"
    result = []
    for name in names:
        arguments = [sys.executable, "-m", "megascale.cli.main", "agent", location, "--job", "many", "--node", name]
        arguments += ["--secret-file", str(secret), "--folder", str(machines[on].folder / "agents")]
        with open(machines[on].folder / f"{name}.log", "ab") as log:
            command = machines[on].inside(arguments)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": "/dev/shm"}
            result.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
    return result


def _once(folder: Path, nodes: int, lost: int, seconds: float) -> dict[str, Any]:
    file = make(folder)
    row: dict[str, Any] = {"nodes": nodes, "lost": lost, "right": False}
    with Machines(folder / "network", ["head", "few", "many"]) as machines:
        job, agents = _Job(machines, file, nodes), []
        try:
            wait((job.run / "driver" / "token").exists, "the job's secret", _START)
            names = [f"n{i:02}" for i in range(nodes)]
            agents = _agents(machines, "few", names[: nodes - lost], job)
            agents += _agents(machines, "many", names[nodes - lost :], job)
            row |= _strike(machines, job, nodes, seconds)
        finally:
            job.process.kill()
            job.process.wait()
            machines.close()
            for agent in agents:
                agent.wait()
    return row


def _strike(machines: Machines, job: _Job, nodes: int, seconds: float) -> dict[str, Any]:
    if job.first(lambda e: e.kind == "first_step", _START) is None:
        return {"why": f"no first step: {job.output.read_text()[-1000:]}"}
    wait(lambda: _trained(job) >= 6, "a checkpoint", _START)
    before, cut = job.events()[-1].id, time.time()
    machines["many"].cut()
    missed = job.first(lambda e: e.id > before and e.kind in ("missed_heartbeat", "node_lost", "process_exit"))
    time.sleep(seconds)
    machines["many"].heal()
    back, after = time.time(), job.events()[-1].id

    def is_complete(event: Any) -> bool:
        return event.kind == "first_step" and event.id > after and _ranks(job, event.id) == nodes

    repeated = job.first(is_complete, _START)
    joined = [e.time for e in job.events() if e.kind == "node_joined" and e.id > before]
    row: dict[str, Any] = {"missed": missed.time - cut if missed else None}
    row["last_joined"] = max(joined, default=back) - back
    row["training"] = repeated.time - back if repeated else None
    row["attempts"] = sum(e.kind == "attempt_started" for e in job.events())
    row["right"] = repeated is not None
    if repeated is None:
        row["events"] = [f"{e.time:.1f} {e.kind} {' '.join(e.nodes)[:80]} {e.evidence}"[:300] for e in job.events()]
    return row


def _ranks(job: _Job, event: int) -> int:
    """Return the ranks of the attempt that has done a first step."""
    return len(next(e for e in reversed(job.events()) if e.kind == "attempt_started" and e.id < event).nodes)


def _trained(job: _Job) -> int:
    file = job.run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0
