"""Values of a run's metrics, by formula: tokens and their rate, step time, MFU, held-out losses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megascale.api import evaluate, load_config, train
from megascale.core.flops import flops_per_token
from megascale.train import evaluation_policy, rank_timers
from megascale.train.checkpoint_policy import CheckpointPolicy
from megascale.train.engine import Engine
from megascale.train.evaluation import evaluate_file
from megascale.train.restore import restore_engine
from tests.conftest import lines

TOKENS = 4 * 16  # of a step: train.global_batch x model.sequence_length
PEAK = 1e-3  # TFLOP/s


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Time that only moves where a test says so: seconds of each kind of work, by its name, and how often it ran."""
    spent = {"step": 0.5, "evaluation": 100.0, "save": 1000.0, "now": 0.0}

    def taking(name: str, work: Callable) -> Callable:
        def run(*args, **options):
            result = work(*args, **options)
            spent["now"] += spent[name]
            return result

        return run

    monkeypatch.setattr(rank_timers, "time", SimpleNamespace(perf_counter=lambda: spent["now"]))
    monkeypatch.setattr(Engine, "step", taking("step", Engine.step))
    monkeypatch.setattr(evaluation_policy, "evaluate_file", taking("evaluation", evaluate_file))
    monkeypatch.setattr(CheckpointPolicy, "save", taking("save", CheckpointPolicy.save))
    return spent


def test_step_time_and_rates_are_those_of_steps_alone(tiny, tmp_path, seconds):
    arguments = ["--train.eval_interval=3", "--checkpoint.interval=2", f"--observe.peak_tflops={PEAK}"]
    config = load_config(tiny, arguments)
    train(config)
    assert seconds["now"] == 8 * 0.5 + 3 * 100.0 + 4 * 1000.0  # evaluated after 3, 6, 8; saved after 2, 4, 6, 8
    records = [record for record in lines(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss" in record]
    assert [record["seconds"] for record in records] == [0.5] * 8
    assert [record["tokens_per_second"] for record in records] == [TOKENS / 0.5] * 8
    assert [record["tokens"] for record in records] == [TOKENS * step for step in range(1, 9)]
    flops = flops_per_token(config.model).training
    assert [record["mfu"] for record in records] == pytest.approx([flops * TOKENS / 0.5 / (PEAK * 1e12)] * 8)


def test_of_several_ranks_all_tokens_and_all_peaks_count(tiny, tmp_path, megascale):
    arguments = ["--parallel.data=2", "--train.steps=2", f"--observe.peak_tflops={PEAK}"]
    done = megascale("train", tiny, *arguments)
    assert done.returncode == 0, done.stderr
    flops = flops_per_token(load_config(tiny, arguments).model).training
    for record in lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")[:2]:
        assert record["tokens_per_second"] == pytest.approx(TOKENS / record["seconds"])
        assert record["mfu"] == pytest.approx(flops * record["tokens_per_second"] / (2 * PEAK * 1e12))


def test_held_out_losses_of_a_run_are_of_the_same_tokens(tiny, tmp_path):
    result = train(load_config(tiny, ["--train.eval_interval=3", "--train.eval_samples=3"]))
    run = tmp_path / "runs" / "tiny"
    records = [record for record in lines(run / "metrics.jsonl") if "valid_loss" in record]
    assert [record["step"] for record in records] == [3, 6, 8]
    assert [record["valid_tokens"] for record in records] == [3 * 16] * 3
    assert [record["tokens"] for record in records] == [TOKENS * step for step in (3, 6, 8)]
    assert ["valid_whole_loss" in record for record in records] == [False, False, True]
    engine, config = restore_engine(run, device="cpu")
    part = evaluate_file(engine, config, config.data.valid, 3)
    assert (records[-1]["valid_loss"], part.complete) == (part.loss, False)
    full = evaluate(run, device="cpu")
    assert full == result.evaluation
    assert (records[-1]["valid_whole_loss"], records[-1]["valid_whole_tokens"]) == (full.loss, full.tokens)
    assert full.complete
    assert full.tokens > 3 * 16
    events = [record for record in lines(run / "events.jsonl") if record["event"] == "evaluated"]
    assert [event["tokens"] for event in events] == [3 * 16, 3 * 16, full.tokens]


def test_the_last_line_names_both_held_out_losses(capsys):
    from megascale.observe.metrics import Terminal

    terminal = Terminal(8, 1, live=False)
    terminal.write({"step": 4, "valid_loss": 2.5, "valid_tokens": 48})
    last = {"valid_whole_loss": 2.25, "valid_whole_tokens": 400, "valid_bits_per_byte": 1.5}
    terminal.write({"step": 8, "valid_loss": 2.0, "valid_tokens": 48, **last})
    terminal.write({"step": 8, "valid_loss": 2.0, "valid_tokens": 400, **last})
    assert capsys.readouterr().out.splitlines() == [
        "step 4: held-out loss 2.5000",
        "step 8: held-out loss 2.0000, of the whole file 2.2500  bits per byte 1.500",
        "step 8: held-out loss 2.0000  bits per byte 1.500",
    ]
