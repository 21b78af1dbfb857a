"""Placement of a job's hosts on the machines of a fabric, and the bytes that then cross each tier.

In a placement, `hosts[h]` is the machine that runs the job's host h (with 8 ranks per host: ranks 8 h to 8 h + 7). The
grid puts data-parallel neighbours on neighbouring hosts of the job (core/grid.py). So the strategy "data", which takes
machines in the order of their leaf switches, keeps data-parallel groups together. The other strategies are for
comparison.
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
from megascale.simulate.fabric.collective_flows import drop_flows_within_hosts, make_collective_flows
from megascale.simulate.fabric.ecmp import Flows
from megascale.simulate.fabric.topology import Floats, Ints, Topology

AXES_BETWEEN = ("data", "pipeline")


@dataclass(frozen=True)
class Placement:
    """A placement of a job on a fabric.

    Attributes:
        name: strategy or file of the placement.
        grid: the job's grid.
        hosts: [grid.host_count] machine of each of the job's hosts.
        nics: NICs per host.
    """

    name: str
    grid: Grid
    hosts: Ints
    nics: int

    def nic(self, ranks: Ints) -> Ints:
        """Return the NIC of each rank."""
        ranks = np.asarray(ranks)
        ranks_per_host = self.grid.ranks_per_host
        return self.hosts[ranks // ranks_per_host] * self.nics + ranks % ranks_per_host

    def groups(self, axis: str) -> list[Ints]:
        """Return the NICs of each group along the axis, in the order of the ring: ascending rank, as in NCCL."""
        axes = _grid_axes(axis)
        slowest_first = [name for name, _ in reversed(self.grid.axes)]
        group_dims = [dim for dim, name in enumerate(slowest_first) if name in axes]
        ranks = np.arange(self.grid.world_size).reshape([self.grid.size(name) for name in slowest_first])
        groups_first = np.moveaxis(ranks, group_dims, range(-len(group_dims), 0))
        return list(self.nic(groups_first.reshape(-1, self.grid.count(axes))))

    def group_numbers(self, axis: str, ranks: Sequence[int]) -> Ints:
        """Return the indices in `groups` of the groups of these ranks, without repetitions.

        Raises ConfigError for a rank outside the job.
        """
        rank_array = np.asarray(ranks, np.int64)
        if rank_array.size and (rank_array.min() < 0 or rank_array.max() >= self.grid.world_size):
            raise ConfigError(
                f"ranks {rank_array.min()} to {rank_array.max()}: the job has 0 to {self.grid.world_size - 1}"
            )
        shape = [size for _, size in reversed(self.grid.axes)]
        coordinates = np.unravel_index(rank_array, shape)
        slowest_first = [name for name, _ in reversed(self.grid.axes)]
        other_dims = [dim for dim, name in enumerate(slowest_first) if name not in _grid_axes(axis)]
        other_coordinates = [coordinates[dim] for dim in other_dims]
        return np.unique(np.ravel_multi_index(other_coordinates, [shape[dim] for dim in other_dims]))


def _grid_axes(axis: str) -> tuple[str, ...]:
    """Return the grid's axes of a kind of traffic: data-parallel groups may extend along several axes."""
    if axis == "data":
        return AXES.shards
    return (axis,)


def data_near(grid: Grid, topology: Topology, seed: int) -> Ints:
    """Return machines in the order of their leaf switches: data-parallel neighbours share a set (paper section 3.6)."""
    return np.arange(grid.host_count)


