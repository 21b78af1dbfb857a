"""The fault injector: it breaks what it should, refuses what it must, and needs permission to break from inside."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megascale.api import load_config, train
from megascale.cli.main import app
from megascale.config import load
from megascale.core import strict_json
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.observe.hang.evidence import read_process_state
from megascale.resilience.faults.inject import FAULTS, Options, inject
from megascale.train.injected_faults import KINDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder without processes, whose trainers may be broken."""
    folder = tmp_path / "run"
    (folder / "status").mkdir(parents=True)
    (folder / "config.toml").write_text(load(None, ["--resilience.faults=true"]).to_toml())
    return folder


@pytest.fixture
def rank(run: Path):
    """A process that is rank 0 of the run: it has the rank's record mapped."""
    code = f"""
from pathlib import Path
from megascale.core.calls import CallLog
calls = CallLog(Path({str(run / "status")!r}), 0, 1)
print("here", flush=True)
import time; time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_every_fault_from_inside_is_one_that_trainers_know():
    assert {kind for kind, fault in FAULTS.items() if fault.is_in_trainer} == set(KINDS)


@pytest.mark.parametrize(("word", "persistent"), [("--persistent", True), (None, False)])
def test_a_persistent_fault_is_asked_for_by_its_name(run, word, persistent):
    requested = ["faults", "inject", "spin", "--run", str(run), "--rank", "0"] + ([word] if word else [])
    assert CliRunner().invoke(app, requested).exit_code == 0
    (file,) = (run / "faults").glob("*.json")
    assert json.loads(file.read_text())["persistent"] is persistent


def test_a_rank_is_killed_stopped_and_let_go(run, rank):
    assert inject(run, "stop-rank", Options(rank=0, seconds=0.05))[-1].startswith("SIGCONT")
    assert read_process_state(rank.pid) == "running"
    inject(run, "stop-rank", Options(rank=0))
    os.waitpid(rank.pid, os.WUNTRACED)  # returns once it stands: the signal takes its time to arrive
    assert read_process_state(rank.pid) == "stopped"
    inject(run, "kill-rank", Options(rank=0))
    assert rank.wait(10) == -signal.SIGKILL
    with pytest.raises(TrainingError, match="rank 0"):
        inject(run, "kill-rank", Options(rank=0))


def test_a_full_disk_is_met_by_the_kernel(run, rank):
    inject(run, "full-disk", Options())
    soft, _ = resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)
    assert soft == 4096


def test_wrong_requests_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="no fault 'kill-rnak'"):
        inject(run, "kill-rnak")
    with pytest.raises(ConfigError, match="--rank"):
        inject(run, "kill-rank")
    with pytest.raises(ConfigError, match="--node"):
        inject(run, "kill-node")
    with pytest.raises(DataError, match="run folder"):
        inject(tmp_path / "none", "kill-rank", Options(rank=0))
    with pytest.raises(TrainingError, match="no agent"):
        inject(run, "kill-agent", Options(node="n9"))
    with pytest.raises(ConfigError, match="Redis"):
        inject(run, "redis-loss")


def test_a_flipped_weight_that_nothing_will_notice_is_said(run):
    assert "resilience.checksum_interval=0" in inject(run, "flip-weight", Options(rank=0))[-1]
    on = load(None, ["--resilience.faults=true", "--resilience.checksum_interval=1"])
    on.write(run / "config.toml")
    assert len(inject(run, "flip-weight", Options(rank=0))) == 1


def test_a_wrong_update_that_nothing_will_notice_is_said(run):
    assert "resilience.replay_interval=auto" in inject(run, "flip-update", Options(rank=0))[-1]
    options = ["--resilience.faults=true", "--resilience.replay_interval=0"]
    load(None, options).write(run / "config.toml")
    assert "resilience.replay_interval=0" in inject(run, "flip-update", Options(rank=0))[-1]
    config = load(None, ["--resilience.faults=true", "--resilience.replay_interval=1"])
    config.write(run / "config.toml")
    assert len(inject(run, "flip-update", Options(rank=0))) == 1


def test_a_trainer_is_broken_from_inside_only_where_the_run_allows_it(run):
    assert "its next step" in inject(run, "exception", Options(rank=1))[0]
    (file,) = (run / "faults").iterdir()
    assert json.loads(file.read_text())["kind"] == "exception"
    (run / "config.toml").write_text(load(None).to_toml())
    with pytest.raises(ConfigError, match=r"resilience\.faults=true"):
        inject(run, "exception", Options(rank=1))


def test_an_agent_that_was_replaced_is_not_killed(run, rank):
    """Its number belongs to another process now: born at another time."""
    folder = run / "nodes" / "n0"
    folder.mkdir(parents=True)
    (folder / "agent.json").write_text(json.dumps({"pid": rank.pid, "born": 1}))
    with pytest.raises(TrainingError, match="has ended"):
        inject(run, "kill-agent", Options(node="n0"))
    assert rank.poll() is None


def test_the_network_of_the_machine_is_left_alone(run, rank):
    if os.geteuid() != 0:
        pytest.skip("reading another process's network namespace needs root")
    (run / "driver").mkdir()
    contact = {"job": "j", "epoch": 1, "pid": rank.pid, "agents": ["127.0.0.1", 1], "api": ""}
    (run / "driver" / "contact.json").write_text(json.dumps(contact))
    (run / "nodes" / "n0").mkdir(parents=True)
    with pytest.raises(TrainingError):
        inject(run, "partition", Options(node="n0"))


def test_redis_is_ordered_to_end(run):
    """The command as it is sent; a server of our own, as the real one may not be installed."""
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                received.append(link.recv(200))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        (run / "config.toml").write_text(load(None, [f"--rendezvous.url=redis://127.0.0.1:{port}"]).to_toml())
        inject(run, "redis-loss")
        thread.join(10)
    assert received == [b"*2\r\n$8\r\nSHUTDOWN\r\n$6\r\nNOSAVE\r\n"]


def test_a_nan_gradient_skips_the_step_and_training_goes_on(tiny, tmp_path):
    folder = tmp_path / "runs" / "tiny" / "faults"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps({"kind": "nan-gradient", "rank": 0, "step": 3}))
    result = train(load_config(tiny, ["--resilience.faults=true"]))
    rows = [strict_json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    norms = {r["step"]: r["grad_norm"] for r in rows if "loss" in r}
    assert result.finished
    assert norms[3] != norms[3]
    assert all(norm == norm for step, norm in norms.items() if step != 3)


def test_a_trainer_that_dies_while_saving_leaves_the_commit_before(tiny, tmp_path, megascale):
    run = tmp_path / "runs" / "tiny"
    (run / "faults").mkdir(parents=True)
    (run / "faults" / "a.json").write_text(json.dumps({"kind": "half-checkpoint", "rank": 0, "step": 3}))
    assert megascale("train", tiny, "--resilience.faults=true").returncode == -signal.SIGKILL
    committed = [p.parent.name for p in (run / "checkpoints").glob("*/COMMIT")]
    assert committed == ["step-2"]
    assert megascale("train", tiny, "--resilience.faults=true").returncode == 0


def test_faults_are_listed():
    result = CliRunner().invoke(app, ["faults", "list", "--json"])
    assert {f["kind"] for f in json.loads(result.stdout)} == set(FAULTS)
