"""Replays in a run: the rank is named before the update, evidence is kept, and unconfirmed states are passed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.api import evaluate, load_config
from megascale.core.exit_record import ExitKind
from megascale.core.layout import lay_out
from megascale.core.status import read_status
from megascale.errors import FitError
from tests.conftest import lines
from tests.forked import Forked

WORDS = ["--parallel.data=2", "--kernels.deterministic=true", "--resilience.replay_interval=3", "--checkpoint.keep=4"]
# From the backward of step 5 on rank 1 returns a wrong activation whenever it runs a forward.
# Rank 0 writes its files late, and no rank may end before.
FAULTY = """
import os
import time
from pathlib import Path
from megascale.train import replay_response
from megascale.train.replay_check import ReplayCheck
from megascale.parallel.pipeline import EagerRunner
forward, begin_step, steps = EagerRunner.forward, ReplayCheck.begin_step, []
def begin(check, step):
    steps.append(step)
    begin_step(check, step)
def run(runner, chunk, i, x):
    y = forward(runner, chunk, i, x)
    if os.environ.get("RANK") == "1" and steps and steps[-1] >= 5:
        y.mul_(1.001)
    return y
write, attach = replay_response._write_record, replay_response.attach_record
def write_late(file, record):
    time.sleep(0.3)
    write(file, record)
def attach_after_files(*arguments, **options):
    assert Path("runs/tiny/replays/unconfirmed.json").exists()
    return attach(*arguments, **options)
ReplayCheck.begin_step, EagerRunner.forward = begin, run
replay_response._write_record, replay_response.attach_record = write_late, attach_after_files
"""


def train(file: Path, folder: Path, *words: str, before: str = "") -> tuple[int, str]:
    process = Forked(["train", file, *WORDS, *words], before=before, cwd=folder, env={"COLUMNS": "200"})
    output = process.communicate(timeout=240)[0]
    return process.wait(), " ".join(output.split())


@pytest.mark.parametrize("action", ["evict", "stop"])
def test_a_wrong_rank_ends_the_run_before_the_update_and_the_next_start_goes_back(action, tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    (run / "replays").mkdir(parents=True)
    (run / "replays" / "step-6.json").write_text("evidence of an earlier mismatch")
    code, output = train(tiny, tmp_path, f"--resilience.replay_action={action}", before=FAULTY)
    assert code == 1, output
    assert "one of rank 0 (cpu of" in output
    assert "Training stopped before the update of step 6" in output
    (event,) = [record for record in lines(run / "events.jsonl") if record["event"] == "replay_mismatch"]
    assert (event["step"], event["ranks"], event["named"], event["tensor"]) == (6, [0, 1], False, "loss")
    assert (run / "replays" / "step-6.json").read_text() == "evidence of an earlier mismatch"
    assert event["evidence"].endswith("step-6-2.json")
    evidence = json.loads((run / "replays" / "step-6-2.json").read_text())
    assert evidence["verdict"]["is_persistent"]
    assert evidence["confirmed_step"] == 3
    for rank in range(2):
        status = read_status(run / "status" / f"rank-{rank}.status")
        assert (status.exit.kind, status.exit.subject) == (ExitKind.WRONG_BITS, "loss")
    # States of steps 2 and 4 are saved; only the first is confirmed.
    code, output = train(tiny, tmp_path)
    assert code == 0, output
    assert "states after step 3 are passed over: the replay of step 6 gave other bits" in output
    (resumed,) = [record for record in lines(run / "events.jsonl") if record["event"] == "resumed"]
    assert resumed["step"] == 2
    assert not (run / "replays" / "unconfirmed.json").exists()


def test_a_wrong_update_ends_the_run_before_its_state_is_saved(tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    (run / "faults").mkdir(parents=True)
    (run / "faults" / "a.json").write_text(json.dumps({"kind": "flip-update", "rank": 1, "step": 6}))
    code, output = train(tiny, tmp_path, "--resilience.faults=true")
    assert code == 1, output
    assert "rank 1 (cpu of" in output
    assert "Training stopped after the update of step 6" in output
    evidence = json.loads((run / "replays" / "step-6.json").read_text())
    assert evidence["verdict"]["ranks"] == [1]
    assert evidence["verdict"]["tensor"].startswith("master weights ")
    assert (evidence["is_after_update"], evidence["confirmed_step"]) == (True, 3)
    assert not (run / "checkpoints" / "step-6").exists()


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        ([], 1, "compares data-parallel replicas, and there is 1"),
        (["--kernels.deterministic=false"], 2, "set --kernels.deterministic=true"),
    ],
)
def test_replays_that_cannot_work_are_refused(words, world, message, tiny):
    with pytest.raises(FitError, match=message):
        lay_out(load_config(tiny, ["--resilience.replay_interval=3"] + words), world)


def test_a_given_interval_turns_determinism_on(tiny):
    config = load_config(tiny, ["--resilience.replay_interval=3"])
    assert config.requested_determinism is True
    assert load_config(tiny, ["--resilience.replay_interval=0"]).requested_determinism is None
    assert load_config(tiny, []).requested_determinism is None


def test_a_run_with_replays_can_be_evaluated(tiny, tokens, tmp_path, megascale):
    """The ranks of an evaluation have no replica, and need none."""
    code, output = train(tiny, tmp_path, "--train.steps=4")
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    loss = evaluate(run, str(tokens / "valid"), device="cpu").loss
    evaluated = megascale("evaluate", run, "--file", tokens / "valid", "--context", 2, "--json", "--device", "cpu")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--kernels.deterministic=true"], "once per 190 steps, by the replica at distance 1;"),
        (["--kernels.deterministic=false"], None),
        ([], None),
        (["--kernels.deterministic=true", "--parallel.data=1"], None),
        (["--kernels.deterministic=true", "--resilience.replay_interval=0"], None),
        (["--kernels.deterministic=true", "--resilience.replay_interval=7"], "once per 7 steps, by"),
        (
            ["--kernels.deterministic=true", "--parallel.data=4", "--parallel.replicate=2"],
            "off (resilience.replay_interval=auto: parallel.replicate=2 is not supported yet)",
        ),
    ],
)
def test_auto_replays_where_determinism_is_on_and_names_other_obstacles(words, line, tiny, tmp_path):
    arguments = ["--parallel.data=2", "--train.steps=1", "--train.micro_batch=1", "--train.global_batch=8", *words]
    process = Forked(["train", tiny, *arguments], cwd=tmp_path, env={"COLUMNS": "200"})
    output = process.communicate(timeout=240)[0]
    assert process.wait() == 0, output
    (active,) = [r for r in lines(tmp_path / "runs" / "tiny" / "events.jsonl") if r["event"] == "active"]
    if line is None:
        assert "replay" not in active
    else:
        assert active["replay"].startswith(line)
