"""Bytes that one rank sends in a step, by axis and purpose. Ring algorithms: a gather or scatter of n bytes over r
ranks sends (r-1)/r n from each rank, an all-reduce twice that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megascale.config import ModelConfig, ParallelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core.grid import Grid
from megascale.core.inventory import BLOCK_PARTS, output_matrix
from megascale.core.layers import chunk_layers
from megascale.core.memory import BYTES, stage_matrices, stage_parameters
from megascale.core.schedule import ActionKind, Schedule


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes sent by one rank in a step.

    Attributes:
        tensor: gathers and scatters of activations and their gradients.
        pipeline: activations and gradients to neighbouring stages.
        data_gather: parameters (ZeRO-1 and 2), matrices in float8 where they travel so.
        data_reduce: float32 gradients.
        embedding: gradients of a tied embedding held by the first and the last stage.
    """

    tensor: float = 0.0
    pipeline: float = 0.0
    data_gather: float = 0.0
    data_reduce: float = 0.0
    embedding: float = 0.0


def gathers_float8(parallel: ParallelConfig, linear_precision: str, data: int) -> bool:
    """Whether `data` data-parallel ranks gather matrices as float8: parallel.gather_precision with auto resolved."""
    can = LINEAR_PRECISIONS[linear_precision].gathered is not None and parallel.zero > 0 and data > 1
    return can and parallel.gather_precision != "default"


def gathered_bytes(
    model: ModelConfig, parallel: ParallelConfig, stage: int, precision: str, linear_precision: str, data: int
) -> int:
    """Bytes of a stage's parameters, on one tensor-parallel rank, as `data` data-parallel ranks gather them."""
    count, width = stage_parameters(model, parallel, stage), BYTES[precision]
    if not gathers_float8(parallel, linear_precision, data):
        return width * count
    matrices = stage_matrices(model, parallel, stage)
    return width * (count - matrices) + (LINEAR_PRECISIONS[linear_precision].gathered or width) * matrices


def layer_collectives(model: ModelConfig) -> tuple[int, int]:
    """(all-gathers, reduce-scatters) of one layer's forward under tensor parallelism.

    Serial: two of each. Parallel block with a shared norm: one of each; with two norms the inputs differ, so two
    gathers. Backward swaps them and gathers the inputs again for the weight gradients.
    """
    return BLOCK_PARTS[model.block].collectives(model)


def stage_traffic(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    schedule: Schedule,
    stage: int,
    micro_batch: int,
    precision: str,
    linear_precision: str = "default",
) -> TrafficEstimate:
    """What a rank of pipeline stage `stage` sends in a step; arguments as in memory.stage_memory."""
    t, d, a = grid.tensor, grid.data, BYTES[precision]
    master = max(4, a)
    whole = model.sequence_length * micro_batch * model.hidden * a
    layers = chunk_layers(model, parallel)[stage :: grid.pipeline]
    gathers, scatters = layer_collectives(model)
    # Forward, its mirror in backward, inputs gathered again; full recompute runs the forward twice.
    passes = 2 if parallel.recompute == "full" else 1
    moves = round(sum(own.layer_count for own in layers) * ((gathers + scatters) * (1 + passes) + gathers))
    # Embedding: scatter forward, gather backward. Logits: gather forward, scatter backward.
    moves += 2 * (stage == 0) + 2 * (stage == grid.pipeline - 1)
    kinds = schedule.table[stage][:, 0]
    sends = int(((kinds == ActionKind.SEND_FORWARD) | (kinds == ActionKind.SEND_BACKWARD)).sum())
    count = stage_parameters(model, parallel, stage)
    share = (d - 1) / d
    reduce_bytes = BYTES["bfloat16"] if parallel.reduce_dtype == "bfloat16" else master
    reductions = schedule.microbatches if parallel.zero == 2 else 1
    tied = model.tied_embeddings and grid.pipeline > 1 and stage in (0, grid.pipeline - 1)
    return TrafficEstimate(
        tensor=schedule.microbatches * moves * whole * (t - 1) / t,
        pipeline=sends * whole / t,
        data_gather=share * gathered_bytes(model, parallel, stage, precision, linear_precision, d)
        if parallel.zero
        else 0.0,
        data_reduce=share * reduce_bytes * count * (2 if parallel.zero == 0 else reductions),
        embedding=float(master * prod(output_matrix(model).local_shape(t))) if tied else 0.0,
    )
