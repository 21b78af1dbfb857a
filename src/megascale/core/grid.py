"""The one grid: rank to coordinate to group to host. Nobody computes a rank by hand.

Axes from fastest to slowest: tensor, data, pipeline. Tensor-parallel ranks are neighbours, so a group lies
inside one host; data-parallel ranks come next, so that gradient traffic stays near (MegaScale section 2 gives
data parallelism priority over pipeline parallelism in placement).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megascale.errors import FitError

AXES = ("tensor", "data", "pipeline")


@dataclass(frozen=True, order=True)
class Coordinate:
    """Where a rank stands on each axis."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes and of a host.

    Attributes:
        tensor, data, pipeline: ranks along each axis.
        ranks_per_host: processes (one a GPU) on one host.
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise FitError(f"parallel.{axis}={self.size(axis)} is not positive; an axis has at least one rank")

    @classmethod
    def of_world(cls, world: int, tensor: int, pipeline: int, data: int | None = None, ranks_per_host: int = 8) -> Grid:
        """The grid of `world` ranks; data parallelism is what is left. FitError if it does not divide."""
        model = tensor * pipeline
        if world % model:
            near = max(1, round(world / model)) * model
            raise FitError(
                f"{world} ranks cannot be laid out with parallel.tensor={tensor} x parallel.pipeline={pipeline} "
                f"= {model} ranks a model copy; use a multiple such as {near} ranks or change the layout"
            )
        left = world // model
        if data is not None and data != left:
            raise FitError(
                f"parallel.data={data} but {world} ranks / (tensor {tensor} x pipeline {pipeline}) leave {left}; "
                f"drop parallel.data or use {data * model} ranks"
            )
        return cls(tensor, left, pipeline, ranks_per_host)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.data * self.pipeline

    @property
    def host_count(self) -> int:
        """Number of hosts, the last possibly not full."""
        return -(-self.world_size // self.ranks_per_host)

    def size(self, axis: str) -> int:
        """Ranks along `axis`; KeyError for an unknown axis."""
        if axis not in AXES:
            raise KeyError(f"no axis {axis!r}; axes are {', '.join(AXES)}")
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> Coordinate:
        """Where `rank` stands; IndexError if it is not in the world."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinate(pipeline=pipeline, data=data, tensor=tensor)

    def rank(self, at: Coordinate) -> int:
        """The rank that stands at `at`; IndexError if outside."""
        for axis in AXES:
            if not 0 <= getattr(at, axis) < self.size(axis):
                raise IndexError(f"{axis}={getattr(at, axis)} is outside 0..{self.size(axis) - 1}")
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    def host(self, rank: int) -> int:
        """The host that `rank` runs on."""
        return rank // self.ranks_per_host

    def group(self, axes: tuple[str, ...] | str, rank: int) -> list[int]:
        """Ranks that share all coordinates with `rank` except on `axes`, ascending."""
        axes = (axes,) if isinstance(axes, str) else axes
        at = self.coordinate(rank)
        spans = {axis: range(self.size(axis)) if axis in axes else (getattr(at, axis),) for axis in AXES}
        return [
            self.rank(Coordinate(p, d, t)) for p in spans["pipeline"] for d in spans["data"] for t in spans["tensor"]
        ]

    def groups(self, axes: tuple[str, ...] | str) -> list[list[int]]:
        """All groups along `axes`, each ascending, ordered by first rank: a partition of the world."""
        axes = (axes,) if isinstance(axes, str) else axes
        count = self.world_size // prod(self.size(axis) for axis in set(axes))
        seen: list[list[int]] = []
        for rank in self._firsts(axes):
            seen.append(self.group(axes, rank))
        assert len(seen) == count
        return seen

    def _firsts(self, axes: tuple[str, ...]) -> Iterator[int]:
        spans = {axis: (0,) if axis in axes else range(self.size(axis)) for axis in AXES}
        for p in spans["pipeline"]:
            for d in spans["data"]:
                for t in spans["tensor"]:
                    yield self.rank(Coordinate(p, d, t))
