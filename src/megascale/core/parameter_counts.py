"""Numbers of parameters and of elements of optimizer state, per chunk and per stage of a rank. No torch.

ZeRO-2 and ZeRO-3 divide a stage's parameters into units of the forward and resident parameters (`UnitElements`).
A *table* is a matrix outside layers: a token or position embedding, or the output matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from megascale.config import ModelConfig, ParallelConfig
from megascale.config.parts import OPTIMIZERS
from megascale.core.flops import count_parameters
from megascale.core.inventory import (
    TOKENS,
    count_distinct_layers,
    count_elements,
    embedding_tensors,
    head_tensors,
    layer_inventory,
    output_matrix,
    resolve_layers,
)
from megascale.core.inventory_records import LogicalTensor, norm_tensors
from megascale.core.layer_spec import LayerSpec
from megascale.core.layers import ChunkLayers, LayerSums, assign_layers, assign_stage_layers
from megascale.core.mapped_layout import PlannedUnit
from megascale.core.schedule_registry import chunk_map_of
from megascale.core.unit_slots import (
    CHUNK_SLOTS,
    TABLE_PARTS,
    assign_block_slots,
    choose_table_part,
    has_chunk_slots,
    select_persistent_blocks,
)

# Index of the slot that embedding and head share, which no block has.
OUTER_SLOT = -1


def ceil_divide(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


# The sums are cached because a search asks for every stage of many layouts.
@lru_cache(maxsize=256)
def _parameter_sums(model: ModelConfig, tensor: int, expert: int) -> LayerSums:
    """Return the sums of parameters on one rank; a norm belongs to the attention or MLP that follows it."""
    return sum_tensors(model, lambda tensors: count_elements(tensors, tensor, expert))


@lru_cache(maxsize=256)
def _matrix_sums(model: ModelConfig, tensor: int) -> LayerSums:
    """Return the sums of elements of linear layers' matrices on one rank."""
    return sum_tensors(model, lambda tensors: count_elements((t for t in tensors if t.is_gemm_weight), tensor))


@lru_cache(maxsize=256)
def _expert_sums(model: ModelConfig, tensor: int, expert: int) -> LayerSums:
    """Return the sums of elements of experts' matrices on one rank."""
    return sum_tensors(model, lambda tensors: count_elements((t for t in tensors if t.is_expert_stack), tensor, expert))


@lru_cache(maxsize=256)
def _state_sums(model: ModelConfig, tensor: int, optimizer: str, expert: int) -> LayerSums:
    """Return the sums of the matrices' extra optimizer state, in elements on one rank.

    Muon, for example, keeps fewer values per element of a matrix than per element of a bias or norm. Extra state is
    what a matrix has more than a vector of as many elements. It may be negative.
    """
    # `state_names` returns the names of the state tensors for a parameter's name and shape. Any vector gives the number
    # of values that the optimizer keeps per element of a vector.
    state_names = OPTIMIZERS[optimizer].state_names
    per_vector_element = len(state_names("norm.weight", (model.hidden,)))

    def count(tensors: Sequence[LogicalTensor]) -> int:
        total = 0
        for matrix in tensors:
            if matrix.decay:
                extra = len(state_names(matrix.name, matrix.shape)) - per_vector_element
                total += prod(matrix.local_shape(tensor, expert)) * extra
        return total

    return sum_tensors(model, count)


def sum_tensors(model: ModelConfig, count: Callable[[Sequence[LogicalTensor]], int]) -> LayerSums:
    """Return the sums of a count of tensors. Layers that equal each other are counted once."""
    counts: dict[LayerSpec, tuple[int, int, int]] = {}
    for layer, _ in count_distinct_layers(model):
        attention, mlp = (count(half) for half in layer_inventory(layer).halves)
        counts[layer] = (attention + mlp, attention, mlp)  # of the whole layer and of its halves
    return LayerSums.collect([counts[layer] for layer in resolve_layers(model)])


class _OuterCounts(NamedTuple):
    """Parameters on one rank outside layers: embeddings, final norm with head, and the logits' matrix (tied or not)."""

    embeddings: int
    norm_and_head: int
    logits_matrix: int


