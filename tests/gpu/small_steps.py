"""Some steps of a small model on the GPUs that are here, for scripts that compare bits: not a test by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from megascale import config as configuration
from megascale.core.batch import NO_FIELDS, Batch, SampleFields
from megascale.core.layout import lay_out
from megascale.ops.attention_documents import make_synthetic_boundaries
from megascale.rendezvous.groups import Groups
from megascale.train.attention_choice import Choices
from megascale.train.engine import Engine
from megascale.train.rank_info import RankInfo


@dataclass
class Steps:
    """Result of the steps.

    Attributes:
        bits: loss and gradient norm of each step, in turn, then the weights that a rank holds of each chunk.
        host: milliseconds until the host has launched a later step.
        whole: milliseconds until the device has done it.
        attention: the kernels that were chosen.
        eager: why nothing was replayed from CUDA graphs, "" if it was.
        determinism: what the engine says about kernels.deterministic.
    """

    bits: list[torch.Tensor]
    host: float
    whole: float
    attention: Choices
    eager: str
    determinism: str


def train(
    tree: dict[str, Any],
    steps: int,
    timed: int,
    attention: Choices,
    location: RankInfo,
    groups: Groups | None,
    fields: SampleFields = NO_FIELDS,
) -> Steps:
    """Train a configuration for some steps on tokens that depend on its shapes alone, then time some more.

    attention: kernels that another engine has chosen, since two might choose differently.
    """
    layout = lay_out(configuration.from_tree(tree), location.world)
    engine = Engine(layout, groups, location.device, attention, fields=fields)
    model = engine.config.model
    train = engine.config.train
    data = layout.grid.replicas
    count = train.global_batch // train.micro_batch // data
    shape = (steps, data, count, model.sequence_length + 1, train.micro_batch)
    rows = torch.randint(0, model.vocab, shape, generator=torch.Generator().manual_seed(0)).to(location.device)
    weights = torch.rand(rows[..., 1:, :].shape, generator=torch.Generator().manual_seed(1)).to(location.device)
    weight_sums = weights.double().sum((2, 3, 4)).tolist()
    positions = rows[..., 1:, :] % model.sequence_length
    if fields.max_documents:
        boundaries = make_synthetic_boundaries(model.sequence_length, train.micro_batch, fields.max_documents)
        boundaries = boundaries.to(location.device)
    bits: list[torch.Tensor] = []

    def step(number: int) -> None:
        which = number % steps, engine.data_rank

        def read_batch(i: int) -> Batch[torch.Tensor]:
            text = rows[which][i]
            batch = Batch(text[:-1], text[1:])
            if fields.loss_weights:
                batch = replace(batch, loss_weights=weights[which][i])
            if fields.positions:
                batch = replace(batch, positions=positions[which][i])
            if fields.max_documents:
                batch = replace(batch, document_boundaries=boundaries)
            return batch

        engine.start_gather()
        sum_weights = lambda: weight_sums[which[0]][which[1]]
        built = engine.step(read_batch, number + 1, 1e-3, has_next_step=True, sum_weights=sum_weights)
        bits.extend((built.loss.clone(), built.grad_norm.clone()))

    for number in range(steps):
        step(number)
    engine.synchronize()
    result = bits + [flat.params.clone() for flat in engine.buffers]
    result += [shard.params.clone() for flat in engine.buffers for shard in flat.shards]
    torch.cuda.synchronize()
    host, began = 0.0, time.perf_counter()
    for number in range(steps, steps + timed):
        start = time.perf_counter()
        step(number)
        host += time.perf_counter() - start
    engine.synchronize()
    torch.cuda.synchronize()
    full = time.perf_counter() - began
    engine.close()
    if engine.graphs is None:
        eager = engine.active.get("CUDA graphs", "off")
    elif engine.graphs.count_captures():
        eager = ""
    else:
        eager = engine.graphs.failure or "no micro-batch was captured"
    determinism = engine.active.get("deterministic", "off")
    return Steps(result, host / timed * 1e3, full / timed * 1e3, engine.attention_choices, eager, determinism)
