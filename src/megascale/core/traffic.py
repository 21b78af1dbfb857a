"""Bytes that one rank sends in a step, by axis and purpose.

Collectives use ring algorithms. In a gather or scatter of n bytes over r ranks, each rank sends (r-1)/r n bytes. An
all-reduce sends twice as much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
from megascale.core.inventory import output_matrix, resolve_layers
from megascale.core.layer_spec import ExpertsSpec, LayerSpec
from megascale.core.layers import ChunkLayers, LayerSums, assign_stage_layers
from megascale.core.memory import count_logits_groups, gathers_float8
from megascale.core.parameter_counts import (
    UnitElements,
    count_stage_matrix_elements,
    count_stage_parameters,
    count_stage_units,
)
from megascale.core.part_inventories import BLOCK_PARTS
from megascale.core.schedule import INPUT_BACKWARDS, SENDS, ActionKind, Schedule, make_kind_mask
from megascale.core.tensors import DTYPE_BYTES
from megascale.core.unit_slots import (
    TABLE_PARTS,
    assign_chunk_slots,
    has_chunk_slots,
    list_chunk_gathers,
    list_chunk_uses,
    select_persistent_blocks,
)
from megascale.errors import FitError


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes sent by one rank in a step.

    Attributes:
        tensor: gathers and scatters of activations and their gradients.
        pipeline: activations and gradients to neighbouring stages.
        data_gather: parameters (from ZeRO-1 on); matrices count as float8 if parallel.gather_precision says so.
        data_reduce: gradients, in parallel.reduce_dtype.
        embedding: gradients of a tied embedding that the first and the last stage hold.
        expert: tokens sent to experts, their results and gradients; and gradients of all other parameters, which are
            summed over the same ranks.
        context: queries, keys, values and results of attention, and their gradients.
        replicate: gradients of the rank's shard, summed over the copies of the state.
    """

    tensor: float = 0.0
    pipeline: float = 0.0
    data_gather: float = 0.0
    data_reduce: float = 0.0
    embedding: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    replicate: float = 0.0


# By value of parallel.recompute: how often a layer's forward runs per micro-batch, 1 for other values. If one half of
# the layer is recomputed, the second forward counts 0.5.
_FORWARD_PASSES = {"full": 2, "mlp": 1.5, "attention": 1.5}


def gathered_bytes(
    model: ModelConfig, parallel: ParallelConfig, stage: int, precision: str, linear_precision: str, data: int
) -> int:
    """Return the bytes of a stage's parameters on a tensor-parallel rank, as `data` data-parallel ranks gather them."""
    parameters = count_stage_parameters(model, parallel, stage)
    matrices = count_stage_matrix_elements(model, parallel, stage)
    itemsize = DTYPE_BYTES[precision]
    matrix_itemsize = _gathered_matrix_itemsize(model, parallel, linear_precision, data, itemsize)
    return itemsize * (parameters - matrices) + matrix_itemsize * matrices


def check_priced_axes(grid: Grid, priced_axes: Collection[str] = ("tensor",)) -> None:
    """Raise FitError if the grid has an axis whose traffic the caller cannot estimate.

    Args:
        priced_axes: axes whose traffic the caller can estimate, besides data and pipeline.
    """
    for axis in AXES.replica + AXES.copies:
        size = grid.size(axis)
        if axis == "slice" and axis not in priced_axes and size > 1:
            raise FitError(
                "parallel.experts_over=context has no price in the simulator; use megascale plan, or "
                "--parallel.experts_over=tensor"
            )
        if axis not in priced_axes and size > 1:
            if axis == "replicate":
                raise FitError(
                    f"parallel.replicate={size} has no price: `megascale simulate` does not estimate the sums over "
                    "copies of the state; use `megascale plan` for memory and bytes, or set --parallel.replicate=1"
                )
            raise FitError(
                f"{AXES.setting(axis)}={size} has no price: planner and simulator estimate tensor, context, data and "
                "pipeline parallelism only; leave the axis out"
            )


