"""Grid of ranks: maps rank to coordinate, group and host. All rank arithmetic is in this module.

Axes from fastest to slowest: tensor, data, pipeline. Tensor-parallel ranks are neighbours, so a group lies
inside one host; data-parallel ranks come next, so that gradient traffic stays near (MegaScale section 2 gives
data parallelism priority over pipeline parallelism in placement).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from megascale.errors import FitError

AXES = ("tensor", "data", "pipeline")


@dataclass(frozen=True, order=True)
class Coordinate:
    """Position of a rank on each axis."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes and of a host.

    Attributes:
        tensor, data, pipeline: ranks along each axis.
        ranks_per_host: processes (one per GPU) on one host.
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise FitError(f"parallel.{axis}={self.size(axis)} is not positive; set it to 1 or more")

    @classmethod
    def from_world_size(
        cls, world_size: int, tensor: int, pipeline: int, data: int | None = None, ranks_per_host: int = 8
    ) -> Grid:
        """Return the grid of `world_size` ranks, with the data axis filling the world by default.

        Raises FitError if the sizes do not divide.
        """
        model_ranks = tensor * pipeline
        if world_size % model_ranks:
            nearest = max(1, round(world_size / model_ranks)) * model_ranks
            raise FitError(
                f"{world_size} ranks cannot be laid out with parallel.tensor={tensor} x parallel.pipeline={pipeline} "
                f"= {model_ranks} ranks per model copy; use a multiple such as {nearest} ranks or change the layout"
            )
        copies = world_size // model_ranks
        if data is not None and data != copies:
            raise FitError(
                f"parallel.data={data} but {world_size} ranks / (tensor {tensor} x pipeline {pipeline}) leave "
                f"{copies}; drop parallel.data or use {data * model_ranks} ranks"
            )
        return cls(tensor, copies, pipeline, ranks_per_host)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.data * self.pipeline

    @property
    def host_count(self) -> int:
        """Number of hosts; the last host may have fewer ranks."""
        return -(-self.world_size // self.ranks_per_host)

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`. Raises KeyError for an unknown axis."""
        if axis not in AXES:
            raise KeyError(f"no axis {axis!r}; axes are {', '.join(AXES)}")
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank`. Raises IndexError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        quotient, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(quotient, self.data)
        return Coordinate(pipeline=pipeline, data=data, tensor=tensor)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at `coordinate`. Raises IndexError outside the grid."""
        for axis in AXES:
            position = getattr(coordinate, axis)
            if not 0 <= position < self.size(axis):
                raise IndexError(f"{axis}={position} is outside 0..{self.size(axis) - 1}")
        return (coordinate.pipeline * self.data + coordinate.data) * self.tensor + coordinate.tensor

    def host(self, rank: int) -> int:
        """Return the host that runs `rank`."""
        return rank // self.ranks_per_host

    def group(self, axes: tuple[str, ...] | str, rank: int) -> list[int]:
        """Return the ranks that share all coordinates with `rank` except on `axes`, ascending."""
        axes = (axes,) if isinstance(axes, str) else axes
        coordinate = self.coordinate(rank)
        positions = {}
        for axis in AXES:
            position = getattr(coordinate, axis)
            if axis in axes:
                positions[axis] = range(self.size(axis))
            else:
                positions[axis] = range(position, position + 1)
        return self._ranks_at(positions)

    def groups(self, axes: tuple[str, ...] | str) -> list[list[int]]:
        """Return all groups along `axes`, a partition of the world; each is ascending, ordered by its first rank."""
        axes = (axes,) if isinstance(axes, str) else axes
        origins = {axis: range(1) if axis in axes else range(self.size(axis)) for axis in AXES}
        return [self.group(axes, rank) for rank in self._ranks_at(origins)]

    def _ranks_at(self, positions: dict[str, range]) -> list[int]:
        """Return the ranks at all combinations of the positions on each axis, ascending."""
        combinations = product(positions["pipeline"], positions["data"], positions["tensor"])
        return [self.rank(Coordinate(pipeline, data, tensor)) for pipeline, data, tensor in combinations]
