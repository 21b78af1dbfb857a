"""Grid of ranks: maps a rank to its coordinate, groups and host. All rank arithmetic is in this module.

config/axes.py lists the axes from fastest to slowest. The ranks of a tensor-parallel group are consecutive, so the
group lies inside one host. Data-parallel ranks come next, so that gradients travel short distances (MegaScale section 2
gives data parallelism priority over pipeline parallelism in placement).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from megascale.config import ParallelConfig
from megascale.config.axes import AXES
from megascale.errors import FitError


class Coordinate(Mapping[str, int]):
    """Position of a rank on each axis: a mapping from axis to index, with attributes for the most used axes."""

    __slots__ = ("_positions",)

    def __init__(self, **positions: int) -> None:
        self._positions = positions

    def __getitem__(self, axis: str) -> int:
        return self._positions[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __hash__(self) -> int:
        return hash(frozenset(self._positions.items()))

    def __repr__(self) -> str:
        return f"Coordinate({', '.join(f'{axis}={position}' for axis, position in self.items())})"

    @property
    def tensor(self) -> int:
        """Position on the tensor axis."""
        return self["tensor"]

    @property
    def data(self) -> int:
        """Position on the data axis."""
        return self["data"]

    @property
    def pipeline(self) -> int:
        """Position on the pipeline axis: the stage."""
        return self["pipeline"]

    def move(self, **positions: int) -> Coordinate:
        """Return the coordinate with other positions on the given axes."""
        return Coordinate(**(self._positions | positions))


@dataclass(frozen=True, init=False)
class Grid:
    """Sizes of the axes and of a host.

    Args:
        ranks_per_host: processes (one per GPU) on one host.
        sizes: ranks along each axis; 1 for axes left out.

    Attributes:
        axes: (name, number of ranks) of each axis, from the fastest to the slowest.
        ranks_per_host: processes on one host.
    """

    axes: tuple[tuple[str, int], ...]
    ranks_per_host: int

    def __init__(self, *, ranks_per_host: int = 8, **sizes: int) -> None:
        for axis, size in sizes.items():
            if axis not in AXES:
                raise KeyError(_describe_unknown(axis))
            if size < 1:
                raise FitError(f"{AXES.setting(axis)}={size} is not positive; set it to 1 or more")
        object.__setattr__(self, "axes", tuple((axis, sizes.get(axis, 1)) for axis in AXES))
        object.__setattr__(self, "ranks_per_host", ranks_per_host)

    @classmethod
    def from_world_size(cls, world_size: int, *, ranks_per_host: int = 8, **sizes: int | None) -> Grid:
        """Return the grid of `world_size` ranks, with the data axis filling the world unless its size is given.

        Raises FitError if the sizes do not divide.
        """
        filling_axis = AXES.filling  # the data axis
        filling_size = sizes.pop(filling_axis, None)
        model_sizes = {axis: size for axis, size in sizes.items() if size is not None}
        model_ranks = prod(model_sizes.values())
        # Messages leave out axes of one rank, except the two that most configurations set.
        printed_sizes = {axis: size for axis, size in model_sizes.items() if size > 1 or axis in ("tensor", "pipeline")}
        if world_size % model_ranks:
            nearest = max(1, round(world_size / model_ranks)) * model_ranks
            layout = " x ".join(f"{AXES.setting(axis)}={size}" for axis, size in printed_sizes.items())
            raise FitError(
                f"{world_size} ranks cannot be laid out with {layout} "
                f"= {model_ranks} ranks per model copy; use a multiple such as {nearest} ranks or change the layout"
            )
        copy_count = world_size // model_ranks
        if filling_size is not None and filling_size != copy_count:
            key = AXES.setting(filling_axis)
            layout = " x ".join(f"{axis} {size}" for axis, size in printed_sizes.items())
            raise FitError(
                f"{key}={filling_size} but {world_size} ranks / ({layout}) leave "
                f"{copy_count}; drop {key} or use {filling_size * model_ranks} ranks"
            )
        return cls(ranks_per_host=ranks_per_host, **(model_sizes | {filling_axis: copy_count}))

    @classmethod
    def from_config(cls, parallel: ParallelConfig, world_size: int) -> Grid:
        """Return the grid of `world_size` ranks with the configured sizes. Raises FitError if they do not divide."""
        return cls.from_world_size(world_size, ranks_per_host=parallel.gpus_per_host, **parallel.axis_sizes())

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Number of ranks along each axis."""
        return dict(self.axes)

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        strides = {}
        stride = 1
        for axis, size in self.axes:
            strides[axis] = stride
            stride *= size
        return strides

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.count(self._sizes)

    @property
    def tensor(self) -> int:
        """Ranks along the tensor axis."""
        return self._sizes["tensor"]

    @property
    def context(self) -> int:
        """Ranks that divide each sequence: those of axis `context`, or of axis `slice`, which divides experts too."""
        return self._sizes["context"] * self._sizes["slice"]

    @property
    def expert(self) -> int:
        """Ranks that divide the experts, tensor-parallel ranks excluded: those of axis `expert` or `slice`."""
        return self._sizes["expert"] * self._sizes["slice"]

    @property
    def data(self) -> int:
        """Ranks along the data axis alone; see `replicas` and `shards`."""
        return self._sizes["data"]

    @property
    def pipeline(self) -> int:
        """Ranks along the pipeline axis: stages."""
        return self._sizes["pipeline"]

    @cached_property
    def replicas(self) -> int:
        """Number of parts into which the samples of the global batch are divided."""
        return self.count(AXES.samples)

    @cached_property
    def shards(self) -> int:
        """Number of ranks over which gradients are reduced and optimizer state is sharded."""
        return self.count(AXES.shards)

    @property
    def host_count(self) -> int:
        """Number of hosts; the last host may have fewer ranks."""
        return -(-self.world_size // self.ranks_per_host)

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`. Raises KeyError for an unknown axis."""
        if axis not in self._sizes:
            raise KeyError(_describe_unknown(axis))
        return self._sizes[axis]

    def count(self, axes: Collection[str]) -> int:
        """Return the number of ranks of a group along `axes`."""
        return prod(self.size(axis) for axis in axes)

    def describe(self) -> str:
        """Describe the sizes, such as `tensor 2 x data 4 x pipeline 1`. Other axes of one rank are left out."""
        always_named = ("tensor", "data", "pipeline")
        return " x ".join(f"{axis} {size}" for axis, size in self.axes if size > 1 or axis in always_named)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank`. Raises IndexError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        return Coordinate(**{axis: rank // self._strides[axis] % size for axis, size in self.axes})

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at `coordinate`; axes left out are at position 0. Raises IndexError outside the grid."""
        for axis, position in coordinate.items():
            if not 0 <= position < self.size(axis):
                raise IndexError(f"{axis}={position} is outside 0..{self.size(axis) - 1}")
        return sum(position * self._strides[axis] for axis, position in coordinate.items())

    def host(self, rank: int) -> int:
        """Return the host that runs `rank`."""
        return rank // self.ranks_per_host

    def group(self, axes: Collection[str] | str, rank: int) -> list[int]:
        """Return the group of `rank` along `axes`, ascending: the ranks whose positions differ on these axes only."""
        axes = (axes,) if isinstance(axes, str) else axes
        coordinate = self.coordinate(rank)
        origin = rank - sum(coordinate[axis] * self._strides[axis] for axis in axes)  # first rank of the group
        return [origin + offset for offset in self._offsets(axes)]

    def groups(self, axes: Collection[str] | str) -> list[list[int]]:
        """Return all groups along `axes`, sorted by first rank. Each is ascending, and together they have all ranks."""
        axes = (axes,) if isinstance(axes, str) else axes
        offsets = self._offsets(axes)
        origins = self._offsets([axis for axis in self._sizes if axis not in axes])
        return [[origin + offset for offset in offsets] for origin in origins]

    def index(self, axes: Collection[str], rank: int) -> int:
        """Return the index of `rank` in its group along `axes`, see `group`."""
        return self.group(axes, rank).index(rank)

    def is_first(self, axes: Collection[str], rank: int) -> bool:
        """Return whether `rank` is the first of its group along `axes`."""
        coordinate = self.coordinate(rank)
        return not any(coordinate[axis] for axis in axes)

    def replica(self, rank: int) -> int:
        """Return which part of the global batch's samples `rank` reads, 0 to `replicas` - 1."""
        return self.index(AXES.samples, rank)

    def _offsets(self, axes: Collection[str]) -> list[int]:
        """Return the ranks of the group along `axes` that contains rank 0, ascending."""
        slowest_first = [axis for axis, _ in reversed(self.axes) if axis in axes]
        ranges = [range(0, self._strides[axis] * self.size(axis), self._strides[axis]) for axis in slowest_first]
        return [sum(offsets) for offsets in product(*ranges)]


def _describe_unknown(axis: str) -> str:
    """Return an error message for an axis that is not in the grid."""
    return f"no axis {axis!r}; axes are {', '.join(AXES)}"
