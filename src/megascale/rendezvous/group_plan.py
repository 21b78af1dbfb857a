"""The groups that the grid needs, in the one order in which every rank makes its own: pure data, no torch.

Two ranks that both belong to groups A and B meet in A first or in B first, and must agree, or each waits for the
other. Here every rank follows the same total order (kinds in the order of `group_axes`, then by first rank), which
makes a cycle of waits impossible without any barrier (MegaScale section 3.5, the carefully designed order).

Pipeline edges are made in colours: first every even edge at once, then every odd edge, so that a chain of stages
costs two or three rounds instead of one round per stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megascale.config.axes import AXES
from megascale.core.grid import Coordinate, Grid

DIRECTIONS = ("forward", "backward")


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


def group_axes() -> dict[str, tuple[str, ...]]:
    """Return the axes that vary inside each kind of group, in the order in which groups are made."""
    own_groups = {name: (name,) for name, facts in AXES.items() if facts.has_group}
    shared_groups = {
        # Two communicators over the same ranks, so that gathering parameters and reducing gradients do not queue
        # behind each other.
        "data_gather": AXES.shards,
        "data_reduce": AXES.shards,
        "model": AXES.model,
        "stage": AXES.stage,
    }
    if len(AXES.replica) > 1:
        shared_groups["replica"] = AXES.replica
    return own_groups | shared_groups


def edge_rounds(stages: int, ring: bool) -> list[list[tuple[int, int]]]:
    """Return directed stage pairs (i, i + 1) in rounds; no stage is twice in a round. `ring` adds (stages - 1, 0)."""
    if stages < 2:
        return []
    chain = [(stage, stage + 1) for stage in range(stages - 1)]
    rounds = [chain[0::2], chain[1::2]]
    if ring:
        closing_edge = (stages - 1, 0)
        # An even cycle takes two colours, an odd one three; two stages have met in (0, 1).
        if stages % 2 == 0:
            rounds[1].append(closing_edge)
        else:
            rounds.append([closing_edge])
    return [edges for edges in rounds if edges]


def plan_groups(grid: Grid, virtual_stages: int = 1, tied: bool = False) -> list[GroupSpec]:
    """Return every group of the job in the fixed order. Axes of size 1 need no communication and have no group."""
    plan = [GroupSpec(kind, tuple(ranks)) for kind, axes in _axis_kinds(grid) for ranks in grid.groups(axes)]
    columns = [grid.coordinate(ranks[0]) for ranks in grid.groups("pipeline")]
    if _has_embedding_group(grid, tied):
        plan += [_embedding_spec(grid, column) for column in columns]
    for edges, direction in _channel_rounds(grid, virtual_stages):
        plan += [_channel(grid, edge, direction, column) for edge in edges for column in columns]
    return plan


def rank_groups(grid: Grid, rank: int, virtual_stages: int = 1, tied: bool = False) -> list[GroupSpec]:
    """Return the groups of one rank as `plan_groups` lists them, without building the groups of other ranks."""
    coordinate = grid.coordinate(rank)
    stage = coordinate.pipeline
    specs = [GroupSpec(kind, tuple(grid.group(axes, rank))) for kind, axes in _axis_kinds(grid)]
    if _has_embedding_group(grid, tied) and stage in (0, grid.pipeline - 1):
        specs.append(_embedding_spec(grid, coordinate))
    for edges, direction in _channel_rounds(grid, virtual_stages):
        specs += [_channel(grid, edge, direction, coordinate) for edge in edges if stage in edge]
    return specs


def _axis_kinds(grid: Grid) -> list[tuple[str, tuple[str, ...]]]:
    """Return the kinds of groups along axes that have more than one member."""
    return [(kind, axes) for kind, axes in group_axes().items() if grid.count(axes) > 1]


def _has_embedding_group(grid: Grid, tied: bool) -> bool:
    return tied and grid.pipeline > 1


def _embedding_spec(grid: Grid, column: Coordinate) -> GroupSpec:
    first = grid.rank(column.move(pipeline=0))
    last = grid.rank(column.move(pipeline=grid.pipeline - 1))
    return GroupSpec("embedding", (first, last))


def _channel_rounds(grid: Grid, virtual_stages: int) -> Iterator[tuple[list[tuple[int, int]], str]]:
    for edges in edge_rounds(grid.pipeline, ring=virtual_stages > 1):
        for direction in DIRECTIONS:
            yield edges, direction


def _channel(grid: Grid, edge: tuple[int, int], direction: str, column: Coordinate) -> GroupSpec:
    source, target = edge if direction == "forward" else edge[::-1]
    return GroupSpec(direction, (grid.rank(column.move(pipeline=source)), grid.rank(column.move(pipeline=target))))
