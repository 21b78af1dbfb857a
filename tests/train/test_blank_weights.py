"""An engine whose state will be loaded draws no initial weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale import checkpoint, config
from megascale.core.layout import lay_out
from megascale.train.engine import Engine

SIZES = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.sequence_length=16", "model.vocab_size=70"]
SETTINGS = SIZES + ["train.micro_batch=1", "train.global_batch=1", "train.precision=float32"]
EXPERTS = ["model.mlp=experts", "model.mlp_bias=false", "model.activation=swiglu", "model.norm=rmsnorm"]
EXPERTS += ["model.experts.number=4", "model.experts.top_k=2"]


def make_engine(settings: list[str], draws_weights: bool) -> Engine:
    layout = lay_out(config.load(None, SETTINGS + settings), 1)
    return Engine(layout, None, torch.device("cpu"), draws_weights=draws_weights)


def list_shards(engine: Engine) -> list[checkpoint.TensorShard]:
    return [checkpoint.TensorShard(*fields) for fields in engine.logical_tensors()]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["parallel.zero=0"],
        ["parallel.zero=3"],
        ["model.tied_embeddings=false", "model.vocab_multiple=64"],
        ["train.precision=bfloat16"],
        EXPERTS,
    ],
)
def test_a_loaded_engine_has_the_bits_of_the_engine_that_was_saved(settings: list[str], tmp_path: Path) -> None:
    saved = make_engine(settings, draws_weights=True)
    checkpoint.save(tmp_path, 3, list_shards(saved), {}, keep=1)
    blank = make_engine(settings, draws_weights=False)
    assert not any(buffer.params.any() or buffer.shard_params.any() for buffer in blank.buffers)
    with blank.loading_weights():
        checkpoint.load(tmp_path, list_shards(blank))
    for expected, buffer in zip(saved.buffers, blank.buffers, strict=True):
        assert torch.equal(expected.params, buffer.params)
        assert torch.equal(expected.shard_params, buffer.shard_params)
    for expected_state, state in zip(saved.optimizer.states, blank.optimizer.states, strict=True):
        assert torch.equal(expected_state.master, state.master)
