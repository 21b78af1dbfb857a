"""Which layers each model chunk holds: balanced by cost, or as the user says.

A chunk may begin or end within a layer, between its attention and its MLP, where the block lets it (BlockInventory
`divides`): with few layers a stage, half a layer more or less is what evens out stages of which one has the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Literal

from megascale.config import ModelConfig, ParallelConfig
from megascale.core.flops import flops_per_token
from megascale.core.inventory import BLOCK_PARTS
from megascale.errors import FitError

Half = Literal["both", "attention", "mlp"]


@dataclass(frozen=True)
class ChunkLayers:
    """The layers of a chunk, counted in halves: half 2 i is layer i's attention with its norm, half 2 i + 1 its MLP.

    Attributes:
        first, stop: from which half up to which.
    """

    first: int
    stop: int

    @classmethod
    def from_range(cls, layers: range) -> ChunkLayers:
        """Whole layers."""
        return cls(2 * layers.start, 2 * max(layers.start, layers.stop))

    def __iter__(self) -> Iterator[tuple[int, Half]]:
        """Each layer, 0-based, and what of it is here."""
        for layer in range(self.first // 2, (self.stop + 1) // 2 if self.stop > self.first else 0):
            begins, ends = 2 * layer >= self.first, 2 * layer + 2 <= self.stop
            yield layer, "both" if begins and ends else "attention" if begins else "mlp"

    @property
    def attentions(self) -> int:
        """Layers whose attention is here."""
        return (self.stop + 1) // 2 - (self.first + 1) // 2

    @property
    def mlps(self) -> int:
        """Layers whose MLP is here."""
        return self.stop // 2 - self.first // 2

    @property
    def layer_count(self) -> int | float:
        """Layers, half of one as 0.5."""
        halves = self.stop - self.first
        return halves / 2 if halves % 2 else halves // 2


def split_layers(
    layers: int,
    chunks: int,
    embedding_cost: float = 0.0,
    logits_cost: float = 0.0,
    stages: int | None = None,
    explicit: Sequence[int | float] | None = None,
) -> list[int | float]:
    """Number of layers of each chunk, in model order.

    Fills the stage with the least work first (a stage's work per micro-batch bounds the steady phase), then
    evens out the chunks of each stage. On ties the later stage takes the layer, because earlier stages hold more
    micro-batches in flight. Every chunk gets at least one layer unless `explicit` says otherwise.

    Args:
        layers: transformer blocks in the model.
        chunks: stages x chunks a stage; chunk g lies on stage g mod stages.
        embedding_cost, logits_cost: work of the embedding (first chunk) and the logits (last), in layers.
        stages: pipeline stages; default: one chunk a stage.
        explicit: the user's own split, checked and returned; it may divide layers into halves.

    Raises FitError if there are fewer layers than chunks or `explicit` does not add up.
    """
    stages = chunks if stages is None else stages
    if explicit is not None:
        return _checked(list(explicit), layers, chunks)
    virtual = chunks // stages
    if layers < chunks:
        raise FitError(
            f"model.layers={layers} cannot fill parallel.pipeline={stages} x parallel.virtual_stages={virtual} "
            f"= {chunks} model chunks with a layer each; use at most {layers} chunks or give parallel.layer_split"
        )
    extra = [[0.0] * virtual for _ in range(stages)]
    extra[0][0] += embedding_cost
    extra[-1][-1] += logits_cost
    counts = [virtual] * stages
    added = [sum(cost) for cost in extra]
    load = [(counts[s] + added[s], -s) for s in range(stages)]
    heapify(load)
    for _ in range(layers - chunks):
        s = -load[0][1]
        counts[s] += 1
        heapreplace(load, (counts[s] + added[s], -s))
    split: list[int | float] = [0] * chunks
    for s in range(stages):
        own = [1] * virtual
        lightest = [(own[c] + extra[s][c], -c) for c in range(virtual)]
        heapify(lightest)
        for _ in range(counts[s] - virtual):
            c = -lightest[0][1]
            own[c] += 1
            heapreplace(lightest, (own[c] + extra[s][c], -c))
        for c in range(virtual):
            split[c * stages + s] = own[c]
    return split


def _checked(split: list[int | float], layers: int, chunks: int) -> list[int | float]:
    if len(split) != chunks:
        raise FitError(
            f"parallel.layer_split={split} has {len(split)} entries for {chunks} model chunks "
            f"(parallel.pipeline x parallel.virtual_stages); give one count a chunk, in model order"
        )
    if any(2 * count % 1 for count in split):
        raise FitError(
            f"parallel.layer_split={split} divides layers where they have no boundary; give whole numbers, or halves "
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
            "first (it has the embedding) and the last (it has the logits) may do without layers"
        )
    return split


def chunk_layers(model: ModelConfig, parallel: ParallelConfig) -> list[ChunkLayers]:
    """The layers of each model chunk, in model order; chunk g lies on stage g mod parallel.pipeline.

    Logits weigh as their share of FLOPs; the embedding look-up costs next to nothing. FitError as split_layers, and
    where a block that is one piece would be divided.
    """
    count = flops_per_token(model)
    logits = count.logits / ((count.forward - count.logits) / model.layers)
    chunks = parallel.pipeline * parallel.virtual_stages
    explicit = None if parallel.layer_split is None else tuple(parallel.layer_split)
    found = _chunks(model.layers, chunks, logits, parallel.pipeline, explicit)
    if not BLOCK_PARTS[model.block].divides and any(chunk.stop % 2 for chunk in found):
        raise FitError(
            f"parallel.layer_split={parallel.layer_split} puts a layer's attention and its MLP into different chunks, "
            f"and a block of model.block={model.block} is one piece; give whole numbers, or --model.block=serial"
        )
    return list(found)


@lru_cache(maxsize=64)
def _chunks(
    layers: int, chunks: int, logits: float, stages: int, explicit: tuple[int | float, ...] | None
) -> tuple[ChunkLayers, ...]:
    """Kept, as the memory of every stage asks for it again."""
    split = [round(2 * count) for count in split_layers(layers, chunks, 0.0, logits, stages, explicit)]
    return tuple(ChunkLayers(stop - n, stop) for stop, n in zip(accumulate(split), split, strict=True))
