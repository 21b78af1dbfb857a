"""Two machines with torchrun, as docs/machines.md shows it: a rank dies, both end, the same commands go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from tests.chaos.machines.network import Machines, wait

STEPS = 120
_BEFORE = 60  # steps before the fault: one checkpoint, every 50
_END = 200.0  # seconds
# The state of a torchrun's job is its checkpoints: no services that outlive it.
_SETTINGS = ("--checkpoint.background=false", "--checkpoint.memory_interval=0", "--checkpoint.replicas=false")


def torchrun(network: Path, file: Path, name: str) -> tuple[dict[str, Any], Path]:
    """Return the outcome and the run folder.

    Args:
        network: folder for the machines.
        file: settings (launched.py::make), on storage that both see.
        name: of the run.
    """
    run = file.parent / "runs" / name
    _pace(run)
    row: dict[str, Any] = {"verdict": None, "attempts": 0, "lost": None, "back": False}
    with Machines(network, ["n0", "n1"]) as machines:
        pair = _start(machines, file, name)
        try:
            wait(lambda: _step(run) >= _BEFORE, f"step {_BEFORE}", _END)
            # torchrun's own command line ends alike, but has no -u.
            rank = ["pkill", f"-{signal.SIGKILL}", "-f", "--", "-u -m megascale train"]
            subprocess.run(machines["n1"].inside(rank), check=True)
            row["codes"] = [process.wait(_END) for process in pair]
            done = _step(run)
            pair = _start(machines, file, name)
            row["code"] = max(process.wait(_END) for process in pair)
        finally:
            for process in pair:
                process.kill()
                process.wait()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    resumed = [event["step"] for event in events if event["event"] == "resumed"]
    row["attempts"] = 1 + len(resumed)
    # Nothing is copied to a peer: the steps since the checkpoint are done twice.
    row |= {"verdict": "all ended", "since_checkpoint": done - resumed[-1] if resumed else None}
    row["right_end"] = all(row["codes"]) and resumed == [50]
    return row, run


def _start(machines: Machines, file: Path, name: str) -> list[subprocess.Popen[bytes]]:
    first, result = machines["n0"].address, []
    for rank, machine in enumerate(machines):
        arguments = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        arguments += ["--node-rank", str(rank), "--master-addr", first, "--master-port", "29500"]
        result.append(
            _run(
                machine.inside(arguments + ["-m", "megascale", "train", str(file)] + list(_settings(name))), file, rank
            )
        )
    return result


def _settings(name: str) -> Sequence[str]:
    return (f"--train.name={name}", f"--train.steps={STEPS}") + _SETTINGS


def _run(arguments: Sequence[str], file: Path, rank: int) -> subprocess.Popen[bytes]:
    # A machine's name need not resolve: the ranks use the network that is named.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": "/dev/shm"}
    with open(file.parent / f"torchrun-{rank}.out", "ab") as out:
        return subprocess.Popen(arguments, stdout=out, stderr=out, env=environment, start_new_session=True)


def _pace(run: Path) -> None:
    (run / "faults").mkdir(parents=True)
    for rank in range(2):
        fault = {"kind": "slow-rank", "rank": rank, "seconds": 0.1, "persistent": True}
        (run / "faults" / f"{rank:020}-{0:06x}.json").write_text(strict_json.dumps(fault))


def _step(run: Path) -> int:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)
