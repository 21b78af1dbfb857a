"""`python -m benchmarks alternate`: one engine in real processes, values in turn, and what is changed between steps."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.training.alternate import SETTINGS, change, difference, measure, order, parse
from megascale import config as configuration
from megascale.config import ParallelConfig, from_tree
from megascale.core.batch import Batch
from megascale.core.layout import lay_out
from megascale.core.spans import Recorder
from megascale.errors import ConfigError
from megascale.model.block import SerialBlock
from megascale.observe.rank.timers import Timers
from megascale.ops import dispatch
from megascale.train.engine import Engine

SMALL = [
    "--model.layers=2", "--model.hidden=32", "--model.heads=2", "--model.sequence_length=16", "--model.vocab_size=64",
    "--train.micro_batch=2", "--train.global_batch=4", "--train.precision=float32", "--train.device=cpu",
]  # fmt: skip


def test_values_take_turns_and_train_alike(benchmarks, tmp_path):
    arguments = [
        "tiny",
        "parallel.recompute=none,selective,full",
        "--turns=2",
        "--each=2",
        "--parallel.tensor=2",
    ] + SMALL
    result = benchmarks("alternate", *arguments, "--out", tmp_path / "a.json")
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["processes"], record["setting"]) == (2, "parallel.recompute")
    assert [item["name"] for item in record["values"]] == ["none", "selective", "full"]
    assert all(len(item["seconds"]) == 4 and min(item["seconds"]) > 0 for item in record["values"])
    # The learning rate is zero: every step of every value sees the same weights.
    losses = [loss for item in record["values"] for loss in item["losses"]]
    assert losses == pytest.approx([losses[0]] * 12, rel=1e-5)
    assert "selective" in result.stdout


def test_peers_learn_that_a_measurement_has_ended():
    config = configuration.load(None, SMALL)
    with mock.patch.object(Engine, "close") as close:
        record = measure(config, "parallel.recompute", ["none", "full"], turns=1, each=1)
    assert record is not None
    close.assert_called_once_with()


@pytest.mark.parametrize(("replicas", "is_deterministic"), [(1, True), (2, False)])
def test_replays_that_cannot_work_are_refused(replicas, is_deterministic):
    engine = SimpleNamespace(
        layout=SimpleNamespace(grid=SimpleNamespace(replicas=replicas)),
        runtime=SimpleNamespace(kernels=SimpleNamespace(deterministic=is_deterministic)),
        device=torch.device("cpu"),
    )
    with pytest.raises(ConfigError, match=r"set --parallel\.data=2 and --kernels\.deterministic=true"):
        change(engine, "resilience.replay_interval", 0)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("overlap.data=on,off", "overlap.data cannot change"), ("overlap.gemms=on", "two values or more"),
        ("overlap.gemms=on,on", "each once"), ("overlap.gemms=on,maybe", "no value 'maybe'"),
        ("parallel.recompute", "no value ''"),
    ],
)  # fmt: skip
def test_wrong_calls_name_the_remedy(setting, part):
    with pytest.raises(ConfigError, match=part):
        parse(setting)


def test_settings_are_those_of_the_configuration():
    modes = ParallelConfig.model_fields["recompute"].annotation.__args__
    assert set(SETTINGS["parallel.recompute"]) == set(modes) - {"mlp", "attention"}  # these suit long sequences
    assert order(["a", "b"], 3) == ["a", "b", "b", "a", "a", "b"]


@pytest.fixture
def engine():
    tree = {
        "model": {"layers": 2, "hidden": 16, "heads": 2, "sequence_length": 8, "vocab_size": 32},
        "train": {"micro_batch": 1, "global_batch": 1, "precision": "float32"},
    }
    return Engine(lay_out(from_tree(tree), 1), None, torch.device("cpu"))


def test_backward_runs_in_the_calling_thread_unless_asked_for_apart(engine):
    rows = torch.arange(9)[:, None]
    observed = []
    engine.chunks[0].token_embedding.register_hook(lambda grad: observed.append(torch._C._is_multithreading_enabled()))
    for value in (None,) + SETTINGS["backward"]:
        if value is not None:
            change(engine, "backward", 0)(value)
        engine.step(lambda i: Batch(rows[:-1], rows[1:]), 1, 0.0)
    assert observed == [False, True, False]
    assert torch._C._is_multithreading_enabled()


def test_an_engine_changes_between_steps(engine):
    rows = torch.arange(9)[:, None]
    observed = {}
    for subject in ("none", "full"):
        engine.set_recompute(subject)
        with mock.patch.object(SerialBlock, "forward", autospec=True, side_effect=SerialBlock.forward) as forward:
            report = engine.step(lambda i: Batch(rows[:-1], rows[1:]), 1, 0.0)
        observed[subject] = (forward.call_count, float(report.grad_norm))
    assert (observed["none"][0], observed["full"][0]) == (2, 4)
    assert observed["none"][1] == pytest.approx(observed["full"][1], rel=1e-6)
    exchange = SimpleNamespace(on_side_stream=False)
    engine.tensor_axis = SimpleNamespace(exchange=exchange)
    with mock.patch.object(engine.runtime, "use_side_stream") as use:
        engine.run_gemms_on_side_stream(True)
    assert exchange.on_side_stream
    use.assert_called_once_with(True, torch.device("cpu"))


def test_the_bound_of_a_difference_holds_the_truth():
    """Of 200 sets of pairs whose true median is 1%, at most a few bounds miss it; with few pairs they are the ends."""
    rng, missed = np.random.default_rng(0), 0
    for _ in range(200):
        middle, low, high = difference([1.0] * 40, list(1.01 + 0.05 * rng.standard_normal(40)))
        assert low <= middle <= high
        missed += not low <= 0.01 <= high
    assert 1 <= missed <= 16  # 5% are 10
    assert difference([1.0, 1.0], [1.0, 2.0]) == (0.5, 0.0, 1.0)


def test_determinism_changes_between_steps_with_its_own_kernels(engine):
    rows = torch.arange(9)[:, None]
    set_to = change(engine, "kernels.deterministic", 0)
    observed = {}
    forward = SerialBlock.forward

    def observe(block, *arguments, **options):
        observed[value] = dispatch.is_deterministic(), torch.are_deterministic_algorithms_enabled()
        return forward(block, *arguments, **options)

    for value in ("true", "false", "true"):
        set_to(value)
        with mock.patch.object(SerialBlock, "forward", observe):
            engine.step(lambda i: Batch(rows[:-1], rows[1:]), 1, 0.0)
        assert observed[value] == (value == "true", value == "true")
        assert [choice.name for choice in engine.runtime.attention.choices.values()] == ["sdpa"]
    assert engine.active["attention with kernels.deterministic=false"] == "sdpa"


def test_timers_are_put_in_and_out(engine):
    set_to = change(engine, "observe.timers", 0)
    set_to("true")
    assert isinstance(engine.runtime.recorder, Timers)
    set_to("false")
    assert type(engine.runtime.recorder) is Recorder
    change(engine, "observe.spans", 0)("1")
    assert engine.runtime.recorder.every == 1
