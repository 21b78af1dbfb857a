"""A rehearsed step runs with the settings of any layout on one rank, and changes nothing in later training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import Batch
from megascale.core.head_exchange import count_head_parts, share_heads
from megascale.core.layout import lay_out
from megascale.train import rehearsal, warm_up
from megascale.train.attention_choice import list_shapes
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


@pytest.mark.parametrize(
    ("preset", "tensor", "context"),
    [("gpt-13b", 2, 1), ("gpt-13b", 4, 1), ("llama-8b", 2, 2), ("gpt-oss-20b", 4, 1), ("qwen3-8b", 2, 1)],
)
def test_the_small_model_has_the_attention_shapes_of_the_run(preset: str, tensor: int, context: int) -> None:
    """A kernel for another shape would be chosen by measurements, for which the recovery would wait."""
    parallel = {"tensor": tensor, "context": context}
    config = from_tree({"model": {"preset": preset, "vocab_size": 50304}, "parallel": parallel})
    small_layout = rehearsal._lay_out_small_model(config)
    shapes = list_shapes(config, tensor, torch.bfloat16, context=context)
    if context > 1:
        parts = count_head_parts(share_heads(32 // tensor, 8 // tensor, context), config.exchanges_heads_in_parts)
        shapes = [shape._replace(N=shape.N * parts, G=shape.G * parts) for shape in shapes]
    assert list_shapes(small_layout.config, 1, torch.bfloat16) == shapes


def test_heads_that_ranks_cannot_share_are_kept() -> None:
    config = from_tree(
        {"model": {"heads": 6, "kv_heads": 3, "hidden": 96, "vocab_size": 64}, "parallel": {"context": 2}}
    )
    assert rehearsal._divide_widths(config) == {}
    assert rehearsal.rehearse(config, CPU)


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
