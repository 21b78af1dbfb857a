"""Plan of the process groups that the grid needs, and of the order in which ranks make them. Needs no torch.

If one rank made group A before group B and another rank made B before A, each would wait for the other. All ranks
therefore follow the same total order: kinds in the order of `list_group_axes`, then groups by their first rank. A cycle
of waits is then impossible without any barrier (MegaScale section 3.5, the carefully designed order).

The channels of pipeline edges are made in rounds of edges that share no stage: first all even edges, then all odd
edges. A chain of stages takes two or three rounds instead of one round per stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megascale.config.axes import AXES
from megascale.core.chunk_map import ChunkMap, make_chunk_map
from megascale.core.grid import Coordinate, Grid

DIRECTIONS = ("forward", "backward")
# Kinds of groups for reductions of optimizer state and loss weights, which not every configuration needs.
STATE_KINDS = ("stage", "state", "replica")


@dataclass(frozen=True)
class GroupSpec:
    """Members and purpose of one communicator.

    Attributes:
        kind: a key of `list_group_axes`, "embedding", or for a P2P channel "forward" or "backward".
        ranks: global ranks of the members, ascending. In a P2P channel the sender comes first.
    """

    kind: str
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name that is unique in the job: the kind with the first rank, or with both ranks of a P2P channel."""
        if self.kind in DIRECTIONS:
            return f"{self.kind}/{self.ranks[0]}-{self.ranks[1]}"
        return f"{self.kind}/{self.ranks[0]}"


def list_group_axes(has_copies: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the axes along which the members of a group differ, by kind, in the order in which groups are made.

    Args:
        has_copies: whether several ranks of a stage hold the same part of the state. If not, the group "state" would
            equal the group "stage" and is absent.
    """
    single_axis_kinds = {name: (name,) for name, axis in AXES.items() if axis.has_group}
    combined_kinds = {
        # Two communicators over the same ranks, so that gathering parameters and reducing gradients do not queue
        # behind each other.
        "data_gather": AXES.shards,
        "data_reduce": AXES.shards,
        "stage": AXES.stage,
    }
    if has_copies:
        combined_kinds["state"] = AXES.state
    if len(AXES.replica) > 1:
        combined_kinds["replica"] = AXES.replica
    return single_axis_kinds | combined_kinds


def plan_edge_rounds(edges: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Distribute directed pairs of stages over rounds, such that no stage occurs twice in a round."""
    rounds: list[list[tuple[int, int]]] = []
    for edge in edges:
        for round_edges in rounds:
            busy_stages = {stage for round_edge in round_edges for stage in round_edge}
            if busy_stages.isdisjoint(edge):
                round_edges.append(edge)
                break
        else:
            rounds.append([edge])
    return rounds


def plan_groups(grid: Grid, chunk_map: ChunkMap | None = None, tied: bool = False) -> list[GroupSpec]:
    """Return all groups of the job in the order in which ranks make them. Axes of size 1 have no group.

    Args:
        chunk_map: stage of each model chunk; default: one chunk per stage.
        tied: whether the stages of the model's first and last chunk share a tied embedding.
    """
    chunk_map = chunk_map or make_chunk_map(grid.pipeline, 1)
    plan = []
    for kind, axes in _list_axis_kinds(grid):
        plan += [GroupSpec(kind, tuple(ranks)) for ranks in grid.groups(axes)]
    # One coordinate for each set of ranks that form a pipeline together.
    pipelines = [grid.coordinate(ranks[0]) for ranks in grid.groups("pipeline")]
    if _has_embedding_group(chunk_map, tied):
        plan += [_make_embedding_spec(grid, chunk_map, pipeline_coordinate) for pipeline_coordinate in pipelines]
    for edges, direction in _list_channel_rounds(chunk_map):
        for edge in edges:
            plan += [_make_channel_spec(grid, edge, direction, coordinate) for coordinate in pipelines]
    return plan


def plan_rank_groups(grid: Grid, rank: int, chunk_map: ChunkMap | None = None, tied: bool = False) -> list[GroupSpec]:
    """Return the groups of one rank, in the order of `plan_groups`, without planning the groups of other ranks."""
    chunk_map = chunk_map or make_chunk_map(grid.pipeline, 1)
    coordinate = grid.coordinate(rank)
    stage = coordinate.pipeline
    specs = [GroupSpec(kind, tuple(grid.group(axes, rank))) for kind, axes in _list_axis_kinds(grid)]
    if _has_embedding_group(chunk_map, tied) and stage in chunk_map.end_stages:
        specs.append(_make_embedding_spec(grid, chunk_map, coordinate))
    for edges, direction in _list_channel_rounds(chunk_map):
        specs += [_make_channel_spec(grid, edge, direction, coordinate) for edge in edges if stage in edge]
    return specs


def _list_axis_kinds(grid: Grid) -> list[tuple[str, tuple[str, ...]]]:
    """Return the kinds of groups that have more than one member, each with its axes."""
    axes_by_kind = list_group_axes(has_copies=grid.count(AXES.copies) > 1)
    kinds = [(kind, axes) for kind, axes in axes_by_kind.items() if grid.count(axes) > 1]
    # If one axis with its own group has all ranks of a replica, a group for replicas would be the same group again.
    if find_replica_axis(grid) is not None:
        return [(kind, axes) for kind, axes in kinds if kind != "replica"]
    return kinds


def find_replica_axis(grid: Grid) -> str | None:
    """Return the axis whose group contains exactly the ranks of a replica, or None if a replica spans several axes.

    If each replica is one rank, return "tensor", an axis of size 1 whose group would be that rank.
    """
    axes = [name for name in AXES.replica if grid.size(name) > 1]
    if not axes:
        return "tensor"
    if len(axes) == 1 and AXES[axes[0]].has_group:
        return axes[0]
    return None


def _has_embedding_group(chunk_map: ChunkMap, tied: bool) -> bool:
    """Return True if the first and the last chunk share an embedding and are on different stages."""
    return tied and len(chunk_map.end_stages) > 1


def _make_embedding_spec(grid: Grid, chunk_map: ChunkMap, coordinate: Coordinate) -> GroupSpec:
    """Return the group of the end stages of the pipeline to which `coordinate` belongs."""
    ranks = [grid.rank(coordinate.move(pipeline=stage)) for stage in chunk_map.end_stages]
    return GroupSpec("embedding", tuple(sorted(ranks)))


def _list_channel_rounds(chunk_map: ChunkMap) -> Iterator[tuple[list[tuple[int, int]], str]]:
    """Yield the edges of each round with "forward", then the same edges with "backward"."""
    for edges in plan_edge_rounds(chunk_map.edges()):
        for direction in DIRECTIONS:
            yield edges, direction


def _make_channel_spec(grid: Grid, edge: tuple[int, int], direction: str, coordinate: Coordinate) -> GroupSpec:
    """Return the channel of an edge in the pipeline to which `coordinate` belongs.

    An edge is a pair of stages in the direction of the activations. Gradients go the other way.
    """
    source, target = edge
    if direction == "backward":
        source, target = target, source
    sender = grid.rank(coordinate.move(pipeline=source))
    receiver = grid.rank(coordinate.move(pipeline=target))
    return GroupSpec(direction, (sender, receiver))
