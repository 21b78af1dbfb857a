"""Which layers each model chunk holds: balanced by cost, or as the user says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate

from megascale.config import ModelConfig, ParallelConfig
from megascale.core.flops import flops_per_token
from megascale.errors import FitError


def split_layers(
    layers: int,
    chunks: int,
    embedding_cost: float = 0.0,
    logits_cost: float = 0.0,
    stages: int | None = None,
    explicit: Sequence[int] | None = None,
) -> list[int]:
    """Number of layers of each chunk, in model order.

    Fills the stage with the least work first (a stage's work per micro-batch bounds the steady phase), then
    evens out the chunks of each stage. On ties the later stage takes the layer, because earlier stages hold more
    micro-batches in flight. Every chunk gets at least one layer unless `explicit` says otherwise.

    Args:
        layers: transformer blocks in the model.
        chunks: stages x chunks a stage; chunk g lies on stage g mod stages.
        embedding_cost, logits_cost: work of the embedding (first chunk) and the logits (last), in layers.
        stages: pipeline stages; default: one chunk a stage.
        explicit: the user's own split, checked and returned.

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
    split = [0] * chunks
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


def _checked(split: list[int], layers: int, chunks: int) -> list[int]:
    if len(split) != chunks:
        raise FitError(
            f"parallel.layer_split={split} has {len(split)} entries for {chunks} model chunks "
            f"(parallel.pipeline x parallel.virtual_stages); give one count a chunk, in model order"
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


def chunk_layers(model: ModelConfig, parallel: ParallelConfig) -> list[range]:
    """The layers (0-based) of each model chunk, in model order; chunk g lies on stage g mod parallel.pipeline.

    Logits weigh as their share of FLOPs; the embedding look-up costs next to nothing. FitError as split_layers.
    """
    count = flops_per_token(model)
    logits = count.logits / ((count.forward - count.logits) / model.layers)
    chunks = parallel.pipeline * parallel.virtual_stages
    explicit = None if parallel.layer_split is None else tuple(parallel.layer_split)
    return list(_ranges(model.layers, chunks, logits, parallel.pipeline, explicit))


@lru_cache(maxsize=64)
def _ranges(
    layers: int, chunks: int, logits: float, stages: int, explicit: tuple[int, ...] | None
) -> tuple[range, ...]:
    """Kept, as the memory of every stage asks for it again."""
    split = split_layers(layers, chunks, 0.0, logits, stages, explicit)
    return tuple(range(stop - n, stop) for stop, n in zip(accumulate(split), split, strict=True))