def layer_collectives(layer: LayerSpec) -> tuple[int, int]:
    """Return the (all-gathers, reduce-scatters) of one layer's forward under tensor parallelism.

    Serial block: two of each. Parallel block with a shared norm: one of each; with two norms the inputs differ, so two
    gathers. Backward swaps them and gathers the inputs again for the weight gradients.
    """
    block = BLOCK_PARTS[layer.norms.block]
    gathers, scatters = block.collectives(layer)
    if isinstance(layer.feed_forward, ExpertsSpec):
        if block.is_parallel:
            scatters += 1  # attention and experts scatter separately
        if layer.feed_forward.shared is not None:
            gathers += 1
            scatters += 1
    return gathers, scatters


@lru_cache(maxsize=64)
def _sum_collectives(model: ModelConfig, forward_passes: float) -> LayerSums:
    """Return the sums over layers of collectives of forward and backward; half a layer has half of them.

    Backward has as many collectives as one forward pass, and gathers the inputs again.
    """
    counts = []  # of each layer, its attention and its MLP
    for layer in resolve_layers(model):
        gathers, scatters = layer_collectives(layer)
        count = (gathers + scatters) * (forward_passes + 1) + gathers
        counts.append((count, count / 2, count / 2))
    return LayerSums.collect(counts)


@lru_cache(maxsize=64)
def _sum_dispatched_values(
    model: ModelConfig, tensor: int, expert: int, forward_passes: int, exchange: str, token_share: float = 1.0
) -> LayerSums:
    """Return the sums over layers of values per token that a rank sends along the expert axis, with an even load.

    A forward pass has two messages: the tokens, and back their results. Backward has three: the gradients of the
    results and the tokens, and back the gradients of the tokens.

    Args:
        exchange: value of overlap.expert.
        token_share: bytes per number of the tokens in forward, divided by those of train.precision.
    """
    values_by_layer = []
    for layer in resolve_layers(model):
        experts = layer.feed_forward
        sent_values = 0.0
        if isinstance(experts, ExpertsSpec):
            # Share of the other ranks to which a token goes. A gather sends each token to all of them.
            destination_share = 1.0
            if not gathers_expert_tokens(experts.settings, tensor, expert, exchange):
                destination_share = reached_share(experts.settings, tensor, expert)
            message_count = (1 + token_share) * forward_passes + 3
            sent_values = message_count * (expert - 1) * destination_share * layer.hidden
        values_by_layer.append((sent_values, 0, sent_values))
    return LayerSums.collect(values_by_layer)


