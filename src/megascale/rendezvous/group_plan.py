"""The groups that the grid needs, in the one order in which every rank makes its own: pure data, no torch.

Two ranks that both belong to groups A and B meet in A first or in B first, and must agree, or each waits for the
other. Here every rank follows the same total order (kinds in the order of `group_axes`, then by first rank), which
makes a cycle of waits impossible without any barrier (MegaScale section 3.5, the carefully designed order).

Pipeline edges are made in colours: first every even edge at once, then every odd edge, so that a chain of stages
costs two or three rounds instead of one round per stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megascale.config.axes import AXES
from megascale.core.chunk_map import ChunkMap, make_chunk_map
from megascale.core.grid import Coordinate, Grid

DIRECTIONS = ("forward", "backward")
# Groups that the update of some optimizers uses, and loss weights.
STATE_KINDS = ("stage", "state", "replica")


@dataclass(frozen=True)
class GroupSpec:
    """Members and purpose of one communicator.

    Attributes:
        kind: a key of `group_axes`, embedding, forward or backward.
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


def group_axes(has_copies: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the axes that vary inside each kind of group, in the order in which groups are made.

    Args:
        has_copies: whether ranks hold copies of the state. Otherwise the ranks of a stage hold one together.
    """
    own_groups = {name: (name,) for name, facts in AXES.items() if facts.has_group}
    shared_groups = {
        # Two communicators over the same ranks, so that gathering parameters and reducing gradients do not queue
        # behind each other.
        "data_gather": AXES.shards,
        "data_reduce": AXES.shards,
        "stage": AXES.stage,
    }
    if has_copies:
        shared_groups["state"] = AXES.state
    if len(AXES.replica) > 1:
        shared_groups["replica"] = AXES.replica
    return own_groups | shared_groups


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
    columns = [grid.coordinate(ranks[0]) for ranks in grid.groups("pipeline")]
    if _has_embedding_group(chunk_map, tied):
        plan += [_embedding_spec(grid, chunk_map, column) for column in columns]
    for edges, direction in _channel_rounds(chunk_map):
        plan += [_channel(grid, edge, direction, column) for edge in edges for column in columns]
    return plan


def rank_groups(grid: Grid, rank: int, chunk_map: ChunkMap | None = None, tied: bool = False) -> list[GroupSpec]:
    """Return the groups of one rank as `plan_groups` lists them, without building the groups of other ranks."""
    chunk_map = chunk_map or make_chunk_map(grid.pipeline, 1)
    coordinate = grid.coordinate(rank)
    stage = coordinate.pipeline
    specs = [GroupSpec(kind, tuple(grid.group(axes, rank))) for kind, axes in _axis_kinds(grid)]
    if _has_embedding_group(chunk_map, tied) and stage in chunk_map.end_stages:
        specs.append(_embedding_spec(grid, chunk_map, coordinate))
    for edges, direction in _channel_rounds(chunk_map):
        specs += [_channel(grid, edge, direction, coordinate) for edge in edges if stage in edge]
    return specs


def _axis_kinds(grid: Grid) -> list[tuple[str, tuple[str, ...]]]:
    """Return the kinds of groups along axes that have more than one member."""
    axes_by_kind = group_axes(has_copies=grid.count(AXES.copies) > 1)
    kinds = [(kind, axes) for kind, axes in axes_by_kind.items() if grid.count(axes) > 1]
    if find_replica_axis(grid) is not None:
        return [(kind, axes) for kind, axes in kinds if kind != "replica"]
    return kinds


def find_replica_axis(grid: Grid) -> str | None:
    """Return the axis with a group of its own that has all ranks of a replica, or None."""
    axes = [name for name in AXES.replica if grid.size(name) > 1]
    if not axes:
        return "tensor"
    if len(axes) == 1 and AXES[axes[0]].has_group:
        return axes[0]
    return None


def _has_embedding_group(chunk_map: ChunkMap, tied: bool) -> bool:
    return tied and len(chunk_map.end_stages) > 1


def _embedding_spec(grid: Grid, chunk_map: ChunkMap, column: Coordinate) -> GroupSpec:
    ranks = [grid.rank(column.move(pipeline=stage)) for stage in chunk_map.end_stages]
    return GroupSpec("embedding", tuple(sorted(ranks)))


def _channel_rounds(chunk_map: ChunkMap) -> Iterator[tuple[list[tuple[int, int]], str]]:
    for edges in edge_rounds(chunk_map.edges()):
        for direction in DIRECTIONS:
            yield edges, direction


def _channel(grid: Grid, edge: tuple[int, int], direction: str, column: Coordinate) -> GroupSpec:
    source, target = edge if direction == "forward" else edge[::-1]
    return GroupSpec(direction, (grid.rank(column.move(pipeline=source)), grid.rank(column.move(pipeline=target))))
