"""A rehearsed step runs with the settings of any layout on one rank, and changes nothing in later training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import Batch
from megascale.core.layout import lay_out
from megascale.train import rehearsal, warm_up
from megascale.train.engine import Engine
from tests.exact.cases import SMALL, case

CPU = torch.device("cpu")
EXPERTS = {"mlp": "experts", "mlp_bias": False, "activation": "swiglu", "norm": "rmsnorm"}
TREES = {
    "tensor x pipeline x data": case(2, 2, 2, microbatches=4, virtual=2, zero=1).tree,
    "ZeRO-3, LAMB": case(data=4, microbatches=2, zero=3, optimizer={"name": "lamb"}).tree,
    "context": case(microbatches=2, parallel={"context": 2}).tree,
    "two kinds of layers": case(microbatches=2, model={"layer_pattern": "LS", "window": 4}).tree,
    "experts over data": case(
        data=2,
        microbatches=2,
        model=EXPERTS | {"experts": {"number": 4}},
        parallel={"experts_over": "data", "expert": 2},
    ).tree,
    "copies": case(data=2, microbatches=2, zero=3, overlap={"gathers": "copies"}).tree,
}


def train(tree: dict[str, Any]) -> list[float]:
    """Return the losses of three steps on one rank."""
    engine = Engine(lay_out(from_tree(tree), 1), None, CPU)
    rows = torch.arange(18).reshape(9, 2) % 21
    losses = []
    for step in (1, 2, 3):
        result = engine.step(lambda _: Batch(rows[:-1], rows[1:]), step, 1e-2)
        losses.append(float(result.loss))
    return losses


@pytest.mark.parametrize("name", TREES)
def test_a_step_of_a_small_model_is_rehearsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    run_step = Engine.step

    def step(engine: Engine, *arguments: Any, **options: Any) -> Any:
        steps.append(engine.layout)
        return run_step(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "step", step)
    config = from_tree(TREES[name])
    assert rehearsal.rehearse(config, CPU)
    (layout,) = steps
    assert layout.grid.world_size == 1
    assert layout.config.model.layers == (2 if name == "two kinds of layers" else 1)
    assert layout.config.model.hidden == config.model.hidden


def test_training_after_a_rehearsal_has_the_same_losses() -> None:
    tree = SMALL | {"train": SMALL["train"] | {"global_batch": 4, "micro_batch": 2}}
    expected = train(tree)
    assert rehearsal.rehearse(from_tree(tree), CPU)
    assert train(tree) == expected


@pytest.mark.parametrize(
    ("error", "text"), [(RuntimeError("CUDA out of memory"), "CUDA out of memory"), (MemoryError(), "MemoryError()")]
)
def test_a_rehearsal_that_fails_is_only_logged(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(rehearsal, "_run_step", fail)
    assert not rehearsal.rehearse(from_tree(SMALL), CPU)
    assert f"the rehearsal of a step failed: {text}\n" in caplog.text


def test_a_rehearsal_of_a_load_that_fails_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bool:
        raise RuntimeError("no thread")

    monkeypatch.setattr(warm_up, "rehearse_live_load", fail)
    assert warm_up.warm_up(from_tree(SMALL), 0, use_gpu=False) == "no GPU"
    assert "the rehearsal of a load failed: no thread" in caplog.text
