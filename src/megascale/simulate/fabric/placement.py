"""Placement: which host of the fabric runs which ranks of a grid, and how many bytes then cross each tier.

A placement is a permutation: `hosts[h]` is the machine that runs the job's host h (ranks h x 8 to h x 8 + 7). The
grid's own order puts data-parallel neighbours on neighbouring hosts (core/grid.py), so machines in the order of their
leaf switches already keep data-heavy groups together; the others are there to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale.config.axes import AXES
from megascale.core.grid import Grid
from megascale.core.launch_files import PlacementFile, read_placement
from megascale.errors import ConfigError, DataError, FitError
from megascale.simulate.fabric.collective_flows import collective
from megascale.simulate.fabric.ecmp import Flows
from megascale.simulate.fabric.topology import Floats, Ints, Topology

AXES_BETWEEN = ("data", "pipeline")


@dataclass(frozen=True)
class Placement:
    """Attributes:

    name: strategy or file that it comes from.
    grid: the job's grid.
    hosts: [grid.host_count] machine of each of the job's hosts.
    nics: NICs per host.
    """

    name: str
    grid: Grid
    hosts: Ints
    nics: int

    def nic(self, ranks: Ints) -> Ints:
        """The NIC that each rank sends through."""
        ranks = np.asarray(ranks)
        ranks_per_host = self.grid.ranks_per_host
        return self.hosts[ranks // ranks_per_host] * self.nics + ranks % ranks_per_host

    def groups(self, axis: str) -> list[Ints]:
        """NICs of each group along the axis, in ring order (ascending rank, as NCCL's rings follow hosts)."""
        axes = _grid_axes(axis)
        slowest_first = [name for name, _ in reversed(self.grid.axes)]
        inside = [number for number, name in enumerate(slowest_first) if name in axes]
        ranks = np.arange(self.grid.world_size).reshape([self.grid.size(name) for name in slowest_first])
        moved = np.moveaxis(ranks, inside, range(-len(inside), 0))
        return list(self.nic(moved.reshape(-1, self.grid.count(axes))))

    def group_numbers(self, axis: str, ranks: Sequence[int]) -> Ints:
        """[n] numbers, as `groups` counts, of the groups that these ranks are in; ConfigError for no such rank."""
        rank_array = np.asarray(ranks, np.int64)
        if rank_array.size and (rank_array.min() < 0 or rank_array.max() >= self.grid.world_size):
            raise ConfigError(
                f"ranks {rank_array.min()} to {rank_array.max()}: the job has 0 to {self.grid.world_size - 1}"
            )
        shape = [size for _, size in reversed(self.grid.axes)]
        coordinates = np.unravel_index(rank_array, shape)
        others = [number for number, (name, _) in enumerate(reversed(self.grid.axes)) if name not in _grid_axes(axis)]
        other_coordinates = [coordinates[number] for number in others]
        return np.unique(np.ravel_multi_index(other_coordinates, [shape[number] for number in others]))


def _grid_axes(axis: str) -> tuple[str, ...]:
    """Return the grid's axes of a kind of traffic: data parallelism may run along several."""
    if axis == "data":
        return AXES.shards
    return (axis,)


def data_near(grid: Grid, topology: Topology, seed: int) -> Ints:
    """Machines in the order of their leaf switches: data-parallel neighbours share a set (paper section 3.6)."""
    return np.arange(grid.host_count)


def replicas_near(grid: Grid, topology: Topology, seed: int) -> Ints:
    """Place all stages of a replica next to each other. Pipeline neighbours share a set, data rings leave it."""
    replicas_per_host = max(
        1, grid.ranks_per_host // grid.count(AXES.replica)
    )  # data-parallel ranks of a stage on one host
    if grid.shards % replicas_per_host or grid.host_count != grid.pipeline * grid.shards // replicas_per_host:
        raise FitError(
            f"placement replicas needs data={grid.shards} to divide into hosts of {replicas_per_host} data-parallel "
            "ranks; use --placement data"
        )
    columns = grid.shards // replicas_per_host
    return (np.arange(columns)[None, :] * grid.pipeline + np.arange(grid.pipeline)[:, None]).ravel()


def at_random(grid: Grid, topology: Topology, seed: int) -> Ints:
    """Any free machines, as a scheduler that knows no switches gives them."""
    return np.random.default_rng(seed).permutation(topology.spec.hosts)[: grid.host_count]


def adversarial(grid: Grid, topology: Topology, seed: int) -> Ints:
    """Neighbours as far from each other as can be: consecutive hosts go to different pods, then to different sets."""
    hosts = np.arange(topology.spec.hosts)
    pods = topology.pod_of[topology.leaf_of[hosts * topology.spec.nics]]
    within = np.empty(len(hosts), np.int64)
    for pod in np.unique(pods):
        pod_hosts = np.flatnonzero(pods == pod)
        sets = topology.set_of_host(pod_hosts)
        # Round-robin over the pod's sets.
        rank = np.array([np.sum(sets[:i] == sets[i]) for i in range(len(pod_hosts))])
        within[pod_hosts[np.lexsort((sets, rank))]] = np.arange(len(pod_hosts))
    return hosts[np.lexsort((pods, within))][: grid.host_count]


STRATEGIES: dict[str, Callable[[Grid, Topology, int], Ints]] = {
    "data": data_near, "replicas": replicas_near, "random": at_random, "adversarial": adversarial
}  # fmt: skip


def make_placement(grid: Grid, topology: Topology, strategy: str = "data", seed: int = 0) -> Placement:
    """Place a grid on the fabric by a named strategy or a placement file.

    Raises:
        FitError: more hosts than the fabric has, or ranks that do not fit a host's NICs.
        ConfigError: no such strategy or file.
        DataError: a file that is damaged, that is for another grid, or that names a host twice.
    """
    spec = topology.spec
    if grid.ranks_per_host > spec.nics:
        raise FitError(
            f"parallel.gpus_per_host={grid.ranks_per_host} but fabric {spec.name!r} has nics={spec.nics} per host; "
            "give each rank a NIC"
        )
    if grid.host_count > spec.hosts:
        raise FitError(
            f"{grid.world_size} ranks need {grid.host_count} hosts, fabric {spec.name!r} has hosts={spec.hosts}; "
            f"use --gpus {spec.hosts * grid.ranks_per_host} at most, or --set hosts={grid.host_count}"
        )
    if strategy in STRATEGIES:
        hosts = STRATEGIES[strategy](grid, topology, seed)
    elif strategy.endswith(".json"):
        hosts = np.array(read_placement(Path(strategy), grid, "--placement").hosts, np.int64)
    else:
        raise ConfigError(f"--placement={strategy!r} is neither {', '.join(STRATEGIES)} nor a .json file")
    return checked(Placement(strategy, grid, np.asarray(hosts, np.int64), spec.nics), topology)


def checked(placement: Placement, topology: Topology) -> Placement:
    """Raise DataError for a machine that is used twice or does not exist."""
    hosts, counts = np.unique(placement.hosts, return_counts=True)
    if (counts > 1).any():
        raise DataError(
            f"placement {placement.name!r} uses machine {hosts[counts > 1][0]} {counts.max()} times; each runs one "
            "host of the job"
        )
    if len(placement.hosts) != placement.grid.host_count:
        raise DataError(
            f"placement {placement.name!r} has {len(placement.hosts)} hosts, the job {placement.grid.host_count}"
        )
    if hosts[0] < 0 or hosts[-1] >= topology.spec.hosts:
        raise DataError(
            f"placement {placement.name!r} names machine {hosts[-1] if hosts[0] >= 0 else hosts[0]}; the fabric has "
            f"0 to {topology.spec.hosts - 1}"
        )
    return placement


def write(placement: Placement, path: Path, names: list[str] | None = None) -> None:
    """A file for the driver: the machines in rank order, by name if there are names (core/launch_files.py)."""
    hosts = tuple(placement.hosts.tolist())
    nodes = tuple(names[h] for h in hosts) if names else None
    PlacementFile(placement.name, placement.grid, hosts, nodes).write(path)


# what crosses what ----------------------------------------------------------------------------------------------------

CROSSINGS = ("inside a host", "one leaf switch", "aggregation", "core")


def crossing(topology: Topology, flows: Flows) -> Ints:
    """[F] index into CROSSINGS: the highest tier that a flow must pass."""
    a, b = topology.leaf_of[flows.source], topology.leaf_of[flows.target]
    far = np.where(topology.pod_of[a] == topology.pod_of[b], 2, 3)
    levels = np.where(a == b, 1, far)
    return np.where(topology.host_of(flows.source) == topology.host_of(flows.target), 0, levels)


def bytes_by_tier(topology: Topology, flows: Flows) -> Floats:
    """[4] bytes of the flows by CROSSINGS."""
    return np.bincount(crossing(topology, flows), weights=flows.size, minlength=len(CROSSINGS)).astype(float)


def step_flows(placement: Placement, axis: str, size: float, algorithm: str = "ring", passes: float = 1.0) -> Flows:
    """Return the flows between hosts of all groups of an axis at once.

    data: the collective of `size` bytes per group.
    pipeline: every rank sends `size` to the same rank of the next stage, and the last stage to the first, since
    interleaved schedules wrap around. It sends as much backwards as forwards.
    """
    if axis == "data":
        return collective(algorithm, placement.groups("data"), size, placement.nics, passes)
    if axis != "pipeline":
        raise ConfigError(f"--axis={axis!r}: only {' and '.join(AXES_BETWEEN)} leave a host")
    members = np.array(placement.groups("pipeline"))
    if members.shape[1] < 2:
        return Flows.from_arrays([], [], [])
    successors = np.roll(members, -1, axis=1)
    number = np.repeat(np.arange(len(members)), members.shape[1])
    forward = Flows.from_arrays(members.ravel(), successors.ravel(), size, number)
    backward = Flows.from_arrays(successors.ravel(), members.ravel(), size, number)
    both_directions = Flows.join(forward, backward)
    out = both_directions.source // placement.nics != both_directions.target // placement.nics
    return Flows(
        both_directions.source[out], both_directions.target[out], both_directions.size[out], both_directions.group[out]
    )