@lru_cache(maxsize=64)
def _sum_exchanged_values(model: ModelConfig, tensor: int, context: int, recomputes: bool) -> LayerSums:
    """Return the sums over layers of values per token of a rank that attention sends to other context ranks.

    One all-to-all sends queries, keys and values, and another one returns the results; backward mirrors both. If keys
    are gathered instead, keys and values go to all ranks, and backward scatters their gradients.

    Args:
        recomputes: whether backward repeats the forward of attention.
    """
    passes = 3 if recomputes else 2  # forward, backward, and a recomputed forward
    values_by_layer = []
    for layer in resolve_layers(model):
        mixer = layer.mixer
        query_width = mixer.heads * mixer.head_size // tensor
        key_value_width = 2 * mixer.kv_heads * mixer.head_size // tensor
        share = share_heads(mixer.heads // tensor, mixer.kv_heads // tensor, context)
        if share.gathers_keys:
            sent_values = key_value_width * (context - 1)
        else:
            exchanged_width = 2 * query_width + share.copies * key_value_width
            sent_values = exchanged_width * (context - 1) / context
        values_by_layer.append((passes * sent_values, passes * sent_values, 0))
    return LayerSums.collect(values_by_layer)


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

    The small messages of adapters within layers are not counted.

    Args:
        expert_exchange: value of overlap.expert. The other arguments are those of `memory.estimate_stage_memory`.
    """
    t = grid.tensor
    itemsize = DTYPE_BYTES[precision]
    master_itemsize = max(4, itemsize)
    gradient_itemsize = master_itemsize
    if parallel.reduce_dtype == "bfloat16":
        gradient_itemsize = DTYPE_BYTES["bfloat16"]
    tokens = model.sequence_length // grid.context * micro_batch
    hidden_bytes = tokens * model.hidden * itemsize
    layers = assign_stage_layers(model, parallel, stage)  # of each chunk of the stage
    is_first = stage == schedule.chunk_map.first_stage
    is_last = stage == schedule.chunk_map.last_stage
    collective_count = _count_stage_collectives(model, parallel, layers, is_first=is_first, is_last=is_last)
    exchanged_bytes = _count_exchanged_values(model, parallel, grid, layers) * tokens * itemsize  # per micro-batch
    send_count = int(make_kind_mask(schedule.tables[stage][:, 0], *SENDS).sum())
    units = count_stage_units(model, parallel, stage)
    trained = count_stage_parameters(model, parallel, stage)
    sharded = units.sharded  # trained parameters whose gradients ZeRO-2 and 3 reduce after each micro-batch
    if adapters is None:
        gather_bytes = _count_gather_bytes(
            model, parallel, grid, schedule, stage=stage, precision=precision, linear_precision=linear_precision
        )
    else:
        trained = sum(count_adapter_elements(model, adapters, chunk, t) for chunk in layers)
        sharded = trained
        gather_bytes = itemsize * trained if parallel.zero else 0
    embedding_bytes = 0
    has_tied_stages = model.tied_embeddings and len(schedule.chunk_map.end_stages) > 1
    if adapters is None and has_tied_stages and (is_first or is_last):
        embedding_bytes = master_itemsize * prod(output_matrix(model).local_shape(t))
    expert_bytes = 0.0
    if grid.expert > 1:
        values = _count_dispatched_values(
            model,
            parallel,
            grid,
            layers,
            itemsize=itemsize,
            exchange=expert_exchange,
            linear_precision=linear_precision,
        )
        dispatched_bytes = values * tokens * itemsize
        # An all-reduce of the gradients of all parameters except experts.
        expert_ring_share = (grid.expert - 1) / grid.expert
        summed_bytes = 2 * expert_ring_share * master_itemsize * (trained - units.sharded)
        expert_bytes = schedule.microbatches * dispatched_bytes + summed_bytes
    copies = grid.size("replicate")
    ring_share = (grid.shards - 1) / grid.shards
    reduced_elements = _count_reduced_elements(parallel.zero, schedule.microbatches, trained, sharded=sharded)
    if is_last and adapters is None and grid.shards > 1:
        repeated = _count_repeated_elements(model, parallel, units, tokens, itemsize)
        reduced_elements += schedule.microbatches * repeated
    return TrafficEstimate(
        tensor=schedule.microbatches * collective_count * hidden_bytes * (t - 1) / t,
        pipeline=send_count * hidden_bytes / t,
        data_gather=ring_share * gather_bytes,
        data_reduce=ring_share * gradient_itemsize * reduced_elements,
        embedding=float(embedding_bytes),
        expert=expert_bytes,
        context=schedule.microbatches * exchanged_bytes,
        replicate=2 * (copies - 1) / copies * gradient_itemsize * trained / grid.shards,
    )


def _count_stage_collectives(
    model: ModelConfig, parallel: ParallelConfig, layers: Sequence[ChunkLayers], *, is_first: bool, is_last: bool
) -> int:
    """Return the number of a stage's tensor-parallel gathers and scatters per micro-batch."""
    sums = _sum_collectives(model, forward_passes=_FORWARD_PASSES.get(parallel.recompute, 1))
    count = round(sum(sums.of_chunk(chunk) for chunk in layers))
    if is_first:
        count += 2  # embedding: scatter in forward, gather in backward
    if is_last:
        count += 2  # logits: gather in forward, scatter in backward
    return count


def _count_exchanged_values(
    model: ModelConfig, parallel: ParallelConfig, grid: Grid, layers: Sequence[ChunkLayers]
) -> float:
    """Return the values per token that attention sends between context ranks."""
    if grid.context == 1:
        return 0.0
    recomputes = parallel.recompute in ("full", "attention")
    sums = _sum_exchanged_values(model, grid.tensor, context=grid.context, recomputes=recomputes)
    return sum(sums.of_chunk(chunk) for chunk in layers)


def _count_dispatched_values(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    layers: Sequence[ChunkLayers],
    *,
    itemsize: int,
    exchange: str,
    linear_precision: str,
) -> float:
    """Return the values per token that are sent to experts and back, of `itemsize` bytes each."""
    token_share = 1.0
    if LINEAR_PRECISIONS[linear_precision].float8_gemms != "none":
        token_share = 1 / itemsize
    sums = _sum_dispatched_values(
        model,
        grid.tensor,
        expert=grid.expert,
        forward_passes=2 if parallel.recompute == "full" else 1,
        exchange=exchange,
        token_share=token_share,
    )
    return sum(sums.of_chunk(chunk) for chunk in layers)


def _count_gather_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    schedule: Schedule,
    *,
    stage: int,
    precision: str,
    linear_precision: str,
) -> float:
    """Return the bytes of parameters that a rank of a stage gathers in a step."""
    if not parallel.zero:
        return 0
    if parallel.zero < 3:
        return gathered_bytes(model, parallel, stage, precision, linear_precision, grid.shards)
    itemsize = DTYPE_BYTES[precision]
    units = count_stage_units(model, parallel, stage)
    return _zero3_gather_bytes(
        parallel,
        schedule,
        stage=stage,
        units=units,
        resident=count_stage_parameters(model, parallel, stage) - units.sharded,
        itemsize=itemsize,
        matrix_itemsize=_gathered_matrix_itemsize(model, parallel, linear_precision, grid.shards, itemsize),
    )


