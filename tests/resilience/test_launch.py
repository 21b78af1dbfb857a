"""Whole jobs under the driver, broken on purpose with real signals: they recover, and the weights are the same."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from megascale import checkpoint
from megascale.core.addresses import find_free_port
from megascale.errors import EXIT_USAGE
from megascale.resilience.driver.state.journal_reader import JournalReader
from megascale.resilience.process_birth import read_birth_time
from megascale.train.restore import restore_engine
from tests.conftest import lines
from tests.forked import Forked

# For jobs that lose no node: on a machine that is busy with other things a heartbeat may take its time.
CALM = ["--resilience.window=30"]
# Python for a driver whose nodes measure the rate of GEMMs for a shorter time than a person's.
SHORT_GEMMS = "from megascale.resilience.diagnose import compute; compute.GEMM_SECONDS = 0.01"


def weights(run: Path) -> dict[str, torch.Tensor]:
    engine, _ = restore_engine(run, device="cpu")
    return {
        name: tensor.clone() for name, _, _, tensor in engine.optimizer.logical_tensors() if name.startswith("model.")
    }


def losses(run: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in lines(run / "metrics.jsonl") if "loss" in r]


def assert_same_run(run: Path, calm: Path) -> None:
    assert losses(run) == losses(calm)
    expected = weights(calm)
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, expected[name]), name


def test_killed_rank_driver_agent_and_node_leave_the_weights_of_an_undisturbed_run(launch, megascale, tiny, tmp_path):
    steps = ["--train.steps=64", "--checkpoint.interval=8"]
    job = launch("broken", "--nodes=2", "--spares=1", *steps)
    job.until("first_step")
    job.until_step(12)
    job.kill_rank(1)
    exit_ = job.until("process_killed")
    assert (exit_.action, exit_.nodes, exit_.ranks) == ("recover", ("n1",), (1,))
    assert "SIGKILL" in exit_.evidence[0]
    assert job.until("recovery_action").action == "retry"
    job.until("first_step", attempt=2)

    job.process.kill()
    job.process.wait()
    pids = [job.pid(0), job.pid(1)]
    job.start()
    job.until("driver_took_over")
    job.until("node_joined")
    job.until_step(20)
    assert [job.pid(0), job.pid(1)] == pids  # the trainers never noticed

    job.kill_agent("n0")
    lost = job.until("recovery_action", nodes=("n0",))
    assert lost.action == "respawn"
    job.until("first_step", attempt=3)
    job.kill_agent("n1", down=True)
    assert job.until("recovery_action", nodes=("n1",)).action == "spare"
    started = job.until("attempt_started")
    assert started.nodes == ("n0", "n2")
    assert job.finish() == 0, job.story()
    assert job.events()[-2].kind == "job_done"
    # Nothing is left behind.
    for node in ("n0", "n1", "n2"):
        assert not read_birth_time(job.agent(node))

    calm = megascale("train", tiny, *steps, "--train.name=calm", "--parallel.data=2")
    assert calm.returncode == 0, calm.stderr
    assert_same_run(job.run, tmp_path / "runs" / "calm")
    ledger = [r["first"] for r in lines(job.run / "samples" / "ledger.jsonl")]
    assert ledger == [4 * i for i in range(64)]  # no sample twice, none left out


def test_a_node_whose_agent_is_stopped_trains_on_and_is_lost_once_its_ranks_are(launch):
    job = launch("silent", "--nodes=2", "--resilience.window=2", "--train.steps=100000", "--checkpoint.interval=8")
    job.until("first_step")
    os.kill(job.agent("n1"), signal.SIGSTOP)
    report = job.until("agent_silent")
    assert (report.action, report.nodes, report.ranks) == ("alert", ("n1",), (1,))
    job.until_step(losses(job.run)[-1][0] + 10)
    os.kill(job.pid(1), signal.SIGSTOP)
    lost = job.until("missed_heartbeat")
    assert (lost.action, lost.nodes, lost.attempt) == ("recover", ("n1",), 1)
    job.until("first_step", attempt=2)


def test_interrupt_saves_and_the_same_command_goes_on(launch):
    job = launch("stopped", "--nodes=1", "--train.steps=100000", "--checkpoint.interval=0")
    job.until("first_step")
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.story()
    ended = "the job is interrupted: a person ended it; the same command resumes from the newest saved state"
    assert ended in job.output.read_text()
    saved = checkpoint.latest(job.run / "checkpoints")
    assert saved
    job.words.append(f"--train.steps={saved + 3}")
    job.start()
    assert job.finish() == 0, job.story()
    assert losses(job.run)[-1][0] == saved + 3
    assert [step for step, _ in losses(job.run)] == list(range(1, saved + 4))


def test_a_closed_session_without_output_saves_and_ends_the_job(launch):
    lost = "import os; reader, writer = os.pipe(); [os.dup2(writer, n) for n in (1, 2)]; os.close(reader)"
    job = launch("hung-up", "--nodes=1", "--train.steps=100000", "--checkpoint.interval=0", before=lost)
    job.until("first_step")
    job.until_step(3)
    job.process.send_signal(signal.SIGHUP)
    assert job.finish() == 130, job.story()
    assert checkpoint.latest(job.run / "checkpoints")


def test_pause_evict_and_resume_through_the_commands(launch, megascale):
    arguments = ["--nodes=2", "--spares=1", "--train.steps=100000", "--checkpoint.interval=0"]
    options = ["--resilience.test_spares=true", "--resilience.grace_period=120", *CALM]
    job = launch("steered", *arguments, *options, before=SHORT_GEMMS)
    job.until("first_step")
    tested = job.until("node_diagnosed")  # the spare, while training goes on
    assert (tested.nodes, tested.action) == (("n2",), "none"), tested.evidence
    assert "self-checks passed" in megascale("nodes", job.run).stdout
    assert "done" in megascale("pause", job.run, "--why", "lunch").stdout
    assert "lunch" in job.until("paused").evidence
    job.wait(lambda: _phase(job.run) == "paused", "the pause")
    saved = checkpoint.latest(job.run / "checkpoints")
    repeated = megascale("pause", job.run)
    assert repeated.returncode == 2
    assert "nothing to pause" in repeated.stderr
    megascale("cordon", job.run, "n2")
    assert megascale("resume", job.run).returncode == 0
    job.until("first_step")
    assert losses(job.run)[saved - 1][0] == saved
    megascale("uncordon", job.run, "n2")
    assert megascale("evict", job.run, "n1", "--why", "noisy").returncode == 0
    assert job.until("attempt_started").nodes == ("n0", "n2")
    job.until("first_step")
    shown = megascale("nodes", job.run)
    assert "evicted" in shown.stdout
    unknown = megascale("evict", job.run, "n9")
    assert unknown.returncode == 2
    assert "n0, n1, n2" in unknown.stderr
    story = megascale("events", job.run, "--all").stdout
    for part in ("noisy", "lunch", "recovery_action", "checkpoint_saved"):
        assert part in story
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 130
    assert "interrupted" in megascale("jobs", job.run, "--json").stdout


def test_new_settings_take_force_and_bad_ones_are_taken_back(launch, megascale):
    job = launch("updated", "--nodes=1", "--parallel.data=1", "--train.steps=100000", "--checkpoint.interval=0")
    job.until("first_step")
    assert megascale("restart", job.run, "--lr.peak=0.5", "--lr.schedule=constant").returncode == 0
    assert "lr.peak: 0.01 -> 0.5" in job.until("updated").evidence
    job.until("first_step", attempt=2)
    rates = [r["learning_rate"] for r in lines(job.run / "metrics.jsonl") if "loss" in r]
    job.wait(lambda: lines(job.run / "metrics.jsonl")[-1].get("learning_rate", 0) > 10 * rates[0], "the new rate")
    refused = megascale("restart", job.run, "--model.hidden=64")
    assert refused.returncode == 2
    assert "model.hidden=64 cannot be changed" in refused.stderr
    accept = "--checkpoint.accept_changes=data.train"
    assert megascale("restart", job.run, "--data.train=nowhere/train", accept, "--why", "new data").returncode == 0
    assert "brought no step" in job.until("update_undone").evidence[0]
    job.until("first_step")  # with the settings before
    assert "nowhere" not in (job.run / "driver" / "job.toml").read_text()


def _phase(run: Path) -> str:
    reader = JournalReader(run)
    reader.close()
    return reader.job.phase if reader.job else ""


def test_without_spares_or_new_nodes_data_parallelism_shrinks(launch):
    arguments = ["--nodes=2", "--train.steps=80", "--checkpoint.interval=8", "--resilience.replenish_wait=0"]
    job = launch("shrunk", *arguments)
    job.until("first_step")
    job.until_step(10)
    job.kill_agent("n1", down=True)
    job.until("recovery_action", nodes=("n1",))
    shrink = job.until("recovery_action", action="shrink")
    assert "from 2 to 1" in shrink.evidence[0]
    assert job.until("attempt_started").nodes == ("n0",)
    assert job.finish() == 0, job.story()
    assert [step for step, _ in losses(job.run)] == list(range(1, 81))


def test_bad_data_ends_with_its_exit_code_and_no_second_try(launch, tmp_path):
    job = launch("wrong", "--nodes=1", "--data.train=nowhere/train", "--data.valid=nowhere/valid")
    assert job.finish() == 4, job.story()
    assert sum(e.kind == "attempt_started" for e in job.events()) <= 1


def test_a_folder_that_cannot_be_locked_ends_the_job_at_once_with_the_reason_of_rank_0(launch, tmp_path):
    (tmp_path / "shared" / "trainer.lock").mkdir(parents=True)
    job = launch("unlocked", "--nodes=2", f"--checkpoint.location={tmp_path / 'shared'}")
    assert job.finish() == EXIT_USAGE, job.story()
    assert sum(e.kind == "attempt_started" for e in job.events()) == 1
    failed = next(e for e in job.events() if e.kind == "job_failed")
    message = (
        f"the lock file {tmp_path}/shared/trainer.lock cannot be created: Is a directory; make its folder writable"
    )
    assert re.match(rf"rank \d reported: (ConfigError: )?{re.escape(message)}", failed.evidence[0]), failed.evidence


def test_a_second_driver_is_refused_and_a_stopped_one_is_fenced(launch):
    job = launch("fenced", "--nodes=1", "--train.steps=100000", "--checkpoint.interval=0", "--resilience.lease=1")
    job.until("first_step")
    second = Forked(job.words, cwd=job.cwd, env=job.environment)
    assert "already runs this job" in second.communicate(timeout=100)[0]
    assert second.returncode == 2
    pid, old = job.pid(0), job.process
    os.kill(old.pid, signal.SIGSTOP)  # it lives, but does not renew its lease
    job.start()
    job.until("driver_took_over")
    job.until("node_joined")
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait(60) == 2  # it sees that it was replaced, and touches nothing
    assert "another driver has taken over the job" in job.output.read_text()
    assert job.pid(0) == pid
    os.kill(pid, 0)
    assert [e.attempt for e in job.events() if e.kind == "attempt_started"] == [1]
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.story()


def test_time_outs_in_the_wrong_order_are_named_before_anything_starts(megascale, tiny, tmp_path):
    result = megascale("launch", tiny, "--resilience.window=700")
    assert result.returncode == 2
    assert "resilience.window=700" in result.stderr
    assert "rendezvous.timeout=300" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_agents_end_when_no_driver_comes_back(launch):
    job = launch(
        "orphan",
        "--nodes=1",
        "--train.steps=100000",
        "--checkpoint.interval=0",
        "--resilience.orphan=4",
        "--resilience.window=2",
        "--resilience.lease=3",
    )
    job.until("first_step")
    agent = job.agent("n0")
    job.process.kill()
    job.process.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and read_birth_time(agent):
        time.sleep(0.05)
    assert not read_birth_time(agent)
    assert checkpoint.latest(job.run / "checkpoints")  # the trainers saved first


def test_the_metrics_of_a_job_and_its_node_are_discovered_until_it_ends(launch, tmp_path):
    targets = tmp_path / "targets"
    targets.mkdir()
    job = launch(
        "seen",
        "--nodes=1",
        "--train.steps=100000",
        "--checkpoint.interval=0",
        f"--resilience.targets={targets}",
        f"--resilience.driver_metrics=127.0.0.1:{find_free_port()}",
        f"--resilience.agent_metrics=127.0.0.1:{find_free_port()}",
        "--resilience.job_name=team",
    )
    job.until_step(3)
    file = targets / "seen.json"
    groups = job.wait(lambda: len(groups := json.loads(file.read_text())) == 2 and groups, "both targets")
    assert [group["labels"]["role"] for group in groups] == ["driver", "agent"]
    for group in groups:
        with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics", timeout=20) as response:
            samples = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        assert samples
        assert all('{run="seen",job_name="team"' in sample for sample in samples)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.story()
    assert not file.exists()


def test_a_collector_gets_the_recovery_and_the_end_of_a_job(launch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install -e '.[otel]'")
    from tests.otlp_collector import Collector, read_attributes

    collector = Collector()
    try:
        export = [f"--resilience.otlp={collector.url}", "--resilience.otlp_interval=0.2"]
        job = launch("exported", "--nodes=1", "--train.steps=40", "--checkpoint.interval=8", *CALM, *export)
        job.until("first_step")
        job.kill_rank(1)
        job.until("first_step", attempt=2)
        assert job.finish() == 0, job.story()
    finally:
        collector.close()
    spans = collector.read_spans()
    root = read_attributes(spans["recovery"].attributes)
    assert (root["megascale.cause"], root["megascale.action"], root["megascale.attempt"]) == (
        "process killed",
        "retry",
        2,
    )
    phases = {
        read_attributes(point.attributes)["phase"]: point.as_double
        for point in collector.read_metrics()["megascale_job_phase"].gauge.data_points
    }
    assert [phase for phase, value in phases.items() if value] == ["done"]


def test_an_address_for_metrics_that_is_taken_is_named_at_the_start(launch):
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        address = f"127.0.0.1:{occupied.getsockname()[1]}"
        job = launch("taken", f"--resilience.driver_metrics={address}")
        assert job.finish() == 2
    assert f"resilience.driver_metrics={address}: Address already in use" in job.story()


def test_a_node_that_cannot_serve_its_metrics_says_so_in_the_events(launch):
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        address = f"127.0.0.1:{occupied.getsockname()[1]}"
        job = launch("mute", "--nodes=1", "--train.steps=100000", f"--resilience.agent_metrics={address}")
        job.until("node_joined")
        [joined] = [event for event in job.events() if event.kind == "node_joined"]
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.story()
    assert f"its /metrics cannot be served at resilience.agent_metrics={address}: " in str(joined.evidence)
