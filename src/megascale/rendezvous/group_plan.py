"""Which groups the grid needs, in the one order in which every rank makes its own: pure data, no torch.

Two ranks that both belong to groups A and B meet in A first or in B first, and must agree, or each waits for the
other. Here every rank follows the same total order (kinds in the order of `KINDS`, then by first rank), which makes
a circle of waiting impossible without any barrier (MegaScale section 3.5 calls this the carefully designed order).

Pipeline edges are made in colours: first every even edge at once, then every odd edge, so that a chain of stages
costs two or three rounds and not one round a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    """One communicator: who is in it and what it is for.

    Attributes:
        kind: tensor, data_gather, data_reduce, model, stage, embedding, forward or backward.
        ranks: members, ascending, except a P2P channel's: sender first.
        name: unique in the job, and the same on every member.
    """

    kind: str
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Unique in the job: groups of one kind never share their first ranks, P2P channels never their pair."""
        if self.kind in DIRECTIONS:
            return f"{self.kind}/{self.ranks[0]}-{self.ranks[1]}"
        return f"{self.kind}/{self.ranks[0]}"


def edge_rounds(stages: int, ring: bool) -> list[list[tuple[int, int]]]:
    """Directed stage pairs (i, i + 1) in rounds; no stage is twice in a round. `ring` adds (stages - 1, 0)."""
    if stages < 2:
        return []
    chain = [(stage, stage + 1) for stage in range(stages - 1)]
    rounds = [chain[0::2], chain[1::2]]
    if ring:
        last = (stages - 1, 0)
        # An even circle takes two colours, an odd one three; two stages meet in (0, 1) already.
        rounds = [rounds[0], [*rounds[1], last]] if stages % 2 == 0 else [*rounds, [last]]
    return [r for r in rounds if r]


def plan_groups(grid: Grid, virtual_stages: int = 1, tied: bool = False) -> list[GroupSpec]:
    """Every group of the job in the fixed order. Axes of size 1 need no communication and give no group."""
    plan = [
        GroupSpec(kind, tuple(ranks))
        for kind, axes in AXIS_KINDS.items()
        if _size(grid, axes) > 1
        for ranks in grid.groups(axes)
    ]
    columns = [(data, tensor) for data in range(grid.data) for tensor in range(grid.tensor)]
    if _embedding(grid, tied):
        plan += [_embedding_spec(grid, *column) for column in columns]
    for stage_pairs, direction in _channel_rounds(grid, virtual_stages):
        plan += [_channel(grid, pair, direction, *column) for pair in stage_pairs for column in columns]
    return plan


def rank_groups(grid: Grid, rank: int, virtual_stages: int = 1, tied: bool = False) -> list[GroupSpec]:
    """The groups of one rank: what `plan_groups` lists for it, in that order, without building the rest."""
    at = grid.coordinate(rank)
    mine = [
        GroupSpec(kind, tuple(grid.group(axes, rank))) for kind, axes in AXIS_KINDS.items() if _size(grid, axes) > 1
    ]
    if _embedding(grid, tied) and at.pipeline in (0, grid.pipeline - 1):
        mine.append(_embedding_spec(grid, at.data, at.tensor))
    for stage_pairs, direction in _channel_rounds(grid, virtual_stages):
        mine += [_channel(grid, p, direction, at.data, at.tensor) for p in stage_pairs if at.pipeline in p]
    return mine


def _size(grid: Grid, axes: tuple[str, ...]) -> int:
    size = 1
    for axis in axes:
        size *= grid.size(axis)
    return size


def _embedding(grid: Grid, tied: bool) -> bool:
    return tied and grid.pipeline > 1


def _embedding_spec(grid: Grid, data: int, tensor: int) -> GroupSpec:
    ends = (grid.rank(Coordinate(stage, data, tensor)) for stage in (0, grid.pipeline - 1))
    return GroupSpec("embedding", tuple(ends))


def _channel_rounds(grid: Grid, virtual_stages: int) -> Iterator[tuple[list[tuple[int, int]], str]]:
    for pairs in edge_rounds(grid.pipeline, ring=virtual_stages > 1):
        for direction in DIRECTIONS:
            yield pairs, direction


def _channel(grid: Grid, pair: tuple[int, int], direction: str, data: int, tensor: int) -> GroupSpec:
    source, target = pair if direction == "forward" else pair[::-1]
    return GroupSpec(
        direction, (grid.rank(Coordinate(source, data, tensor)), grid.rank(Coordinate(target, data, tensor)))
    )
