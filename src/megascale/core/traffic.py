"""Bytes that one rank sends in a step, by axis and purpose.

With ring algorithms, a gather or scatter of n bytes over r ranks sends (r-1)/r n from each rank, an all-reduce twice
that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from megascale.config import ModelConfig, ParallelConfig
from megascale.config.axes import AXES
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core.adapters import AdapterSpec, count_adapter_elements
from megascale.core.expert_ranks import gathers_expert_tokens, reached_share
from megascale.core.grid import Grid
from megascale.core.head_exchange import share_heads
from megascale.core.inventory import BLOCK_PARTS, output_matrix, resolve_layers
from megascale.core.layer_spec import ExpertsSpec, LayerSpec
from megascale.core.layers import LayerSums, assign_stage_layers
from megascale.core.memory import (
    DTYPE_BYTES,
    UnitElements,
    count_stage_matrix_elements,
    count_stage_parameters,
    count_stage_units,
    gathers_float8,
)
from megascale.core.schedule import INPUT_BACKWARDS, SENDS, ActionKind, Schedule, kind_mask
from megascale.core.unit_slots import assign_chunk_slots, has_chunk_slots, list_chunk_gathers, list_chunk_uses
from megascale.errors import FitError


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes sent by one rank in a step.

    Attributes:
        tensor: gathers and scatters of activations and their gradients.
        pipeline: activations and gradients to neighbouring stages.
        data_gather: parameters (from ZeRO-1 on); matrices in float8 if they are gathered so.
        data_reduce: float32 gradients.
        embedding: gradients of a tied embedding held by the first and the last stage.
        expert: tokens of experts over data, their results and gradients; and gradients of all other parameters, which
            the same ranks sum.
        context: queries, keys, values and results of attention and their gradients.
        replicate: gradients of the rank's shard, summed over copies of the state.
    """

    tensor: float = 0.0
    pipeline: float = 0.0
    data_gather: float = 0.0
    data_reduce: float = 0.0
    embedding: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    replicate: float = 0.0


# parallel.recompute -> forwards of a layer, of which one half may be recomputed; 1 for other values.
_FORWARD_PASSES = {"full": 2, "mlp": 1.5, "attention": 1.5}


def gathered_bytes(
    model: ModelConfig, parallel: ParallelConfig, stage: int, precision: str, linear_precision: str, data: int
) -> int:
    """Return the bytes of a stage's parameters on one tensor-parallel rank, gathered over `data` ranks."""
    count = count_stage_parameters(model, parallel, stage)
    itemsize = DTYPE_BYTES[precision]
    if not gathers_float8(parallel, linear_precision, data):
        return itemsize * count
    matrices = count_stage_matrix_elements(model, parallel, stage)
    matrix_itemsize = LINEAR_PRECISIONS[linear_precision].gathered_weight_bytes or itemsize
    return itemsize * (count - matrices) + matrix_itemsize * matrices


def check_priced_axes(grid: Grid, known: Collection[str] = ("tensor",)) -> None:
    """Raise FitError if the grid has an axis whose traffic planner and simulator do not know.

    Args:
        known: axes of a replica whose traffic the caller knows.
    """
    for axis in AXES.replica + AXES.copies:
        size = grid.size(axis)
        if axis == "slice" and axis not in known and size > 1:
            raise FitError(
                "parallel.experts_over=context has no price in the simulator; use megascale plan, or "
                "--parallel.experts_over=tensor"
            )
        if axis not in known and size > 1:
            if axis == "replicate":
                raise FitError(
                    f"parallel.replicate={size} has no price: `megascale simulate` knows no sums over copies of the "
                    f"state; `megascale plan` prints their memory and bytes, or set --parallel.replicate=1"
                )
            raise FitError(
                f"{AXES.setting(axis)}={size} has no price: planner and simulator know tensor, context, data and "
                "pipeline parallelism; leave the axis out"
            )


def layer_collectives(layer: LayerSpec) -> tuple[int, int]:
    """Return the (all-gathers, reduce-scatters) of one layer's forward under tensor parallelism.

    Serial block: two of each. Parallel block with a shared norm: one of each; with two norms the inputs differ, so two
    gathers. Backward swaps them and gathers the inputs again for the weight gradients.
    """
    block = BLOCK_PARTS[layer.norms.block]
    gathers, scatters = block.collectives(layer)
    part = layer.feed_forward
    if isinstance(part, ExpertsSpec):
        # Experts scatter by themselves, and a shared MLP gathers and scatters once more.
        has_shared = part.shared is not None
        gathers += has_shared
        scatters += has_shared + block.is_parallel
    return gathers, scatters