def compute_gather_share(model: ModelConfig, parallel: ParallelConfig, schedule: Schedule, stage: int) -> float:
    """Return the gathers of a stage's blocks under ZeRO-3, relative to two gathers of each block per micro-batch.

    Layers that stay gathered (parallel.zero3_keep_layers) and complete chunks, which stay gathered for a round of
    micro-batches, save gathers.
    """
    units = count_stage_units(model, parallel, stage)
    if has_chunk_slots(len(units.by_chunk)):
        all_elements = 2 * schedule.microbatches * sum(units.blocks_by_chunk)
    else:
        # Blocks that are still in their slots where passes turn save gathers too, which are not exposed anyway.
        all_elements, _ = _count_unit_gathers(units, schedule, stage, persistent_blocks=0)
    block_elements, _ = _count_unit_gathers(units, schedule, stage, persistent_blocks=parallel.zero3_keep_layers)
    return block_elements / max(1, all_elements)


def _count_reduced_elements(zero: int, microbatches: int, trained: int, sharded: int) -> int:
    """Return the gradient elements that enter reduce-scatters in a step. An all-reduce (ZeRO-0) counts twice.

    Args:
        trained: number of trained parameters.
        sharded: number of those whose gradients ZeRO-2 and 3 reduce after each micro-batch. Gradients of all others are
            reduced once per step.
    """
    if zero == 0:
        return 2 * trained
    if zero == 1:
        return trained
    return trained + (microbatches - 1) * sharded


def _count_repeated_elements(
    model: ModelConfig, parallel: ParallelConfig, units: UnitElements, tokens: int, itemsize: int
) -> int:
    """Return the gradient elements that ZeRO-2 reduces again in a micro-batch, because a divided head has several sums.

    Each group of tokens of the loss has a sum of its own (parallel/gradient_slots.py).

    Args:
        tokens: tokens of a micro-batch on a rank.
        itemsize: bytes of a logit.
    """
    if parallel.zero != 2 or model.tied_embeddings:
        return 0
    table_part = units.find_table_part(parallel.bucket_elements)
    rows, columns = output_matrix(model).local_shape(parallel.tensor)
    if table_part is None or rows * columns <= TABLE_PARTS * table_part:
        return 0
    return rows * columns * (count_logits_groups(tokens, rows, itemsize) - 1)


