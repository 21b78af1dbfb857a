"""The groups that the grid needs, in the one order in which every rank makes its own: pure data, no torch.

Two ranks that both belong to groups A and B meet in A first or in B first, and must agree, or each waits for the
other. Here every rank follows the same total order (kinds in the order of `AXIS_KINDS`, then by first rank), which
makes a cycle of waits impossible without any barrier (MegaScale section 3.5, the carefully designed order).

Pipeline edges are made in colours: first every even edge at once, then every odd edge, so that a chain of stages
costs two or three rounds instead of one round per stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from megascale.core.chunk_map import ChunkMap, make_chunk_map
from megascale.core.grid import Coordinate, Grid

# Groups along axes: kind -> axes that vary inside the group.
AXIS_KINDS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "data_gather": ("data",),
    "data_reduce": ("data",),
    "model": ("tensor", "pipeline"),
    "stage": ("tensor", "data"),
}
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class GroupSpec:
    """Members and purpose of one communicator.

    Attributes:
        kind: tensor, data_gather, data_reduce, model, stage, embedding, forward or backward.
        ranks: members, ascending, except in a P2P channel, which has the sender first.
    """

    kind: str
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name that is unique in the job: groups of one kind differ in their first rank, P2P channels in their pair."""
        if self.kind in DIRECTIONS:
            return f"{self.kind}/{self.ranks[0]}-{self.ranks[1]}"
        return f"{self.kind}/{self.ranks[0]}"


def edge_rounds(edges: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return directed stage pairs in rounds; no stage is twice in a round."""
    rounds: list[list[tuple[int, int]]] = []
    for edge in edges:
        for round_ in rounds:
            if not any(stage in other for other in round_ for stage in edge):
                round_.append(edge)
                break
        else:
            rounds.append([edge])
    return rounds


def plan_groups(grid: Grid, chunk_map: ChunkMap | None = None, tied: bool = False) -> list[GroupSpec]:
    """Return every group of the job in the fixed order. Axes of size 1 need no communication and have no group.

    Args:
        chunk_map: stage of each model chunk; default: one chunk per stage.
        tied: whether the stages of the model's first and last chunk share a tied embedding.
    """
    chunk_map = chunk_map or make_chunk_map(grid.pipeline, 1)
    plan = [GroupSpec(kind, tuple(ranks)) for kind, axes in _axis_kinds(grid) for ranks in grid.groups(axes)]
    columns = [(data, tensor) for data in range(grid.data) for tensor in range(grid.tensor)]
    if _has_embedding_group(chunk_map, tied):
        plan += [_embedding_spec(grid, chunk_map, data, tensor) for data, tensor in columns]
    for edges, direction in _channel_rounds(chunk_map):
        plan += [_channel(grid, edge, direction, data, tensor) for edge in edges for data, tensor in columns]
    return plan


def rank_groups(grid: Grid, rank: int, chunk_map: ChunkMap | None = None, tied: bool = False) -> list[GroupSpec]:
    """Return the groups of one rank as `plan_groups` lists them, without building the groups of other ranks."""
    chunk_map = chunk_map or make_chunk_map(grid.pipeline, 1)
    coordinate = grid.coordinate(rank)
    data, tensor, stage = coordinate.data, coordinate.tensor, coordinate.pipeline
    specs = [GroupSpec(kind, tuple(grid.group(axes, rank))) for kind, axes in _axis_kinds(grid)]
    if _has_embedding_group(chunk_map, tied) and stage in chunk_map.end_stages:
        specs.append(_embedding_spec(grid, chunk_map, data, tensor))
    for edges, direction in _channel_rounds(chunk_map):
        specs += [_channel(grid, edge, direction, data, tensor) for edge in edges if stage in edge]
    return specs


def _axis_kinds(grid: Grid) -> list[tuple[str, tuple[str, ...]]]:
    """Return the kinds of groups along axes that have more than one member."""
    return [(kind, axes) for kind, axes in AXIS_KINDS.items() if prod(grid.size(axis) for axis in axes) > 1]


def _has_embedding_group(chunk_map: ChunkMap, tied: bool) -> bool:
    return tied and len(chunk_map.end_stages) > 1


def _embedding_spec(grid: Grid, chunk_map: ChunkMap, data: int, tensor: int) -> GroupSpec:
    first = grid.rank(Coordinate(chunk_map.first_stage, data, tensor))
    last = grid.rank(Coordinate(chunk_map.last_stage, data, tensor))
    return GroupSpec("embedding", tuple(sorted((first, last))))


def _channel_rounds(chunk_map: ChunkMap) -> Iterator[tuple[list[tuple[int, int]], str]]:
    for edges in edge_rounds(chunk_map.edges()):
        for direction in DIRECTIONS:
            yield edges, direction


def _channel(grid: Grid, edge: tuple[int, int], direction: str, data: int, tensor: int) -> GroupSpec:
    source, target = edge if direction == "forward" else edge[::-1]
    sender = grid.rank(Coordinate(source, data, tensor))
    return GroupSpec(direction, (sender, grid.rank(Coordinate(target, data, tensor))))