@lru_cache(maxsize=256)
def _count_outer_parameters(model: ModelConfig, tensor: int) -> _OuterCounts:
    """Return the parameters outside layers on one of `tensor` tensor-parallel ranks."""
    norm = norm_tensors(model.norm, model.hidden, "norm")
    return _OuterCounts(
        embeddings=count_elements(embedding_tensors(model), tensor),
        norm_and_head=count_elements([*norm, *head_tensors(model)], tensor),
        logits_matrix=count_elements((output_matrix(model),), tensor),
    )


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
    return count + _count_outside_layers(outer, chunk, chunk_count, model.tied_embeddings and duplicates_tied)


def _count_outside_layers(outer: _OuterCounts, chunk: int, chunk_count: int, duplicates_tied: bool) -> int:
    """Return a chunk's parameters outside layers. `duplicates_tied`: the last chunk has tied embeddings too."""
    count = outer.embeddings if chunk == 0 else 0
    if chunk == chunk_count - 1:
        count += outer.norm_and_head
        if duplicates_tied:
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


def count_stage_expert_elements(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Return the elements of a stage's experts' matrices on one rank."""
    sums = _expert_sums(model, parallel.tensor, parallel.expert_ranks)
    return int(sum(sums.of_chunk(layers) for layers in assign_stage_layers(model, parallel, stage)))


def _count_parameters_by_chunk(model: ModelConfig, parallel: ParallelConfig, stage: int) -> list[int]:
    """Return the parameters of each chunk of a stage on one tensor-parallel rank."""
    chunk_map = chunk_map_of(parallel)
    layers = assign_layers(model, parallel)
    duplicates_tied = model.tied_embeddings and len(chunk_map.end_stages) > 1
    # Each look-up hashes the model, so the chunks share one.
    sums = _parameter_sums(model, parallel.tensor, parallel.expert_ranks)
    outer = _count_outer_parameters(model, parallel.tensor)
    return [
        int(sums.of_chunk(layers[position])) + _count_outside_layers(outer, position, chunk_map.chunks, duplicates_tied)
        for position in chunk_map.stage_chunks(stage)
    ]


@dataclass(frozen=True)
class UnitElements:
    """Elements of a stage's units of the forward, which ZeRO-2 reduces one by one (parallel/gradient_slots.py).

    A unit is the matrices of one block (a layer, or its half in a divided layer), or one matrix outside blocks.

    All other parameters are resident.

    Attributes:
        blocks: elements of each block of each chunk, in forward order.
        embeddings: elements of each chunk's embedding unit; 0 without one.
        heads: elements of each chunk's output matrix; 0 if it has none, or if it is tied to the embedding.
        outer: elements of the largest matrix outside blocks.
    """

    blocks: tuple[tuple[int, ...], ...]
    embeddings: tuple[int, ...]
    heads: tuple[int, ...]
    outer: int

    @cached_property
    def by_chunk(self) -> tuple[int, ...]:
        """Elements of all units of each chunk."""
        units = zip(self.blocks_by_chunk, self.embeddings, self.heads, strict=True)
        return tuple(sum(elements) for elements in units)

    @cached_property
    def blocks_by_chunk(self) -> tuple[int, ...]:
        """Elements of the blocks of each chunk."""
        return tuple(sum(blocks) for blocks in self.blocks)

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Number of blocks of each chunk."""
        return tuple(len(blocks) for blocks in self.blocks)

    @cached_property
    def block(self) -> int:
        """Elements of the largest block."""
        return max((max(blocks, default=0) for blocks in self.blocks), default=0)

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
        # Of the other blocks, one is used while the next is gathered.
        shared_slots = 2 if persistent_blocks < block_count else 0
        return (shared_slots + persistent_blocks) * self.block + self.outer

    def list_slot_units(
        self, persistent_blocks: int, itemsize: int, chunk_slots: Sequence[int] | None = None
    ) -> tuple[PlannedUnit, ...]:
        """Return the units that ZeRO-3 gathers, with their slots (parallel/slot_units.py).

        Args:
            persistent_blocks: parallel.zero3_keep_layers.
            itemsize: bytes of an element.
            chunk_slots: slot of each chunk if complete chunks are gathered (core/unit_slots.py), else None.
        """
        units = []
        if chunk_slots is not None:
            for chunk, (blocks, slot) in enumerate(zip(self.blocks, chunk_slots, strict=True)):
                # A buffer holds units in reverse order of the forward.
                elements = (self.heads[chunk], *reversed(blocks), self.embeddings[chunk])
                bucket_bytes = tuple(itemsize * count for count in elements if count)
                units.append(PlannedUnit(slot, bucket_bytes))
            return tuple(units)
        persistent = select_persistent_blocks(self.block_counts, persistent_blocks)
        block_elements = []  # of the blocks with matrices of each chunk
        block_persistence = []
        for blocks, is_persistent in zip(self.blocks, persistent, strict=True):
            block_elements.append([count for count in blocks if count])
            pairs = zip(is_persistent, blocks, strict=True)
            block_persistence.append([is_resident for is_resident, count in pairs if count])
        for blocks_of_chunk, slots in zip(block_elements, assign_block_slots(block_persistence), strict=True):
            for count, slot in zip(blocks_of_chunk, slots, strict=True):
                units.append(PlannedUnit(slot, (itemsize * count,)))
        for count in (*self.embeddings, *self.heads):
            if count:
                units.append(PlannedUnit(OUTER_SLOT, (itemsize * count,)))
        return tuple(units)

    def find_table_part(self, bucket_elements: int | None) -> int | None:
        """Return the elements of a part if ZeRO-2 divides a table's gradient by rows, else None."""
        return choose_table_part(self.outer, self.block, bucket_elements)

    def count_gradient_slots(self, table_part: int | None) -> int:
        """Return the elements of the gradient slots of ZeRO-2 and 3.

        Backward fills the slot of one block while the other slot is reduced. Both slots together hold the largest
        matrix outside blocks, or some of its parts.

        Args:
            table_part: elements of a part of a table; None if tables are not divided.
        """
        if table_part is None:
            return max(2 * self.block, self.outer)
        return max(2 * self.block, TABLE_PARTS * table_part)

    def count_wide_slots(self, table_part: int | None) -> int:
        """Return the elements of gradient slots in float32 if blocks have slots in bfloat16 only.

        Args:
            table_part: as for `count_gradient_slots`.
        """
        if table_part is None:
            return self.outer
        return TABLE_PARTS * table_part


def count_stage_units(model: ModelConfig, parallel: ParallelConfig, stage: int) -> UnitElements:
    """Return the elements of a stage's units on one tensor-parallel rank."""
    chunk_map = chunk_map_of(parallel)
    sums = _unit_sums(model, parallel.tensor, parallel.expert_ranks)
    outer = 0
    blocks_by_chunk = []
    embeddings = []
    heads = []
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
        embedding_tables: Sequence[LogicalTensor] = ()
        head_tables: Sequence[LogicalTensor] = ()
        # With expert ranks tables are resident, because their gradients are summed over the expert axis first.
        if position == 0 and not model.tied_embeddings and parallel.expert_ranks == 1:
            embedding_tables = embedding_tensors(model)
        if position == chunk_map.chunks - 1 and parallel.expert_ranks == 1:
            head_tables = head_tensors(model)
        embedding_elements = _count_unit_matrices(embedding_tables, parallel.tensor)
        head_elements = _count_unit_matrices(head_tables, parallel.tensor)
        outer = max([outer, *embedding_elements, *head_elements])
        blocks_by_chunk.append(tuple(blocks))
        embeddings.append(sum(embedding_elements))
        heads.append(sum(head_elements))
    return UnitElements(tuple(blocks_by_chunk), tuple(embeddings), tuple(heads), outer=outer)


def _count_unit_matrices(tables: Sequence[LogicalTensor], tensor: int) -> list[int]:
    """Return the elements on one of `tensor` ranks of each table that is a matrix of a unit."""
    return [prod(table.local_shape(tensor)) for table in tables if table.is_unit_matrix]


@lru_cache(maxsize=256)
def _unit_sums(model: ModelConfig, tensor: int, expert: int) -> LayerSums:
    """Return the sums of elements of units: matrices that are replicated along data-parallel axes only."""

    def count(tensors: Sequence[LogicalTensor]) -> int:
        units = [unit for unit in tensors if unit.is_unit_matrix and (expert == 1 or "expert" in unit.cuts)]
        return count_elements(units, tensor, expert)

    return sum_tensors(model, count)


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


def count_stage_state(model: ModelConfig, parallel: ParallelConfig, stage: int, optimizer: str) -> int:
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
