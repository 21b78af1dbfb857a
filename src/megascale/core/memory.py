"""Memory of a rank by kind (weights, gradients, ...), as a function of model, grid, schedule and precision. No torch.

Activations that one layer saves from forward to backward for one micro-batch (recompute none). Sequence s, micro-batch
b, width h, heads x head size q, key/value width k, MLP width f, tensor ranks t. Sequence parallelism is always on with
t > 1, so all activations between the tensor-parallel GEMMs are divided along the sequence. Activations are in the
training precision, statistics in float32.

| tensor | shape here | why |
|---|---|---|
| input | s/t, b, h | backward of the (first) norm |
| norm statistics | s/t, b (twice for LayerNorm) | the same |
| norm output | s/t, b, h | weight gradient of [QKV] or [QKV, MLP in]; gathered again in backward |
| query, key, value | s, b, (q + 2k)/t | attention |
| rotated query, key | s, b, (q + k)/t | rotary positions or norms of query and key only; the GEMM result above stays |
| query, key norm statistics | s, b, heads/t | norms of query and key only (twice for LayerNorm; over projections: 2) |
| attention output | s, b, q/t | attention; weight gradient of the output GEMM |
| attention logsumexp | b, heads/t, s | attention (flash: no s x s matrix) |
| post norm input, statistics | s/t, b, h and s/t, b | only with norms on the outputs of attention and MLP, for each |
| middle | s/t, b, h | serial block: residual stream between attention and MLP, for the second norm |
| second norm statistics, output | as above | serial block, or parallel block with two norms |
| MLP in | s, b, f/t (twice if gated) | backward of the activation |
| MLP activation | s, b, f/t | weight gradient of the MLP's output GEMM |
| router scores, expert plan | s/t, b, experts and 6 top_k | experts instead of an MLP: the experts of each token |
| gathered choices | s, b, 3 top_k | experts only: row and weight of each choice of all ranks' tokens |
| experts in | s, b, top_k f/t (twice if gated) | experts only, with an even load; backward recomputes the activation |

Dropout saves nothing: its mask is a function of seed and index. With f = 4h and k = q = h in 16 bit, the sum of the
table is 32 s b h / t bytes for a serial block and 28 s b h / t for a parallel one. Korthikanti et al. 2022 have 34,
since they save two dropout masks.
If `train.linear_precision` saves a float8 copy of a GEMM's input, the copy replaces activations that only its weight
gradient needs (norm output, MLP activation) and is added to those that attention needs too. Float8 copies of weights
exist from the first use in a step to the last.
With c context ranks, s is a slice of the sequence. Attention then saves what it receives in the exchange and not the
projection: query, key, value of s, b, (q + 2k)/t, with keys repeated where several ranks read them. It saves its output
twice, before and after the exchange. If keys are gathered, it saves the query, and keys and values of c s tokens.
Recompute `mlp` or `attention` keeps only the input of that half of a serial block.
Recompute `norms` drops norm statistics and outputs, `activation` the MLP activation, `selective` both; `full` saves the
input only.

Every chunk except the model's last also saves its output, from which autograd starts (on one stage it is the next
chunk's input). The last chunk adds the final norm's input and statistics, its output for the whole sequence, and the
loss's log-sum-exp. Logits exist for some tokens at a time, in the training precision, and their gradient overwrites
them. The number of micro-batches in flight follows from the schedule's lists. If a backward is two actions, the inputs
and output gradients of linear layers wait between them for the weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from megascale.config import ModelConfig, ParallelConfig
from megascale.config.parts import LINEAR_PRECISIONS, NORMS, OPTIMIZERS
from megascale.core.adapters import AdapterSpec, count_adapter_elements, count_adapter_state
from megascale.core.flops import count_parameters
from megascale.core.grid import Grid
from megascale.core.head_exchange import share_heads
from megascale.core.inventory import (
    BLOCK_PARTS,
    TOKENS,
    LogicalTensor,
    SavedActivation,
    count_distinct_layers,
    count_elements,
    embedding_tensors,
    gradient_widths,
    half_saved_activations,
    has_fused_projection,
    head_tensors,
    layer_inventory,
    layer_saved_activations,
    norm_tensors,
    output_matrix,
    resolve_layers,
)
from megascale.core.layer_spec import ExpertsSpec, LayerSpec
from megascale.core.layers import ChunkLayers, Half, LayerSums, assign_layers, assign_stage_layers
from megascale.core.schedule import (
    COMPUTES,
    INPUT_BACKWARDS,
    RECEIVES,
    SEND_SLOTS,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    make_kind_mask,
)
from megascale.core.schedule_registry import chunk_map_of
from megascale.core.unit_slots import CHUNK_SLOTS, has_chunk_slots

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
# The loss takes as many tokens at a time as have logits of this size (ops/cross_entropy.py).
MAX_LOGITS_BYTES = 2**30
# With optimizer.offload state moves through this many slots of this many elements (optim/offload.py).
OFFLOAD_SLOTS = 3
OFFLOAD_ELEMENTS = 2**25
# Offloaded inputs of layers that are on the device: copied to the host in forward; used and fetched in backward.
OFFLOADED_DEVICE_INPUTS = 2


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a forward saves for its backward: name, local shape, bytes per element."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by kind.

    Attributes:
        weights: parameters in the training precision. ZeRO-3: the shard of the units' matrices, the slots into which
            they are gathered, and resident parameters.
        weight_copies: copies of matrices in the format that GEMMs read, if train.linear_precision makes any. If
            data-parallel ranks gather float8, one of the two copies is the receive buffer.
        gradients: float32 gradient buffer. ZeRO-2: the shard of the units' gradients, the gradient slots
            (`UnitElements.gradient_slots`), and the gradients of resident parameters: norms, biases, tied embeddings.
        optimizer: float32 master weights (16-bit training) and the optimizer's state, sharded from ZeRO-1 on. The
            figure is the mean over data-parallel ranks. Ranks differ slightly if some tensors have more state.
        activations: saved activations at the schedule's peak, without logits.
        logits: the logits on which the loss works at a time.
        workspace: gradients of activations inside one layer's backward, and activations that recompute restores.
        tensor_buffers: gathered input and gathered gradient of a GEMM, and the symmetric-memory copy.
        pipeline_buffers: sends in flight and posted receives.
        graph_buffers: additional memory of CUDA graphs (parallel/chunk_graphs.py): temporaries of each micro-batch in
            flight, inputs and outputs, and with data parallelism one eager micro-batch's activations (ZeRO-3:
            none; ZeRO-2: only where weights are copied in its forward).
    """

    weights: int = 0
    weight_copies: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    workspace: int = 0
    tensor_buffers: int = 0
    pipeline_buffers: int = 0
    graph_buffers: int = 0

    @property
    def total(self) -> int:
        """Sum over all kinds."""
        return sum(self.bytes_by_kind().values())

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes by kind, in the order of the attributes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def ceil_divide(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


# parameters ------------------------------------------------------------------------------------------------------


# The sums are cached because a search asks for every stage of many layouts.
@lru_cache(maxsize=256)
def _parameter_sums(model: ModelConfig, tensor: int, expert: int) -> LayerSums:
    """Return the sums of parameters on one rank; a norm belongs to the attention or MLP that follows it."""
    return _sum_tensors(model, lambda tensors: count_elements(tensors, tensor, expert))


@lru_cache(maxsize=256)
def _matrix_sums(model: ModelConfig, tensor: int) -> LayerSums:
    """Return the sums of elements of linear layers' matrices on one rank."""
    return _sum_tensors(model, lambda tensors: count_elements((t for t in tensors if t.is_gemm_weight), tensor))


@lru_cache(maxsize=256)
def _state_sums(model: ModelConfig, tensor: int, optimizer: str, expert: int) -> LayerSums:
    """Return the sums of the matrices' extra optimizer state, in elements on one rank.

    Muon, for example, keeps fewer states per element of a matrix than per element of a bias or norm. Extra state is the
    difference, and may be negative.
    """
    state_names = OPTIMIZERS[optimizer].state_names
    per_vector_element = len(state_names("norm.weight", (model.hidden,)))

    def count(tensors: Sequence[LogicalTensor]) -> int:
        total = 0
        for matrix in tensors:
            if matrix.decay:
                extra = len(state_names(matrix.name, matrix.shape)) - per_vector_element
                total += prod(matrix.local_shape(tensor, expert)) * extra
        return total

    return _sum_tensors(model, count)


def _sum_tensors(model: ModelConfig, count: Callable[[Sequence[LogicalTensor]], int]) -> LayerSums:
    """Return the sums of a count of tensors. Layers that equal each other are counted once."""
    counts: dict[LayerSpec, tuple[int, int, int]] = {}
    for layer, _ in count_distinct_layers(model):
        attention, mlp = (count(half) for half in layer_inventory(layer).halves)
        counts[layer] = (attention + mlp, attention, mlp)
    return LayerSums.collect([counts[layer] for layer in resolve_layers(model)])


class _OuterCounts(NamedTuple):
    """Parameters on one rank outside layers: embeddings, final norm with head, and the logits' matrix (tied or not)."""

    embeddings: int
    norm_and_head: int
    logits_matrix: int


@lru_cache(maxsize=256)
def _count_outer_parameters(model: ModelConfig, tensor: int) -> _OuterCounts:
    norm = norm_tensors(model.norm, model.hidden, "norm")
    return _OuterCounts(
        embeddings=count_elements(embedding_tensors(model), tensor),
        norm_and_head=count_elements([*norm, *head_tensors(model)], tensor),
        logits_matrix=count_elements((output_matrix(model),), tensor),
    )


def count_layer_parameters(layer: LayerSpec, tensor: int = 1) -> int:
    """Return the parameters of one layer on one tensor-parallel rank, with replicated norms and row-parallel biases."""
    return count_elements(layer_inventory(layer), tensor)


def count_chunk_parameters(
    model: ModelConfig,
    layers: ChunkLayers,
    chunk: int,
    chunk_count: int,
    tensor: int = 1,
    duplicates_tied: bool | None = None,
    expert: int = 1,
) -> int:
    """Return the parameters of global chunk `chunk` on one tensor-parallel rank, with the vocabulary's padding.

    Args:
        duplicates_tied: whether the first and the last chunk both hold tied embeddings, because they are on different
            stages (default: with more than one chunk).
        expert: ranks of the expert axis (parallel.expert).
    """
    if duplicates_tied is None:
        duplicates_tied = chunk_count > 1
    outer = _count_outer_parameters(model, tensor)
    count = int(_parameter_sums(model, tensor, expert).of_chunk(layers))
    if chunk == 0:
        count += outer.embeddings
    if chunk == chunk_count - 1:
        count += outer.norm_and_head
        if model.tied_embeddings and duplicates_tied:
            count += outer.logits_matrix
    return count


def _count_table_elements(model: ModelConfig, chunk: int, chunk_count: int, tensor: int, duplicates_tied: bool) -> int:
    """Return a chunk's elements of embeddings and output matrix."""
    outer = _count_outer_parameters(model, tensor)
    count = outer.embeddings if chunk == 0 else 0
    if chunk == chunk_count - 1 and (not model.tied_embeddings or duplicates_tied):
        count += outer.logits_matrix
    return count


def count_stage_parameters(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Return the parameters of all chunks of a stage on one tensor-parallel rank."""
    return sum(_count_parameters_by_chunk(model, parallel, stage))


def count_stage_matrix_elements(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Return the elements of a stage's linear layers' matrices on one tensor-parallel rank, vocabulary excluded."""
    sums = _matrix_sums(model, parallel.tensor)
    return int(sum(sums.of_chunk(layers) for layers in assign_stage_layers(model, parallel, stage)))


def _count_parameters_by_chunk(model: ModelConfig, parallel: ParallelConfig, stage: int) -> list[int]:
    chunk_map = chunk_map_of(parallel)
    layers = assign_layers(model, parallel)
    duplicates_tied = len(chunk_map.end_stages) > 1
    return [
        count_chunk_parameters(
            model,
            layers[position],
            position,
            chunk_map.chunks,
            parallel.tensor,
            duplicates_tied=duplicates_tied,
            expert=parallel.expert_ranks,
        )
        for position in chunk_map.stage_chunks(stage)
    ]


@dataclass(frozen=True)
class UnitElements:
    """Elements of a stage's units of the forward, which ZeRO-2 reduces one by one (parallel/gradient_slots.py).

    A unit is the matrices of one block (a layer, or its half in a divided layer), or one matrix outside blocks.

    Attributes:
        by_chunk: elements of all units of each chunk. All other parameters are resident.
        blocks_by_chunk: elements of the units of each chunk that are blocks.
        block_counts: number of blocks of each chunk.
        block: elements of the largest block.
        outer: elements of the largest matrix outside blocks.
    """

    by_chunk: tuple[int, ...]
    blocks_by_chunk: tuple[int, ...]
    block_counts: tuple[int, ...]
    block: int
    outer: int

    @property
    def sharded(self) -> int:
        """Elements of all units."""
        return sum(self.by_chunk)

    def count_parameter_slots(self, persistent_blocks: int) -> int:
        """Return the elements of ZeRO-3's slots for parameters (parallel/parameter_slots.py).

        Args:
            persistent_blocks: parallel.zero3_keep_layers.
        """
        if has_chunk_slots(len(self.by_chunk)):
            return CHUNK_SLOTS * max(self.by_chunk)
        block_count = sum(self.block_counts)
        persistent_blocks = min(persistent_blocks, block_count)
        shared_slots = 2 if persistent_blocks < block_count else 0
        return (shared_slots + persistent_blocks) * self.block + self.outer

    @property
    def gradient_slots(self) -> int:
        """Elements of ZeRO-2's gradient slots.

        Backward fills the slot of one block while the other slot is reduced. The largest matrix outside blocks must fit
        in both slots together.
        """
        return max(2 * self.block, self.outer)


def count_stage_units(model: ModelConfig, parallel: ParallelConfig, stage: int) -> UnitElements:
    """Return the elements of a stage's units on one tensor-parallel rank."""
    chunk_map = chunk_map_of(parallel)
    sums = _unit_sums(model, parallel.tensor, parallel.expert_ranks)
    block = outer = 0
    by_chunk = []
    blocks_by_chunk = []
    block_counts = []
    stage_layers = assign_stage_layers(model, parallel, stage)
    for layers, position in zip(stage_layers, chunk_map.stage_chunks(stage), strict=True):
        blocks = []
        for index, half in layers:
            if half == "both":
                elements = sums.running[index + 1] - sums.running[index]
            elif half == "attention":
                elements = sums.attention[index]
            else:
                elements = sums.mlp[index]
            blocks.append(int(elements))
        tables: list[LogicalTensor] = []
        if position == 0 and not model.tied_embeddings:
            tables += embedding_tensors(model)
        if position == chunk_map.chunks - 1:
            tables += head_tensors(model)
        if parallel.expert_ranks > 1:
            tables = []  # the tables' gradients are summed over the expert axis first, so tables are resident
        matrices = [prod(tensor.local_shape(parallel.tensor)) for tensor in tables if tensor.is_unit_matrix]
        block = max([block, *blocks])
        outer = max([outer, *matrices])
        blocks_by_chunk.append(sum(blocks))
        block_counts.append(len(blocks))
        by_chunk.append(sum(blocks) + sum(matrices))
    return UnitElements(tuple(by_chunk), tuple(blocks_by_chunk), tuple(block_counts), block=block, outer=outer)


@lru_cache(maxsize=256)
def _unit_sums(model: ModelConfig, tensor: int, expert: int) -> LayerSums:
    """Return the sums of elements of units: matrices that are replicated along data-parallel axes only."""

    def count(tensors: Sequence[LogicalTensor]) -> int:
        units = [unit for unit in tensors if unit.is_unit_matrix and (expert == 1 or "expert" in unit.cuts)]
        return count_elements(units, tensor, expert)

    return _sum_tensors(model, count)


# optimizer state -------------------------------------------------------------------------------------------------


def count_state_elements(
    optimizer: str,
    model: ModelConfig,
    parameters: int,
    chunks: Iterable[ChunkLayers],
    tables: int,
    tensor: int = 1,
    expert: int = 1,
) -> int:
    """Return the elements of state that `optimizer` holds for some chunks of the model, without master weights.

    Args:
        parameters: elements of all tensors of the chunks.
        chunks: layers of each chunk.
        tables: elements of the chunks' matrices outside layers: embeddings and output.
        tensor: tensor-parallel ranks that divide the layers' matrices.
        expert: ranks of the expert axis, which divide the experts.
    """
    state_names = OPTIMIZERS[optimizer].state_names
    per_vector_element = len(state_names("norm.weight", (model.hidden,)))
    per_table_element = len(state_names(TOKENS, (model.padded_vocab, model.hidden)))
    count = parameters * per_vector_element + tables * (per_table_element - per_vector_element)
    sums = _state_sums(model, tensor, optimizer, expert)
    return count + int(sum(sums.of_chunk(layers) for layers in chunks))


def count_checkpoint_elements(optimizer: str, model: ModelConfig) -> int:
    """Return the elements of a checkpoint: master weights and the optimizer's state."""
    parameters = count_parameters(model)
    tables = parameters - count_parameters(model, embeddings=False) - (model.vocab if model.head_bias else 0)
    layers = ChunkLayers.from_range(range(model.layers))
    return parameters + count_state_elements(optimizer, model, parameters, [layers], tables)


def _count_stage_state(model: ModelConfig, parallel: ParallelConfig, stage: int, optimizer: str) -> int:
    """Return the elements of optimizer state of a stage on one tensor-parallel rank, before sharding."""
    chunk_map = chunk_map_of(parallel)
    stage_layers = assign_stage_layers(model, parallel, stage)
    duplicates_tied = len(chunk_map.end_stages) > 1
    tables = sum(
        _count_table_elements(model, position, chunk_map.chunks, parallel.tensor, duplicates_tied)
        for position in chunk_map.stage_chunks(stage)
    )
    parameters = count_stage_parameters(model, parallel, stage)
    return count_state_elements(
        optimizer, model, parameters, stage_layers, tables, tensor=parallel.tensor, expert=parallel.expert_ranks
    )


# activations -----------------------------------------------------------------------------------------------------


def layer_saved_tensors(
    layer: LayerSpec,
    sequence: int,
    tensor: int,
    micro_batch: int,
    precision: str,
    recompute: str = "none",
    linear_precision: str = "default",
    half: Half = "both",
    keeps_inputs: bool = False,
    context: int = 1,
) -> list[SavedTensor]:
    """Return the tensors that one layer's forward of one micro-batch saves on one rank, as in this module's table.

    Args:
        sequence: tokens of a sample.
        half: "attention" or "mlp" for one half of a divided layer.
        keeps_inputs: whether inputs of GEMMs are saved next to their float8 copies, because adapters read them.
        context: ranks that divide the tokens of a sample.
    """
    s = sequence // context
    b = micro_batch
    itemsize = DTYPE_BYTES[precision]
    if half == "both":
        activations = layer_saved_activations(layer)
    else:
        attention, mlp = half_saved_activations(layer)
        activations = mlp if half == "mlp" else attention
    if recompute == "full":
        # The layer's recomputation needs the input itself, so a float8 copy cannot replace it.
        activations = (replace(activations[0], gemm_input="no"),)
    elif recompute in ("mlp", "attention"):
        activations = _drop_half(layer, activations, recompute)
    elif recompute != "none":
        recomputed = ("norms", "activation") if recompute == "selective" else (recompute,)
        activations = tuple(a for a in activations if a.recompute_name not in recomputed)
    if context > 1:
        activations = _exchange_activations(layer, activations, tensor, context)
    copy_itemsize = LINEAR_PRECISIONS[linear_precision].saved_input_bytes
    saved: list[SavedTensor] = []
    for activation in activations:
        if activation.split_along == "sequence":
            shape = (s // tensor, b, activation.width)
        elif activation.split_along == "none":
            shape = (s, b, activation.width)
        else:
            shape = (s, b, activation.width // tensor)
        if copy_itemsize is None or keeps_inputs or activation.gemm_input != "only":
            saved.append(SavedTensor(activation.name, shape, max(4, itemsize) if activation.is_statistic else itemsize))
        if copy_itemsize is not None and activation.gemm_input != "no":
            saved.append(SavedTensor(f"{activation.name}_copy", shape, copy_itemsize))
    return saved


def _drop_half(layer: LayerSpec, activations: tuple[SavedActivation, ...], half: str) -> tuple[SavedActivation, ...]:
    """Return saved activations without those of a half that is recomputed from its input."""
    attention, mlp = half_saved_activations(layer)
    half_input, *dropped = mlp if half == "mlp" else attention
    dropped_names = {activation.name for activation in dropped}
    result = []
    for activation in activations:
        if activation.name == half_input.name:
            result.append(replace(activation, gemm_input="no"))
        elif activation.name not in dropped_names:
            result.append(activation)
    return tuple(result)


def _exchange_activations(
    layer: LayerSpec, activations: tuple[SavedActivation, ...], tensor: int, context: int
) -> tuple[SavedActivation, ...]:
    """Return a layer's saved activations for several context ranks, which exchange heads or gather keys.

    Attention saves what it receives from other ranks instead of its own projection. Rotation and scaling come before
    the exchange and save nothing by themselves.
    """
    mixer = layer.mixer
    share = share_heads(mixer.heads // tensor, mixer.kv_heads // tensor, context)
    keys = 2 * mixer.kv_heads * mixer.head_size
    queries = mixer.heads * mixer.head_size
    # The MLP's columns lie in the same memory as those of a projection that is fused with them.
    keeps_projection = mixer.qk_norm is not None or has_fused_projection(layer)
    if share.gathers_keys:
        received = [SavedActivation("gathered_key_value", context * keys, "columns")]
        if mixer.rope is not None or mixer.multiplier is not None:
            received.append(SavedActivation("query", queries, "columns"))
        else:
            keeps_projection = True  # the query is a view of the projection
    else:
        received = [
            SavedActivation("exchanged_query_key_value", queries + share.copies * keys, "columns"),
            SavedActivation("exchanged_attention_output", queries, "columns"),
        ]
    dropped_names = {"rotated_query_key", "scaled_query"}
    if not keeps_projection:
        dropped_names.add("query_key_value")
    result: list[SavedActivation] = []
    for activation in activations:
        if activation.name == "query_key_value":
            result += received
        if activation.name not in dropped_names:
            result.append(activation)
    return tuple(result)


# Cached because the estimates of all stages of a layout ask for the same sums.
@lru_cache(maxsize=64)
def sum_saved_bytes(
    model: ModelConfig,
    tensor: int,
    micro_batch: int,
    precision: str,
    recompute: str,
    linear_precision: str,
    adapters: AdapterSpec | None = None,
    context: int = 1,
) -> LayerSums:
    """Return the sums of the bytes that a forward of one micro-batch saves in layers; see `layer_saved_tensors`.

    Each adapter also saves its inner activation, of width `rank`, unless backward recomputes the layer.
    """
    tokens = model.sequence_length // context * micro_batch

    def sum_half(layer: LayerSpec, half: Half) -> int:
        tensors = layer_saved_tensors(
            layer,
            model.sequence_length,
            tensor=tensor,
            micro_batch=micro_batch,
            precision=precision,
            recompute=recompute,
            linear_precision=linear_precision,
            half=half,
            keeps_inputs=adapters is not None,
            context=context,
        )
        return sum(saved.bytes for saved in tensors)

    bytes_by_layer: dict[LayerSpec, tuple[int, int, int]] = {}
    for layer, _ in count_distinct_layers(model):
        adapter_bytes = [0, 0]  # of attention and MLP
        if adapters is not None and recompute != "full":
            for half_index, tensors in enumerate(layer_inventory(layer).halves):
                adapter_count = sum(adapters.is_target(matrix) for matrix in tensors)
                adapter_bytes[half_index] = adapter_count * adapters.rank * tokens * DTYPE_BYTES[precision]
        bytes_by_layer[layer] = (
            sum_half(layer, "both") + sum(adapter_bytes),
            sum_half(layer, "attention") + adapter_bytes[0],
            sum_half(layer, "mlp") + adapter_bytes[1],
        )
    return LayerSums.collect([bytes_by_layer[layer] for layer in resolve_layers(model)])


def head_saved_tensors(
    model: ModelConfig, tensor: int, micro_batch: int, precision: str, context: int = 1
) -> list[SavedTensor]:
    """Return the tensors that final norm and loss save on the last chunk."""
    s = model.sequence_length // context
    b = micro_batch
    itemsize = DTYPE_BYTES[precision]
    moments = NORMS[model.norm].moments
    return [
        SavedTensor("final_norm_input", (s // tensor, b, model.hidden), itemsize),
        SavedTensor("final_norm_statistics", (moments, s // tensor, b), max(4, itemsize)),
        SavedTensor("final_norm_output", (s, b, model.hidden), itemsize),
        SavedTensor("loss_logsumexp", (s, b), max(4, itemsize)),
    ]


# a rank ----------------------------------------------------------------------------------------------------------


def count_offloaded_bytes(parameters: int, shards: int, precision: str) -> int:
    """Return the bytes of host memory of a rank's state with optimizer.offload: master weights and AdamW's moments.

    Args:
        parameters: trained parameters of a pipeline stage on one tensor-parallel rank.
        shards: ranks among which the state is divided.
    """
    # Three values per parameter: the master weight and two moments.
    return 3 * max(4, DTYPE_BYTES[precision]) * ceil_divide(parameters, shards)


def estimate_stage_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    schedule: Schedule,
    stage: int,
    micro_batch: int,
    precision: str,
    side_stream: bool = False,
    optimizer: str = "adamw",
    linear_precision: str = "default",
    graphs: bool = False,
    offload: bool = False,
    adapters: AdapterSpec | None = None,
    expert_rows: float = 1.0,
) -> MemoryEstimate:
    """Estimate the peak memory of a rank of pipeline stage `stage`, in bytes by kind.

    Args:
        parallel: ZeRO stage, recompute, layer split.
        grid: sizes of the axes; the data axis may differ from `parallel.data`.
        schedule: gives micro-batches in flight and send buffers.
        micro_batch: sequences in a micro-batch.
        precision: float32, bfloat16 or float64.
        side_stream: whether weight gradients are computed on a side stream (Config.gemms_on_side_stream).
        optimizer: its name; config/parts.py declares its state.
        linear_precision: value of train.linear_precision; config/parts.py has its facts.
        graphs: whether chunks are CUDA graphs (core/rank_memory.py).
        offload: value of optimizer.offload.
        adapters: low-rank adapters, the only trained parameters; None: all parameters are trained.
        expert_rows: kernels.expert_rows: rows that graphs have room for, relative to an even load.
    """
    t = grid.tensor
    c = grid.context
    itemsize = DTYPE_BYTES[precision]
    master_itemsize = max(4, itemsize)
    weights = _count_weights(model, parallel, grid, stage)
    layers_by_chunk = assign_stage_layers(model, parallel, stage)
    if adapters is None:
        trained = count_stage_parameters(model, parallel, stage)
        state = _count_stage_state(model, parallel, stage, optimizer)
        gradients = _gradient_bytes(model, parallel, grid, schedule, stage, master_itemsize)
    else:
        trained = sum(count_adapter_elements(model, adapters, layers, t) for layers in layers_by_chunk)
        state = sum(count_adapter_state(model, adapters, layers, optimizer, t) for layers in layers_by_chunk)
        gradients = _adapter_gradient_bytes(trained, parallel, grid, master_itemsize)
        weights += trained
    if itemsize < master_itemsize:
        state += trained  # master weights
    saved = sum_saved_bytes(model, t, micro_batch, precision, parallel.recompute, linear_precision, adapters, c)
    all_saved = sum_saved_bytes(model, t, micro_batch, precision, "none", linear_precision, adapters, c)
    stage_layers = sorted({index for layers in layers_by_chunk for index, _ in layers})

    s = model.sequence_length // c
    hidden_bytes = s * micro_batch * model.hidden * itemsize
    message_bytes = s // t * micro_batch * model.hidden * itemsize
    logits = 0
    if stage == schedule.chunk_map.last_stage:
        logits = min(s * micro_batch * (model.padded_vocab // t) * itemsize, MAX_LOGITS_BYTES)
        if model.logit_softcap is not None:
            logits *= 2  # the slope of the softcap, until the gradient is known
    specs = resolve_layers(model)
    workspace = 0
    index_by_spec = {specs[index]: index for index in stage_layers}
    for spec, index in index_by_spec.items():
        activation_gradients = s * micro_batch * _workspace_width(spec, t, side_stream) * itemsize
        recomputed = all_saved.running[index + 1] - all_saved.running[index]
        recomputed -= saved.running[index + 1] - saved.running[index]
        exchanged = 2 * s * micro_batch * _count_exchanged_values(spec, t, c) * itemsize
        workspace = max(workspace, activation_gradients + exchanged + int(recomputed))
    graph_buffers = 0
    if graphs:
        in_flight = schedule.count_in_flight(stage)
        # Each micro-batch in flight has temporaries of its own; `workspace` and `logits` already count one of them.
        graph_buffers = (in_flight - 1) * (workspace + logits)
        if schedule.chunks > 1:
            graph_buffers += 3 * in_flight * message_bytes  # input, gradient of the output, gradient of the input
        has_copies = LINEAR_PRECISIONS[linear_precision].weight_copy_bytes > 0
        has_eager_micro_batch = parallel.zero < 2 or (parallel.zero == 2 and has_copies)
        if grid.shards > 1 and has_eager_micro_batch:
            layer_count = sum(layers.layer_count for layers in layers_by_chunk)
            layer_bytes = max((saved.running[i + 1] - saved.running[i] for i in stage_layers), default=0)
            graph_buffers += ceil(layer_count / schedule.virtual_stages) * int(layer_bytes) + workspace + logits
        if t > 1:
            # The rows of a rank's experts vary between micro-batches, but the shapes of graphs do not. So their buffers
            # have room for `expert_rows` times the rows of an even load.
            expert_bytes = sum(_expert_row_width(specs[i]) for i in stage_layers) * s * micro_batch * itemsize // t
            even_load_bytes = in_flight * expert_bytes / schedule.virtual_stages + workspace
            graph_buffers += int((expert_rows - 1) * even_load_bytes)
    matrices = count_stage_matrix_elements(model, parallel, stage)
    weight_copies = LINEAR_PRECISIONS[linear_precision].weight_copy_bytes * matrices
    if parallel.zero == 3 and gathers_float8(parallel, linear_precision, grid.shards):
        # One byte per element of the rank's shards; copies of gathered matrices lie in the parameter slots.
        weight_copies = ceil_divide(matrices, grid.shards)
    if parallel.zero:
        state = state * ceil_divide(trained, grid.shards) // trained
    optimizer_bytes = master_itemsize * state
    if offload:
        # Each slot has master weights and AdamW's two moments (optim/offload.py).
        slot_bytes = 3 * OFFLOAD_ELEMENTS * master_itemsize
        optimizer_bytes = min(optimizer_bytes, OFFLOAD_SLOTS * slot_bytes)
    return MemoryEstimate(
        weights=itemsize * weights,
        weight_copies=weight_copies,
        gradients=gradients,
        optimizer=optimizer_bytes,
        activations=_peak_activation_bytes(model, parallel, schedule, stage, micro_batch, precision, saved),
        logits=logits,
        workspace=workspace,
        # Gathered input, gathered gradient, symmetric-memory copy.
        tensor_buffers=3 * hidden_bytes if t > 1 else 0,
        pipeline_buffers=message_bytes * _count_pipeline_buffers(schedule, stage),
        graph_buffers=graph_buffers,
    )


def gathers_float8(parallel: ParallelConfig, linear_precision: str, data: int) -> bool:
    """Return whether `data` data-parallel ranks gather matrices as float8; resolves parallel.gather_precision=auto."""
    if LINEAR_PRECISIONS[linear_precision].gathered_weight_bytes is None:
        return False
    return parallel.zero > 0 and data > 1 and parallel.gather_precision != "default"


def _count_weights(model: ModelConfig, parallel: ParallelConfig, grid: Grid, stage: int) -> int:
    """Return the elements of parameters in the training precision that a rank of a stage holds."""
    parameters = count_stage_parameters(model, parallel, stage)
    if parallel.zero < 3 or grid.shards == 1:
        return parameters
    units = count_stage_units(model, parallel, stage)
    resident = parameters - units.sharded
    return resident + ceil_divide(units.sharded, grid.shards) + units.count_parameter_slots(parallel.zero3_keep_layers)


def _adapter_gradient_bytes(trained: int, parallel: ParallelConfig, grid: Grid, master_itemsize: int) -> int:
    """Return an upper bound of the bytes of gradient buffers of a stage's adapters; ZeRO-2 may hold fewer at a time."""
    elements = trained
    if parallel.zero >= 2 and grid.shards > 1:
        elements += ceil_divide(trained, grid.shards)
    total = master_itemsize * elements
    if parallel.reduce_dtype == "bfloat16" and grid.shards > 1:
        total += DTYPE_BYTES["bfloat16"] * trained
    return total


def _gradient_bytes(
    model: ModelConfig, parallel: ParallelConfig, grid: Grid, schedule: Schedule, stage: int, master_itemsize: int
) -> int:
    """Return the bytes of gradient buffers of a stage."""
    parameters = count_stage_parameters(model, parallel, stage)
    if grid.shards == 1:
        return master_itemsize * parameters
    unreduced = parameters
    reduced_shards = 0
    if parallel.zero >= 2:
        units = count_stage_units(model, parallel, stage)
        resident = parameters - units.sharded
        unreduced = units.gradient_slots + resident
        reduced_shards = ceil_divide(units.sharded, grid.shards)
    total = master_itemsize * (unreduced + reduced_shards)
    if parallel.reduce_dtype == "bfloat16":
        # Each gradient that is not reduced yet has a rounded copy.
        total += DTYPE_BYTES["bfloat16"] * unreduced
    return total


def _expert_row_width(spec: LayerSpec) -> int:
    """Return the saved elements per token of the rows of experts, 0 for a layer without experts."""
    experts = spec.feed_forward
    if not isinstance(experts, ExpertsSpec):
        return 0
    return experts.settings.top_k * experts.input_matrices * experts.width


def _workspace_width(spec: LayerSpec, tensor: int, side_stream: bool) -> int:
    """Return the values per token that live inside one layer's backward at once."""
    is_parallel = BLOCK_PARTS[spec.norms.block].is_parallel
    layer = layer_inventory(spec)
    attention, mlp = (width // tensor for width in gradient_widths(spec))
    # A parallel block's two branches go backward through one GEMM, so both gradients live at once.
    width = attention + mlp if is_parallel else max(attention, mlp)
    if not side_stream:
        return width
    # Two weight gradients may be queued, and their GEMMs' operands then stay in memory (ops/side_stream.py). The widest
    # two belong to the projection into the MLP and to the projection out of it.
    projected = layer.attention + layer.mlp if is_parallel else layer.mlp
    in_width = sum(w.shape[0] // tensor for w in projected if w.is_gemm_weight and w.partition_dim == 0)
    out_widths = [w.shape[1] // tensor for w in layer.mlp if w.is_gemm_weight and w.partition_dim == 1]
    return width + (spec.hidden + in_width) + (spec.hidden + max(out_widths, default=0))


def _count_exchanged_values(spec: LayerSpec, tensor: int, context: int) -> int:
    """Return the values per token that a rank exchanges with other context ranks in an attention; 0 if context is 1."""
    if context == 1:
        return 0
    mixer = spec.mixer
    share = share_heads(mixer.heads // tensor, mixer.kv_heads // tensor, context)
    keys = 2 * mixer.kv_heads * mixer.head_size // tensor
    if share.gathers_keys:
        return context * keys
    return mixer.heads * mixer.head_size // tensor + share.copies * keys


def _count_pipeline_buffers(schedule: Schedule, stage: int) -> int:
    """Return the number of message buffers of a stage."""
    kinds, chunks, _ = schedule.tables[stage].T
    count = 0
    for send in SENDS:
        sent = np.unique(chunks[kinds == send]).tolist()
        channels = {schedule.channel(stage, Action(send, chunk, microbatch=0)) for chunk in sent}
        count += SEND_SLOTS * len(channels)
    for receive, computes in zip(RECEIVES, ((ActionKind.FORWARD,), INPUT_BACKWARDS), strict=True):
        count += _count_posted(schedule, stage, receive, computes)
    # A received activation becomes the saved input and is counted there. A received gradient stays in its buffer while
    # backward reads it, and needs one buffer more than those that are posted.
    if ActionKind.RECV_BACKWARD in kinds:
        count += 1
    return count


def _count_posted(schedule: Schedule, stage: int, receive: ActionKind, computes: tuple[ActionKind, ...]) -> int:
    """Return the maximum number of receives of a kind that are posted or have arrived while the stage computes."""
    kind, chunk, _ = schedule.tables[stage].T
    consumed = make_kind_mask(kind, *computes) & schedule.message_mask(stage, receive)[chunk]
    waiting = ((kind == receive).astype(int) - consumed).cumsum()
    return int(waiting[make_kind_mask(kind, *COMPUTES)].max())


def _peak_activation_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    schedule: Schedule,
    stage: int,
    micro_batch: int,
    precision: str,
    saved: LayerSums,
) -> int:
    """Return the maximum over the schedule of the bytes of saved activations.

    Between BACKWARD_INPUT and BACKWARD_WEIGHT, the operands of weight-gradient GEMMs replace the saved activations.
    """
    saved_head_tensors = head_saved_tensors(model, parallel.tensor, micro_batch, precision, parallel.context)
    head_bytes = sum(tensor.bytes for tensor in saved_head_tensors)
    length = model.sequence_length // parallel.context
    output_bytes = 0
    if schedule.stages > 1:
        output_bytes = length // parallel.tensor * micro_batch * model.hidden * DTYPE_BYTES[precision]
    layers = assign_layers(model, parallel)
    sizes = []
    operand_widths = []
    operands = _weight_gradient_operand_sums(model, parallel.tensor)
    offloaded = _count_offloaded_bytes(parallel, layers, saved)
    for position in schedule.chunk_map.stage_chunks(stage):
        size = int(saved.of_chunk(layers[position])) - offloaded[position]
        sizes.append(size + (head_bytes if position == schedule.chunks - 1 else output_bytes))
        operand_widths.append(int(operands.of_chunk(layers[position])))
    kind, chunk, _ = schedule.tables[stage].T
    changes = schedule.in_flight_deltas(stage) * np.array(sizes)[chunk]
    queued_deltas = (kind == ActionKind.BACKWARD_INPUT).astype(int) - (kind == ActionKind.BACKWARD_WEIGHT)
    bytes_per_width = length * micro_batch * DTYPE_BYTES[precision]
    changes = changes + queued_deltas * bytes_per_width * np.array(operand_widths)[chunk]
    moving_bytes = 0
    if any(offloaded):
        largest = max(int(saved.of_chunk(chunk) / chunk.layer_count) for chunk in layers if chunk.layer_count)
        moving_bytes = OFFLOADED_DEVICE_INPUTS * largest
    return int(changes.cumsum().max()) + moving_bytes


def _count_offloaded_bytes(parallel: ParallelConfig, layers: Sequence[ChunkLayers], saved: LayerSums) -> list[int]:
    """Return the bytes of layer inputs that a micro-batch of each chunk keeps in host memory.

    The last layer's input stays on the device. So does the first layer's input in each chunk but the model's first,
    because the pipeline keeps it for its gradient.
    """
    if not parallel.offload_activations:
        return [0] * len(layers)
    byte_counts = []
    for position, chunk in enumerate(layers):
        persistent_count = 1 if position == 0 else 2
        offloaded_share = 0.0
        if chunk.layer_count:
            offloaded_share = max(0.0, 1 - persistent_count / chunk.layer_count)
        byte_counts.append(int(saved.of_chunk(chunk) * offloaded_share))
    return byte_counts


def estimate_offloaded_bytes(
    model: ModelConfig, parallel: ParallelConfig, schedule: Schedule, stage: int, micro_batch: int, precision: str
) -> int:
    """Return the peak bytes of host memory that a rank of a stage fills with layer inputs."""
    layers = assign_layers(model, parallel)
    saved = sum_saved_bytes(model, parallel.tensor, micro_batch, precision, "full", "default", context=parallel.context)
    offloaded = _count_offloaded_bytes(parallel, layers, saved)
    sizes = np.array([offloaded[position] for position in schedule.chunk_map.stage_chunks(stage)])
    _, chunk, _ = schedule.tables[stage].T
    return int((schedule.in_flight_deltas(stage) * sizes[chunk]).cumsum().max())


@lru_cache(maxsize=256)
def _weight_gradient_operand_sums(model: ModelConfig, tensor: int) -> LayerSums:
    """Return the sums over layers of the values per token that the GEMMs of weight gradients read.

    Column-parallel matrices of a layer share one gathered input. Each row-parallel matrix has a gathered output
    gradient.
    """

    def count(tensors: Sequence[LogicalTensor]) -> int:
        columns = [matrix.shape for matrix in tensors if matrix.is_gemm_weight and matrix.partition_dim == 0]
        rows = [matrix.shape for matrix in tensors if matrix.is_gemm_weight and matrix.partition_dim == 1]
        width = sum(shape[0] for shape in columns) // tensor + max((shape[1] for shape in columns), default=0)
        return width + sum(shape[1] // tensor + shape[0] for shape in rows)

    return _sum_tensors(model, count)
