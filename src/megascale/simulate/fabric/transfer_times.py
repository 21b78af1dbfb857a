"""Slow-downs of transfers on a fabric at the flow level, for the step model.

`FabricTimes.slowdown` returns the time of a transfer divided by that at the NIC's full rate, for each group of an axis
and each draw of the hash seeds. Other traffic at the same time and failed parts may be given. Results are cached. The
step model multiplies the bandwidth terms of its times by the slow-downs (simulate/network.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megascale.errors import ConfigError
from megascale.simulate.fabric.ecmp import Flows, hash_five_tuples, route_flows
from megascale.simulate.fabric.max_min import compute_finish_times
from megascale.simulate.fabric.placement import AXES_BETWEEN, Placement, make_step_flows
from megascale.simulate.fabric.topology import Floats, Ints, Topology, build_topology


@dataclass(frozen=True)
class Slowdown:
    """Slow-downs of an axis's transfers.

    Attributes:
        values: [draws, groups] time of a group's transfer, divided by that at the full NIC rate.
        groups: [groups] indices of these groups in `Placement.groups`. Groups within a host are left out.
    """

    values: Floats
    groups: Ints

    def for_groups(self, count: int) -> Floats:
        """Return the slow-downs of all `count` groups, with 1 for groups within a host: [draws, count]."""
        factors = np.ones((len(self.values), count))
        factors[:, self.groups] = self.values
        return factors

    @property
    def mean(self) -> float:
        """Mean slow-down over groups and draws."""
        if self.values.size:
            return float(self.values.mean())
        return 1.0

    @property
    def worst(self) -> float:
        """Slow-down of the slowest group, mean over draws."""
        return float(self.values.max(axis=1, initial=1.0).mean())

    def quantile(self, share: float) -> float:
        """Return a quantile over draws of the slowest group's slow-down."""
        return float(np.quantile(self.values.max(axis=1, initial=1.0), share))


@dataclass(frozen=True)
class Outage:
    """An outage of a link or switch from `start` to `end` seconds of the run. Routes avoid it."""

    part: str
    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ConfigError(f"outage of {self.part}: {self.start:g} to {self.end:g} s; 0 <= start <= end")


@dataclass
class FabricTimes:
    """Slow-downs of a job's transfers on a fabric.

    Attributes:
        queue_pairs: connections over which a pair of ranks spreads its bytes.
        draws: number of draws of the hash seeds; each is one start of the job.
        polarised: whether all switches have the same hash seed.
        algorithm: algorithm of data-parallel collectives.
        tolerance: tolerance of `max_min.compute_finish_times`.
        outages: failed parts with their times.
        wrap_share: as in `make_step_flows`.
        report: as in `max_min.compute_finish_times`.
    """

    topology: Topology
    placement: Placement
    queue_pairs: int = 1
    draws: int = 4
    polarised: bool = False
    algorithm: str = "ring"
    tolerance: float = 0.02
    outages: tuple[Outage, ...] = ()
    wrap_share: float = 1.0
    report: Callable[[float], None] | None = None
    _table: dict[tuple[object, ...], Slowdown] = field(default_factory=dict, repr=False)
    _fabrics: dict[tuple[str, ...], Topology] = field(default_factory=dict, repr=False)

    def slowdown(
        self, axis: str, ranks: Sequence[int] | None = None, concurrent: Sequence[tuple[str, float]] = (),
        offset: float = 0.0,
    ) -> Slowdown:  # fmt: skip
        """Return the slow-down of an axis's transfers.

        Args:
            axis: "data" (a collective in each group) or "pipeline" (both directions between stages).
            ranks: ranks whose groups communicate; default: all groups at once.
            concurrent: (axis, bytes per rank relative to this axis) of other traffic at the same time.
            offset: time in seconds of the run, for outages.
        """
        if offset < 0:
            raise ConfigError(f"time {offset:g} s must be 0 or more")
        failed = tuple(o.part for o in self.outages if o.start <= offset < o.end)
        if ranks is None:
            groups = None
        else:
            groups = self.placement.group_numbers(axis, ranks)
        key = (axis, None if groups is None else tuple(groups.tolist()), tuple(concurrent), failed)
        if key not in self._table:
            self._table[key] = self._measure(axis, groups, concurrent, self._fabric(failed))
        return self._table[key]

    def _fabric(self, failed: tuple[str, ...]) -> Topology:
        if not failed:
            return self.topology
        if failed not in self._fabrics:
            spec = self.topology.spec
            self._fabrics[failed] = build_topology(spec.model_copy(update={"failed": spec.failed + failed}))
        return self._fabrics[failed]

    def _measure(
        self, axis: str, groups: Ints | None, concurrent: Sequence[tuple[str, float]], topology: Topology
    ) -> Slowdown:
        algorithm = self.algorithm if axis == "data" else "ring"
        flows = make_step_flows(self.placement, axis, 1e9, algorithm, wrap_share=self.wrap_share)
        group_count = len(self.placement.groups(axis))
        if groups is not None:
            is_selected = np.isin(flows.group, groups)
            flows = Flows(
                flows.source[is_selected], flows.target[is_selected], flows.size[is_selected], flows.group[is_selected]
            )
        if not len(flows):
            return Slowdown(np.ones((self.draws, 0)), np.zeros(0, np.int64))
        flow_sets = [flows]
        for concurrent_axis, share in concurrent:
            if concurrent_axis not in AXES_BETWEEN or share < 0:
                raise ConfigError(
                    f"concurrent traffic ({concurrent_axis!r}, {share:g}): axes are {AXES_BETWEEN}, shares 0 or more"
                )
            flow_sets.append(make_step_flows(self.placement, concurrent_axis, share * 1e9, wrap_share=self.wrap_share))
        all_flows = Flows.join(*flow_sets)
        # At full rate, the NIC of a group with most bytes to send or to receive determines the time.
        nic = topology.bandwidth[: topology.nics].max()
        group_bytes = np.zeros((2, group_count))
        for row, nics in enumerate((flows.source, flows.target)):
            nic_bytes = np.bincount(nics, weights=flows.size, minlength=topology.nics)
            np.maximum.at(group_bytes[row], flows.group, nic_bytes[nics])
        ideal = group_bytes.max(axis=0) / nic
        group_numbers = np.unique(flows.group)
        values = np.empty((self.draws, len(group_numbers)))
        split_flows = all_flows.split(self.queue_pairs)
        for draw in range(self.draws):
            keys = hash_five_tuples(split_flows, draw)
            paths = route_flows(topology, split_flows, keys, draw, self.polarised)
            all_finish = compute_finish_times(
                paths, split_flows.size, topology.bandwidth, tolerance=self.tolerance, report=self.report
            )
            finish = all_finish[: len(flows) * self.queue_pairs]
            group_finish = np.zeros(group_count)
            np.maximum.at(group_finish, split_flows.group[: len(finish)], finish)
            values[draw] = group_finish[group_numbers] / ideal[group_numbers]
        return Slowdown(values, group_numbers)
