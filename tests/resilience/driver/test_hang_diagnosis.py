"""From "nothing moves" to a rank: what the driver learns of a hang; and the metrics it follows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core.calls import Calls
from megascale.resilience.driver.hang_diagnosis import refine
from megascale.resilience.driver.metrics_tail import MetricsTail
from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import Metric
from tests.resilience.rules.test_rules import heartbeat, view, worker

HANG = Verdict("hang", (), (), "respawn", ("no rank has moved for 11 s",))


@pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")
def test_a_hang_gets_its_rank_and_its_node(tmp_path):
    """Rank 1 is a stopped process; rank 0, here, waits for it."""
    status = tmp_path / "status"
    mine = Calls(status, 0, 2)
    mine.register("world", 2)
    mine.wait(mine.begin("world", "all_reduce", 24))
    code = f"""
import os, signal
from pathlib import Path
from megascale.core.calls import Calls
log = Calls(Path({str(status)!r}), 1, 2)
log.register("world", 2)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        os.waitpid(other.pid, os.WUNTRACED)
        # This process has no handler for the signal that asks for a stack.
        old = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        state = view({n: [heartbeat(n, 1, [worker(n, status_age=11.0)])] for n in range(2)})
        found = refine(HANG, state, tmp_path)
        signal.signal(signal.SIGUSR2, old)
    finally:
        other.kill()
        other.wait()
        mine.close()
    assert (found.nodes, found.ranks, found.action) == (("node-1",), (1,), "respawn")
    assert found.evidence[0].startswith("stopped: rank 1, all_reduce number 1 of world")
    assert found.evidence[-1] == HANG.evidence[0]


def test_a_run_folder_without_records_keeps_the_verdict(tmp_path):
    found = refine(HANG, view({0: [heartbeat(0, 1, [worker(0)])]}), tmp_path)
    assert (found.action, found.ranks) == ("respawn", ())
    assert "no closer look" in found.evidence[-1]


def line(step: int, loss: float = 1.0) -> str:
    return json.dumps({"step": step, "loss": loss, "grad_norm": 0.5, "seconds": 0.1}) + "\n"


def test_metrics_are_followed_through_cut_lines_and_rewrites(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    metrics_tail = MetricsTail(tmp_path)
    assert metrics_tail.read() == []
    whole = line(3)
    file.write_text(line(1) + '{"step": 1, "valid_loss": 2.0}\n' + line(2) + whole[:9])
    assert [m.step for m in metrics_tail.read()] == [1, 2]
    with open(file, "a") as out:
        out.write(whole[9:] + line(4, float("nan")))
    found = metrics_tail.read()
    assert [m.step for m in found] == [1, 2, 3, 4]
    assert found[2] == Metric(3, 1.0, 0.5, 0.1)
    assert found[3].loss != found[3].loss
    # A resumed run puts another file in its place.
    (tmp_path / "new").write_text(line(1) + line(2))
    os.replace(tmp_path / "new", file)
    assert [m.step for m in metrics_tail.read()] == [1, 2]