def _gathered_matrix_itemsize(
    model: ModelConfig, parallel: ParallelConfig, linear_precision: str, data: int, itemsize: int
) -> int:
    """Return the bytes per element of a linear layer's matrix that `data` data-parallel ranks gather.

    Args:
        itemsize: bytes per element of other parameters.
    """
    if not gathers_float8(model, parallel, linear_precision, data):
        return itemsize
    return LINEAR_PRECISIONS[linear_precision].gathered_weight_bytes or itemsize


def _zero3_gather_bytes(
    parallel: ParallelConfig,
    schedule: Schedule,
    stage: int,
    units: UnitElements,
    resident: int,
    itemsize: int,
    matrix_itemsize: int,
) -> int:
    """Return the bytes that the ranks of a stage gather in a step under ZeRO-3.

    Args:
        resident: number of resident parameters, which are gathered once per step.
        itemsize: bytes per element of resident parameters, embedding and head.
        matrix_itemsize: bytes per element of blocks.
    """
    block_elements, outer_elements = _count_unit_gathers(
        units, schedule, stage, persistent_blocks=parallel.zero3_keep_layers
    )
    return matrix_itemsize * block_elements + itemsize * (resident + outer_elements)


def _count_unit_gathers(units: UnitElements, schedule: Schedule, stage: int, persistent_blocks: int) -> tuple[int, int]:
    """Return the elements of matrices that ZeRO-3 gathers in a step: (of blocks, of embedding and head).

    If whole chunks have slots, each change of the chunk in a slot gathers all its units. Otherwise each forward and
    each backward gathers a chunk's blocks. Two blocks are then still in their slots where a backward follows a forward
    of the same chunk, or a forward follows a backward. If a chunk has at most two blocks that share slots, they are
    still there whenever the chunk is used again at once. Embedding and head share a slot: a stage that has one of them
    gathers it once per step, a stage that has both gathers them for each micro-batch.

    Args:
        persistent_blocks: parallel.zero3_keep_layers: so many blocks of the stage are gathered once per step.
    """
    if has_chunk_slots(len(units.by_chunk)):
        gathers = list_chunk_gathers(list_chunk_uses(schedule, stage), assign_chunk_slots(schedule, stage))
        block_elements = sum(units.blocks_by_chunk[chunk] for chunk in gathers)
        all_elements = sum(units.by_chunk[chunk] for chunk in gathers)
        return block_elements, all_elements - block_elements
    kinds, chunks, _ = schedule.tables[stage].T
    is_forward = kinds == ActionKind.FORWARD
    is_use = is_forward | make_kind_mask(kinds, *INPUT_BACKWARDS)
    used_chunks = chunks[is_use]
    is_forward_use = is_forward[is_use]
    is_same_chunk = used_chunks[1:] == used_chunks[:-1]
    is_turn = is_forward_use[1:] != is_forward_use[:-1]
    shared_elements = []  # by chunk: elements of the blocks that share slots
    fits_slots = []  # by chunk: whether these blocks are all in the two slots at the same time
    persistent = select_persistent_blocks(units.block_counts, persistent_blocks)
    for elements, is_persistent in zip(units.blocks_by_chunk, persistent, strict=True):
        shared_count = is_persistent.count(False)
        shared_elements.append(elements * shared_count // max(1, len(is_persistent)))
        fits_slots.append(shared_count <= 2)
    elements_by_use = np.array(shared_elements)[used_chunks]
    is_reused = is_same_chunk & (is_turn | np.array(fits_slots)[used_chunks[1:]])
    reused_elements = np.minimum(2 * units.block, elements_by_use[1:])[is_reused]
    block_elements = int(elements_by_use.sum() - reused_elements.sum())
    block_elements += sum(units.blocks_by_chunk) - sum(shared_elements)  # persistent blocks: once per step
    outer_elements = units.sharded - sum(units.blocks_by_chunk)
    has_both = outer_elements > units.outer
    if has_both:
        outer_elements *= schedule.microbatches
    return block_elements, outer_elements
