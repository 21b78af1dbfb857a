"""Assignment of layers to model chunks, balanced by cost or set by the user.

A model chunk is a sequence of layers; a pipeline stage has one or more chunks. A chunk may begin or end within a layer,
between attention and MLP, if the block allows it (`BlockInventory.can_split`). If stages have few layers and the last
stage has the logits, moving half a layer balances the stages better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Literal

from megascale.config import ModelConfig, ParallelConfig
from megascale.core.chunk_map import ChunkMap, make_chunk_map
from megascale.core.flops import flops_per_token
from megascale.core.part_inventories import BLOCK_PARTS
from megascale.core.schedule_registry import chunk_map_of
from megascale.errors import FitError

Half = Literal["both", "attention", "mlp"]


@dataclass(frozen=True)
class ChunkLayers:
    """Layers of a chunk, as a range of halves: half 2 i is layer i's attention with its norm, half 2 i + 1 its MLP.

    Attributes:
        first_half, stop_half: first half, and the half after the last one.
    """

    first_half: int
    stop_half: int

    @classmethod
    def from_range(cls, layers: range) -> ChunkLayers:
        """Return a chunk of whole layers."""
        return cls(2 * layers.start, 2 * max(layers.start, layers.stop))

    def __iter__(self) -> Iterator[tuple[int, Half]]:
        """Yield (index of the layer in the model, half of the layer that the chunk has) for each layer."""
        if self.stop_half <= self.first_half:
            return
        for layer in range(self.first_half // 2, (self.stop_half + 1) // 2):
            has_attention = 2 * layer >= self.first_half
            has_mlp = 2 * layer + 2 <= self.stop_half
            if has_attention and has_mlp:
                yield layer, "both"
            else:
                yield layer, "attention" if has_attention else "mlp"

    @property
    def layer_count(self) -> int | float:
        """Number of layers; half a layer counts 0.5."""
        half_count = self.stop_half - self.first_half
        return half_count / 2 if half_count % 2 else half_count // 2


@dataclass(frozen=True)
class LayerSums:
    """A quantity of each layer of a model, such as parameters or bytes, prepared for sums over chunks.

    Attributes:
        running: sums over the first 0, 1, ... whole layers of the model.
        attention, mlp: quantity of each layer's attention alone and of its MLP alone, for divided layers.
    """

    running: tuple[float, ...]
    attention: tuple[float, ...]
    mlp: tuple[float, ...]

    @classmethod
    def collect(cls, quantities: Sequence[tuple[float, float, float]]) -> LayerSums:
        """Make the sums from the quantities of each layer: (of the whole layer, of its attention, of its MLP)."""
        layers, attention, mlp = zip(*quantities, strict=True)
        return cls(tuple(accumulate(layers, initial=0)), attention, mlp)

    def of_chunk(self, layers: ChunkLayers) -> float:
        """Return the sum over the layers of a chunk."""
        if layers.stop_half <= layers.first_half:
            return 0
        # The whole layers of the chunk are those from `first` to `stop`, without `stop`.
        first = (layers.first_half + 1) // 2
        stop = layers.stop_half // 2
        total = self.running[max(first, stop)] - self.running[first]
        if layers.first_half % 2:
            total += self.mlp[first - 1]
        if layers.stop_half % 2:
            total += self.attention[stop]
        return total


def split_layers(
    layers: int,
    chunks: int,
    embedding_cost: float = 0.0,
    logits_cost: float = 0.0,
    chunk_map: ChunkMap | None = None,
    explicit: Sequence[int | float] | None = None,
) -> list[int | float]:
    """Return the number of layers of each chunk, in model order.

    Each layer goes to the stage with the least work so far, because the stage with the most work bounds the steady
    phase. On ties the later stage gets the layer, because earlier stages hold more micro-batches in flight. A stage's
    layers are distributed over its chunks in the same way. Without `explicit`, every chunk gets at least one layer.

    Args:
        chunks: number of chunks over all stages.
        embedding_cost, logits_cost: work of the embedding (first chunk) and of the logits (last chunk), as a multiple
            of a layer's work.
        chunk_map: the stage of each chunk; default: one chunk per stage.
        explicit: parallel.layer_split, which is checked and returned; it may divide layers into halves.

    Raises FitError if there are fewer layers than chunks or `explicit` does not add up.
    """
    if explicit is not None:
        return _check_split(list(explicit), layers, chunks)
    chunk_map = chunk_map or make_chunk_map(chunks, 1)
    stages, virtual_stages = chunk_map.stages, chunk_map.virtual_stages
    if layers < chunks:
        raise FitError(
            f"model.layers={layers} cannot fill parallel.pipeline={stages} x parallel.virtual_stages={virtual_stages} "
            f"= {chunks} model chunks with a layer each; use at most {layers} chunks or give parallel.layer_split"
        )
    extra_costs = [[0.0] * virtual_stages for _ in range(stages)]  # by stage and chunk, work besides layers
    extra_costs[chunk_map.first_stage][0] += embedding_cost
    extra_costs[chunk_map.last_stage][-1] += logits_cost
    stage_counts = _balance(layers, [sum(costs) for costs in extra_costs], minimum=virtual_stages)
    split: list[int | float] = [0] * chunks
    for stage, count in enumerate(stage_counts):
        chunk_counts = _balance(count, extra_costs[stage], minimum=1)
        for position, chunk_count in zip(chunk_map.stage_chunks(stage), chunk_counts, strict=True):
            split[position] = chunk_count
    return split


def _balance(layers: int, extra_costs: Sequence[float], minimum: int) -> list[int]:
    """Return the number of layers of each bin, at least `minimum`, such that all bins have about the same load.

    Args:
        extra_costs: load of each bin besides its layers, in layers.
    """
    counts = [minimum] * len(extra_costs)
    # A heap of (load, negative index), so that on ties the later bin comes first.
    loads = [(minimum + cost, -index) for index, cost in enumerate(extra_costs)]
    heapify(loads)
    for _ in range(layers - minimum * len(counts)):
        lightest = -loads[0][1]
        counts[lightest] += 1
        heapreplace(loads, (counts[lightest] + extra_costs[lightest], -lightest))
    return counts


def _check_split(split: list[int | float], layers: int, chunks: int) -> list[int | float]:
    """Return parallel.layer_split. Raises FitError if it does not fit the model or the chunks."""
    if len(split) != chunks:
        raise FitError(
            f"parallel.layer_split={split} has {len(split)} entries for {chunks} model chunks "
            f"(parallel.pipeline x parallel.virtual_stages); give one count per chunk, in model order"
        )
    if any(not float(2 * count).is_integer() for count in split):
        raise FitError(
            f"parallel.layer_split={split} divides layers at points without a boundary; give whole numbers, or halves "
            "(2.5), which end a chunk between a layer's attention and its MLP"
        )
    if min(split) < 0 or sum(split) != layers:
        raise FitError(
            f"parallel.layer_split={split} adds up to {sum(split)} layers, but model.layers={layers}; "
            "give counts of at least 0 that add up to it"
        )
    if min(split[1:-1], default=1) == 0:
        raise FitError(
            f"parallel.layer_split={split} leaves model chunk {split.index(0, 1)} with nothing to compute; only the "
            "first (it has the embedding) and the last (it has the logits) may have no layers"
        )
    return split


def assign_layers(model: ModelConfig, parallel: ParallelConfig) -> list[ChunkLayers]:
    """Return the layers of each model chunk, in model order.

    The logits' work is taken from their FLOPs, and the embedding look-up counts as no work. Raises the FitError of
    `split_layers`, and FitError if the split would divide a block that cannot be divided.
    """
    flops = flops_per_token(model)
    logits_cost = flops.logits / ((flops.forward - flops.logits) / model.layers)
    if parallel.layer_split is None:
        explicit = None
    else:
        explicit = tuple(parallel.layer_split)
    chunks = _make_chunks(model.layers, chunk_map_of(parallel), logits_cost, explicit)
    if not BLOCK_PARTS[model.block].can_split and any(chunk.stop_half % 2 for chunk in chunks):
        raise FitError(
            f"parallel.layer_split={parallel.layer_split} puts a layer's attention and its MLP into different chunks, "
            f"and a block of model.block={model.block} cannot be divided; give whole numbers, or --model.block=serial"
        )
    return list(chunks)


def assign_stage_layers(model: ModelConfig, parallel: ParallelConfig, stage: int) -> list[ChunkLayers]:
    """Return the layers of each chunk of a stage, chunk 0 first. Raises the errors of `assign_layers`."""
    layers = assign_layers(model, parallel)
    return [layers[position] for position in chunk_map_of(parallel).stage_chunks(stage)]


# Cached because the memory estimate of every stage asks for the same split.
@lru_cache(maxsize=64)
def _make_chunks(
    layers: int, chunk_map: ChunkMap, logits_cost: float, explicit: tuple[int | float, ...] | None
) -> tuple[ChunkLayers, ...]:
    """Return the layers of each model chunk; arguments are those of `split_layers`."""
    split = split_layers(layers, chunk_map.chunks, logits_cost=logits_cost, chunk_map=chunk_map, explicit=explicit)
    half_counts = [round(2 * layer_count) for layer_count in split]
    chunks = []
    for stop_half, half_count in zip(accumulate(half_counts), half_counts, strict=True):
        chunks.append(ChunkLayers(stop_half - half_count, stop_half))
    return tuple(chunks)