def replicas_near(grid: Grid, topology: Topology, seed: int) -> Ints:
    """Return machines such that all stages of a replica are neighbours: pipeline neighbours share a set of leaves."""
    # Data-parallel ranks of a stage on one host.
    replicas_per_host = max(1, grid.ranks_per_host // grid.count(AXES.replica))
    if grid.shards % replicas_per_host or grid.host_count != grid.pipeline * grid.shards // replicas_per_host:
        raise FitError(
            f"placement replicas needs data={grid.shards} to divide into hosts of {replicas_per_host} data-parallel "
            "ranks; use --placement data"
        )
    columns = grid.shards // replicas_per_host
    return (np.arange(columns)[None, :] * grid.pipeline + np.arange(grid.pipeline)[:, None]).ravel()


def at_random(grid: Grid, topology: Topology, seed: int) -> Ints:
    """Return random machines, as a scheduler without knowledge of the switches assigns them."""
    return np.random.default_rng(seed).permutation(topology.spec.hosts)[: grid.host_count]


def adversarial(grid: Grid, topology: Topology, seed: int) -> Ints:
    """Return machines such that consecutive hosts are in different pods, and then in different sets."""
    hosts = np.arange(topology.spec.hosts)
    pods = topology.pod_of[topology.leaf_of[hosts * topology.spec.nics]]
    index_in_pod = np.empty(len(hosts), np.int64)
    for pod in np.unique(pods):
        pod_hosts = np.flatnonzero(pods == pod)
        sets = topology.set_of_host(pod_hosts)
        # Round-robin over the pod's sets.
        index_in_set = np.array([np.sum(sets[:i] == sets[i]) for i in range(len(pod_hosts))])
        index_in_pod[pod_hosts[np.lexsort((sets, index_in_set))]] = np.arange(len(pod_hosts))
    return hosts[np.lexsort((pods, index_in_pod))][: grid.host_count]


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
    return check_placement(Placement(strategy, grid, np.asarray(hosts, np.int64), spec.nics), topology)


def check_placement(placement: Placement, topology: Topology) -> Placement:
    """Return the placement. Raises DataError if a machine is used twice or does not exist."""
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


def write_placement(placement: Placement, path: Path, names: list[str] | None = None) -> None:
    """Write a placement file for the driver (core/launch_files.py).

    Args:
        names: name of each machine of the fabric.
    """
    hosts = tuple(placement.hosts.tolist())
    nodes = tuple(names[h] for h in hosts) if names else None
    PlacementFile(placement.name, placement.grid, hosts, nodes).write(path)


# traffic per tier -----------------------------------------------------------------------------------------------------

CROSSINGS = ("inside a host", "one leaf switch", "aggregation", "core")


def find_crossing_pairs(topology: Topology, flows: Flows) -> Ints:
    """Return the highest tier that each flow must pass: [F] indices into CROSSINGS."""
    source_leaf = topology.leaf_of[flows.source]
    target_leaf = topology.leaf_of[flows.target]
    tiers = np.where(topology.pod_of[source_leaf] == topology.pod_of[target_leaf], 2, 3)
    tiers = np.where(source_leaf == target_leaf, 1, tiers)
    return np.where(topology.host_of(flows.source) == topology.host_of(flows.target), 0, tiers)


def sum_bytes_by_tier(topology: Topology, flows: Flows) -> Floats:
    """Return the bytes of the flows by their highest tier: [4], in the order of CROSSINGS."""
    return np.bincount(find_crossing_pairs(topology, flows), weights=flows.size, minlength=len(CROSSINGS)).astype(float)


def make_step_flows(
    placement: Placement,
    axis: str,
    size: float,
    algorithm: str = "ring",
    passes: float = 1.0,
    *,
    wrap_share: float = 1.0,
) -> Flows:
    """Return the flows between hosts of all groups of an axis at once.

    Args:
        axis: "data": each group has a collective of `size` bytes. "pipeline": every rank sends `size` bytes to the same
            rank of the next stage, and as many back.
        algorithm, passes: of the collective (collective_flows.py).
        wrap_share: bytes between the last and the first stage, relative to `size` (StepTraffic.wrap_share).
    """
    if axis == "data":
        return make_collective_flows(algorithm, placement.groups("data"), size, placement.nics, passes)
    if axis != "pipeline":
        raise ConfigError(f"--axis={axis!r}: only {' and '.join(AXES_BETWEEN)} leave a host")
    members = np.array(placement.groups("pipeline"))
    if members.shape[1] < 2:
        return Flows.from_arrays([], [], [])
    successors = np.roll(members, -1, axis=1)
    group_indices = np.repeat(np.arange(len(members)), members.shape[1])
    sizes = np.full(members.shape, size)
    sizes[:, -1] = wrap_share * size
    forward = Flows.from_arrays(members.ravel(), successors.ravel(), sizes.ravel(), group_indices)
    backward = Flows.from_arrays(successors.ravel(), members.ravel(), sizes.ravel(), group_indices)
    both_directions = Flows.join(forward, backward)
    return drop_flows_within_hosts(both_directions, placement.nics)
