"""Results of a step that a replay of another replica's micro-batch must not change."""

from __future__ import annotations

import pytest
import torch

from megascale import config
from megascale.core.layout import lay_out
from megascale.errors import TrainingError
from megascale.train.engine import Engine
from megascale.train.replayed_batch import keep_results

SIZES = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.sequence_length=16", "model.vocab_size=70"]
SETTINGS = SIZES + ["train.micro_batch=1", "train.global_batch=1", "train.precision=float32"]


def test_gradients_are_restored_if_a_replay_raises_an_error() -> None:
    engine = Engine(lay_out(config.load(None, SETTINGS), 1), None, torch.device("cpu"))
    shards = [shard for buffer in engine.buffers for shard in buffer.shards]
    for shard in shards:
        shard.grads.fill_(2.0)

    def replay() -> None:
        for shard in shards:
            shard.grads.fill_(7.0)
        raise TrainingError("rank 1 has left")

    with pytest.raises(TrainingError, match="rank 1 has left"), keep_results(engine):
        replay()
    assert shards
    assert all(torch.all(shard.grads == 2.0) for shard in shards)