@lru_cache(maxsize=64)
def _sum_collectives(model: ModelConfig, forward_passes: float) -> LayerSums:
    """Return the sums of collectives of forward and backward; half a layer has half of them.

    Backward mirrors the forward and gathers inputs again; recomputation runs the forward, or half of it, twice.
    """
    parts = []
    for layer in resolve_layers(model):
        gathers, scatters = layer_collectives(layer)
        count = (gathers + scatters) * (1 + forward_passes) + gathers
        parts.append((count, count / 2, count / 2))
    return LayerSums.collect(parts)


@lru_cache(maxsize=64)
def _sum_dispatched_values(
    model: ModelConfig, tensor: int, expert: int, forward_passes: int, exchange: str
) -> LayerSums:
    """Return the sums of values per token that a rank sends to other ranks of the expert axis, with an even load.

    Forward sends tokens and returns sums; backward sends gradients and tokens, and returns gradients.

    Args:
        exchange: overlap.expert.
    """
    parts = []
    for layer in resolve_layers(model):
        part = layer.feed_forward
        sent = 0.0
        if isinstance(part, ExpertsSpec):
            share = 1.0
            if not gathers_expert_tokens(part.settings, tensor, expert, exchange):
                share = reached_share(part.settings, tensor, expert)
            sent = (2 * forward_passes + 3) * (expert - 1) * share * layer.hidden
        parts.append((sent, 0, sent))
    return LayerSums.collect(parts)


