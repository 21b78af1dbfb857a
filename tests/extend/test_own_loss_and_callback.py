"""A loss and a callback of another package: layouts train alike with it, and a run calls what is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from megascale.api import evaluate, export_model, generate, load_config, train
from megascale.config import from_tree
from megascale.config.parts import CALLBACKS
from megascale.data.tokenizer.tokenizer import train_tokenizer
from megascale.errors import ConfigError
from megascale.ops.cross_entropy import linear_cross_entropy
from megascale.ops.token_loss import TokenLogits, register
from megascale.train import callbacks
from megascale.train.run_folder import load_run_config
from tests.conftest import lines
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.compare import assert_equal
from tests.exact.training import STEPS as ALL_STEPS
from tests.exact.training import RankReport, make_engine, run_step
from tests.exact.training import train as train_steps

pytestmark = pytest.mark.xdist_group("processes")

STEPS = 2


def smoothed(logits: TokenLogits) -> torch.Tensor:
    """Label smoothing of 0.1 and a penalty on the normaliser (Szegedy et al. 2016; Chowdhery et al. 2022)."""
    lse = logits.log_sum_exp()
    mean = logits.sum(logits.values) / 21
    return lse - 0.9 * logits.target_logits() - 0.1 * mean + 0.05 * lse**2


register("smoothed", smoothed)


def train_own(rank: int, world: int, tree: dict[str, Any], steps: int) -> RankReport:
    """Train as `train_steps`. The worker's lookup of this function here registers the loss."""
    return train_steps(rank, world, tree, steps)


@pytest.mark.parametrize("zero", [1, 2])
def test_a_layout_trains_with_a_loss_of_ones_own_as_one_process(zero, pool):
    local = case(2, 2, 2, virtual=2, microbatches=2, zero=zero, train={"loss": "smoothed"})
    [reference] = pool.run(train_own, 1, local.twin, STEPS)
    [plain] = pool.run(train_own, 1, {**local.twin, "train": {**local.twin["train"], "loss": "cross_entropy"}}, STEPS)
    result = pool.run(train_own, local.world, local.tree, STEPS)
    assert_equal(reference, result, from_tree(local.tree).model)
    assert reference.losses[0] != pytest.approx(plain.losses[0], rel=1e-3)


@pytest.mark.parametrize("early", [True, False])
def test_its_gradients_are_autograds(early):
    torch.manual_seed(0)
    x, w = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (10, 24))
    targets = torch.randint(21, (10,))
    targets[3] = -100
    scale = torch.full((), 0.1, dtype=torch.float64)
    custom = linear_cross_entropy(x, w, targets, vocab=21, chunk=4, token_grad=scale if early else None, loss=smoothed)
    result = torch.autograd.grad((custom * 0.1).sum(), (x, w))
    logits = (x @ w.T)[:, :21]
    lse, retained = logits.logsumexp(-1), targets != -100
    picked = logits.gather(-1, targets.where(retained, 0)[:, None])[:, 0]
    plain = (lse - 0.9 * picked - 0.1 * logits.mean(-1) + 0.05 * lse**2).where(retained, 0)
    torch.testing.assert_close(custom, plain)
    for local, remote in zip(result, torch.autograd.grad((plain * 0.1).sum(), (x, w)), strict=True):
        torch.testing.assert_close(local, remote)


class StepRecorder(callbacks.Callback):
    """Notes what it is told, and stops after a step."""

    recorded: ClassVar[list[tuple[str, int]]] = []
    stop_after = 0

    def run_begins(self, run: callbacks.RunView) -> None:
        """As the name says; likewise below."""
        assert (run.rank, run.world) == (0, 1)
        assert {name for name, _ in run.parameters()} >= {"token_embedding", "blocks.0.norm1.weight"}
        self.recorded.append(("begins", run.step))

    def step_ends(self, run: callbacks.RunView) -> None:
        self.recorded.append(("step", run.step))
        if run.step == self.stop_after:
            run.stop()

    def evaluated(self, run: callbacks.RunView, evaluation: Any) -> None:
        assert evaluation.loss > 0
        self.recorded.append(("evaluated all" if evaluation.complete else "evaluated", run.step))

    def run_ends(self, run: callbacks.RunView) -> None:
        self.recorded.append(("ends", run.step))


