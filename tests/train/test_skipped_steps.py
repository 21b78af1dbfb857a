"""Steps whose gradient is not finite: they are counted and reported, and too many in a row end the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.api import load_config, train
from megascale.errors import TrainingError
from tests.conftest import lines

FAULTS = "--resilience.faults=true"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "tiny"
    (folder / "faults").mkdir(parents=True)
    return folder


def inject(run: Path, step: int, rank: int = 0, persistent: bool = False) -> None:
    fault = {"kind": "nan-gradient", "rank": rank, "step": step, "persistent": persistent}
    (run / "faults" / f"{step}.json").write_text(json.dumps(fault))


def skipped(run: Path) -> dict[int, int]:
    """The count of skipped steps by step, as metrics.jsonl has it."""
    return {r["step"]: r.get("skipped_steps", 0) for r in lines(run / "metrics.jsonl") if "loss" in r}


def reported(run: Path) -> list[int]:
    return [r["step"] for r in lines(run / "events.jsonl") if r["event"] == "nonfinite_gradient"]


def test_skipped_steps_are_counted_and_the_first_of_several_is_reported(tiny, run, capsys):
    for step in (3, 4, 6):
        inject(run, step)
    assert train(load_config(tiny, [FAULTS, "--train.max_skipped_steps=3"])).finished
    assert skipped(run) == {1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 8: 3}
    assert reported(run) == [3, 6]
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "is skipped" in line] == [
        f"step {step} is skipped: its gradient norm is nan" for step in (3, 6)
    ]


def test_too_many_in_a_row_end_the_run(tiny, run):
    inject(run, 3, persistent=True)
    with pytest.raises(TrainingError, match=r"the gradients of 4 steps in a row, up to step 6, are not finite \(norm"):
        train(load_config(tiny, [FAULTS, "--train.max_skipped_steps=4"]))
    assert list(skipped(run)) == [1, 2, 3, 4, 5, 6]
    assert reported(run) == [3]
    last = lines(run / "events.jsonl")[-1]
    assert (last["event"], last["step"]) == ("run_failed", 6)
    assert "--train.max_skipped_steps (now 4)" in last["message"]
    assert train(load_config(tiny, [FAULTS, "--train.max_skipped_steps=0"])).finished


def test_a_run_of_which_no_step_changed_the_weights_fails_on_every_rank(tiny, run, megascale):
    inject(run, 1, rank=1, persistent=True)
    done = megascale("train", tiny, FAULTS, "--parallel.data=2")
    assert done.returncode == 1
    assert "the gradients of 8 steps in a row, up to step 8" in done.stderr
    assert "Traceback" not in done.stderr
    assert "the gradients of 8 steps in a row" in (run / "logs" / "rank-1.log").read_text()
