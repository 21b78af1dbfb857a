"""Placement of model chunks on pipeline stages. Pure functions, no torch.

A model is divided into p v chunks, and each of the p stages holds v chunks. The placement, a part of the schedule, maps
a chunk's position in the model to its stage. If two neighbouring chunks are on one stage, the second takes the result
of the first. All other neighbours exchange messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

# Maps (position of a chunk in the model, number of stages) to the chunk's stage.
Placement = Callable[[int, int], int]


def round_robin(position: int, stages: int) -> int:
    """Return the stage of a chunk if the chunks are dealt to stages 0 to p-1 in turn, v times."""
    return position % stages


def v_shape(position: int, stages: int) -> int:
    """Return the stage of a chunk if the chunks are dealt to stages 0 to p-1, then to stages p-1 to 0, and so on.

    With two chunks per stage, stage s holds chunks s and 2p-1-s: the first stage holds both ends of the model.
    """
    round_index, index_in_round = divmod(position, stages)
    if round_index % 2:
        return stages - 1 - index_in_round
    return index_in_round


@dataclass(frozen=True)
class ChunkMap:
    """Stage of each model chunk. On a stage, chunks are numbered 0 to v-1 in model order.

    Attributes:
        stages: p, number of pipeline stages.
        stage_of: the stage of each chunk, in model order.
    """

    stages: int
    stage_of: tuple[int, ...]

    def __post_init__(self) -> None:
        chunk_counts = np.bincount(self.stage_of, minlength=self.stages)
        if len(chunk_counts) != self.stages or (chunk_counts != chunk_counts[0]).any():
            raise ValueError(
                f"stages hold {chunk_counts.tolist()} chunks; give each of the {self.stages} stages the same number"
            )

    @property
    def chunks(self) -> int:
        """Number of model chunks over all stages."""
        return len(self.stage_of)

    @property
    def virtual_stages(self) -> int:
        """v, number of chunks per stage."""
        return len(self.stage_of) // self.stages

    @property
    def first_stage(self) -> int:
        """Stage of the model's first chunk, which has the embedding."""
        return self.stage_of[0]

    @property
    def last_stage(self) -> int:
        """Stage of the model's last chunk, which has the logits."""
        return self.stage_of[-1]

    @property
    def end_stages(self) -> frozenset[int]:
        """Stages that read tokens: those of the model's first and last chunk."""
        return frozenset((self.first_stage, self.last_stage))

    @cached_property
    def positions(self) -> np.ndarray:
        """Position in the model of each stage's chunks: [p, v]."""
        return np.argsort(np.array(self.stage_of), kind="stable").reshape(self.stages, -1)

    @cached_property
    def indices(self) -> np.ndarray:
        """Index of each model chunk on its stage, 0 to v-1, in model order: [p v]."""
        indices = np.empty(self.chunks, dtype=np.int64)
        indices[self.positions] = np.arange(self.virtual_stages)
        return indices

    def stage_chunks(self, stage: int) -> list[int]:
        """Return the positions in the model of a stage's chunks."""
        positions: list[int] = self.positions[stage].tolist()
        return positions

    def neighbour(self, stage: int, chunk: int, offset: int) -> tuple[int, int] | None:
        """Return (stage, chunk) of the neighbour `offset` positions after a stage's chunk; None if there is none."""
        position = int(self.positions[stage, chunk]) + offset
        if not 0 <= position < self.chunks:
            return None
        return self.stage_of[position], int(self.indices[position])

    def edges(self) -> list[tuple[int, int]]:
        """Return the pairs of stages (source, target) between which activations are sent, in model order."""
        pairs = zip(self.stage_of[:-1], self.stage_of[1:], strict=True)
        return list(dict.fromkeys((source, target) for source, target in pairs if source != target))


@lru_cache(maxsize=64)
def make_chunk_map(stages: int, virtual_stages: int, placement: Placement = round_robin) -> ChunkMap:
    """Return the map of p v chunks. Raises ValueError if a placement gives stages different numbers of chunks."""
    return ChunkMap(stages, tuple(placement(position, stages) for position in range(stages * virtual_stages)))