def parameters_of_a_callback(rank: int, world: int, tree: dict[str, Any]) -> dict[str, Any]:
    """Train some steps and return the parameters that a callback gets after the last one."""
    engine, report = make_engine(rank, world, tree), RankReport()
    for step in range(1, ALL_STEPS + 1):
        run_step(engine, step, report)
    run = callbacks.RunView(engine.config, Path(), rank, world, engine, ALL_STEPS)
    return {name: parameter.detach().numpy().copy() for name, parameter in run.parameters()}


@pytest.mark.parametrize("zero", [1, 2])
def test_a_callback_gets_whole_parameters_on_every_rank(zero, pool):
    """After the last step no gather is under way: a rank has updated its own shards only."""
    # Without a bias of keys, whose gradient is rounding alone.
    layout = case(data=2, microbatches=1, zero=zero, model={**TWO_LAYERS, "attention_bias": False})
    [expected] = pool.run(parameters_of_a_callback, 1, layout.twin)
    for parameters in pool.run(parameters_of_a_callback, layout.world, layout.tree):
        assert parameters.keys() == expected.keys()
        for name, values in parameters.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.fixture(autouse=True)
def _callback() -> Iterator[None]:
    callbacks.register("seen", StepRecorder)
    StepRecorder.recorded.clear()
    yield
    callbacks.KINDS.remove("seen")
    CALLBACKS.remove("seen")


def test_a_callback_is_told_of_steps_and_evaluations_and_may_stop_the_run(tiny, monkeypatch):
    arguments = ["--train.callbacks=seen", "--train.steps=4", "--train.eval_interval=2", "--train.eval_samples=2"]
    monkeypatch.setattr(StepRecorder, "stop_after", 2)
    with pytest.raises(KeyboardInterrupt):
        train(load_config(tiny, arguments))
    stopped = [("begins", 0), ("step", 1), ("step", 2), ("evaluated", 2), ("step", 3), ("ends", 3)]
    assert StepRecorder.recorded == stopped
    StepRecorder.recorded.clear()
    monkeypatch.setattr(StepRecorder, "stop_after", 0)
    assert train(load_config(tiny, arguments)).step == 4
    assert StepRecorder.recorded == [("begins", 3), ("step", 4), ("evaluated", 4), ("evaluated all", 4), ("ends", 4)]
    assert [r["step"] for r in lines(tiny.parent / "runs/tiny/metrics.jsonl") if "loss" in r] == [1, 2, 3, 4]


def test_a_run_is_read_without_the_callback_that_it_was_trained_with(tiny, tmp_path):
    """The reading process lacks the part: generation, evaluation, export, and the tools that read settings."""
    train_tokenizer(["some text"], 260).save(tmp_path / "words.json")
    arguments = ["--train.steps=1", "--model.vocab_size=264", f"--data.tokenizer={tmp_path}/words.json"]
    train(load_config(tiny, arguments + ["--train.callbacks=seen", "--model.positions=rotary"]))
    callbacks.KINDS.remove("seen")
    CALLBACKS.remove("seen")
    run = tmp_path / "runs" / "tiny"
    try:
        with pytest.raises(ConfigError, match=r"train\.callbacks='seen' is not known"):
            load_config(run / "config.toml")  # to train on it is needed
        assert list(generate(run, "some", tokens=3, device="cpu"))
        loss = evaluate(run, device="cpu").loss
        assert export_model(run, tmp_path / "out").tokenizer
        # The same of an optimizer, metric sinks and span sinks; a loss decides what evaluation gives.
        text = (run / "config.toml").read_text()
        for expected, removed in (
            ('name = "adamw"', 'name = "gone"'),
            ("\nsinks = []", '\nsinks = ["gone"]'),
            ('"parquet"', '"gone=far"'),
        ):
            assert expected in text
            text = text.replace(expected, removed, 1)
        (run / "config.toml").write_text(text)
        config = load_run_config(run)
        assert (config.optimizer.name, config.observe.span_sinks) == ("gone", ["gone=far"])
        assert evaluate(run, device="cpu").loss == loss
        (run / "config.toml").write_text(text.replace('loss = "cross_entropy"', 'loss = "gone"'))
        assert list(generate(run, "some", tokens=3, device="cpu"))
        with pytest.raises(ConfigError, match=r"train\.loss='gone' is not known"):
            evaluate(run, device="cpu")
    finally:
        callbacks.register("seen", StepRecorder)