@lru_cache(maxsize=64)
def _sum_exchanged_values(model: ModelConfig, tensor: int, context: int, recomputes: bool) -> LayerSums:
    """Return the sums of values per token of a rank that attention sends to other context ranks.

    An all-to-all carries queries, keys and values there, and another one the results back; backward mirrors both.
    Gathered keys go to all ranks, and backward scatters their gradients.
    """
    passes = 3 if recomputes else 2
    parts = []
    for layer in resolve_layers(model):
        mixer = layer.mixer
        queries, keys = (count * mixer.head_size // tensor for count in (mixer.heads, 2 * mixer.kv_heads))
        share = share_heads(mixer.heads // tensor, mixer.kv_heads // tensor, context)
        if share.gathers_keys:
            sent = keys * (context - 1)
        else:
            sent = (2 * queries + share.copies * keys) * (context - 1) / context
        parts.append((passes * sent, passes * sent, 0))
    return LayerSums.collect(parts)


def estimate_stage_traffic(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    schedule: Schedule,
    stage: int,
    micro_batch: int,
    precision: str,
    linear_precision: str = "default",
    adapters: AdapterSpec | None = None,
    expert_exchange: str = "collectives",
) -> TrafficEstimate:
    """Estimate the bytes that a rank of pipeline stage `stage` sends in a step.

    Adapters' small messages within layers are left out.

    Args:
        expert_exchange: overlap.expert. The other arguments are those of `memory.estimate_stage_memory`.
    """
    t = grid.tensor
    itemsize = DTYPE_BYTES[precision]
    master_itemsize = max(4, itemsize)
    tokens = model.sequence_length // grid.context * micro_batch
    hidden_bytes = tokens * model.hidden * itemsize
    layers = assign_stage_layers(model, parallel, stage)
    sums = _sum_collectives(model, forward_passes=_FORWARD_PASSES.get(parallel.recompute, 1))
    collectives = round(sum(sums.of_chunk(chunk) for chunk in layers))
    exchanged = 0.0
    if grid.context > 1:
        sent_values = _sum_exchanged_values(model, t, grid.context, parallel.recompute in ("full", "attention"))
        exchanged = sum(sent_values.of_chunk(chunk) for chunk in layers) * tokens * itemsize
    # Embedding: scatter forward, gather backward. Logits: gather forward, scatter backward.
    chunk_map = schedule.chunk_map
    is_first = stage == chunk_map.first_stage
    is_last = stage == chunk_map.last_stage
    collectives += 2 * is_first + 2 * is_last
    kinds = schedule.tables[stage][:, 0]
    sends = int(kind_mask(kinds, *SENDS).sum())
    gather_bytes = 0
    parameters = count_stage_parameters(model, parallel, stage)
    units = count_stage_units(model, parallel, stage)
    sharded = units.sharded
    if adapters is not None:
        parameters = sharded = sum(count_adapter_elements(model, adapters, chunk, t) for chunk in layers)
        gather_bytes = itemsize * parameters if parallel.zero else 0
    elif parallel.zero == 3:
        resident = parameters - units.sharded
        blocks, others = _count_unit_gathers(units, schedule, stage)
        block_itemsize = itemsize
        if gathers_float8(parallel, linear_precision, grid.shards):
            block_itemsize = LINEAR_PRECISIONS[linear_precision].gathered_weight_bytes or itemsize
        gather_bytes = block_itemsize * blocks + itemsize * (resident + others)
    elif parallel.zero:
        gather_bytes = gathered_bytes(model, parallel, stage, precision, linear_precision, grid.shards)
    if parallel.reduce_dtype == "bfloat16":
        gradient_itemsize = DTYPE_BYTES["bfloat16"]
    else:
        gradient_itemsize = master_itemsize
    embedding_bytes = 0
    if adapters is None and model.tied_embeddings and len(chunk_map.end_stages) > 1 and (is_first or is_last):
        embedding_bytes = master_itemsize * prod(output_matrix(model).local_shape(t))
    x = grid.expert
    dispatched = 0.0
    if x > 1:
        passes = 2 if parallel.recompute == "full" else 1
        values = sum(_sum_dispatched_values(model, t, x, passes, expert_exchange).of_chunk(chunk) for chunk in layers)
        dispatched = schedule.microbatches * values * tokens * itemsize
        # An all-reduce of the gradients of all parameters but experts.
        dispatched += 2 * (x - 1) / x * master_itemsize * (parameters - units.sharded)
    copies = grid.size("replicate")
    ring_share = (grid.shards - 1) / grid.shards
    if parallel.zero == 0:
        reduced = 2 * parameters  # an all-reduce counts twice
    elif parallel.zero == 1:
        reduced = parameters
    else:  # resident parameters are reduced once
        reduced = parameters + (schedule.microbatches - 1) * sharded
    return TrafficEstimate(
        tensor=schedule.microbatches * collectives * hidden_bytes * (t - 1) / t,
        pipeline=sends * hidden_bytes / t,
        data_gather=ring_share * gather_bytes,
        data_reduce=ring_share * gradient_itemsize * reduced,
        embedding=float(embedding_bytes),
        expert=dispatched,
        context=schedule.microbatches * exchanged,
        replicate=2 * (copies - 1) / copies * gradient_itemsize * parameters / grid.shards,
    )


def _count_unit_gathers(units: UnitElements, schedule: Schedule, stage: int) -> tuple[int, int]:
    """Return the elements of matrices that ZeRO-3 gathers in a step: of blocks, and of embedding and head.

    If blocks are units, each forward and each backward gathers a chunk's blocks, except two that are still in their
    slots where a backward follows a forward of the same chunk, or the other way round. Embedding and head share a slot.
    A stage that has one of them gathers it once.
    """
    if has_chunk_slots(len(units.by_chunk)):
        gathers = list_chunk_gathers(list_chunk_uses(schedule, stage), assign_chunk_slots(schedule, stage))
        blocks = sum(units.blocks_by_chunk[chunk] for chunk in gathers)
        return blocks, sum(units.by_chunk[chunk] for chunk in gathers) - blocks
    kinds, chunks, _ = schedule.tables[stage].T
    is_forward = kinds == ActionKind.FORWARD
    is_use = is_forward | kind_mask(kinds, *INPUT_BACKWARDS)
    directions, used = is_forward[is_use], chunks[is_use]
    kept = int(((directions[1:] != directions[:-1]) & (used[1:] == used[:-1])).sum())
    total = int(np.array(units.blocks_by_chunk)[used].sum()) - kept * min(2 * units.block, max(units.blocks_by_chunk))
    outer = units.sharded - sum(units.blocks_by_chunk)
    return total, outer * (schedule.microbatches if outer > units.outer else 1)
