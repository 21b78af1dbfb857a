"""Max-min fair sharing of links by progressive filling, and finish times of flows under it.

This is the flow level: each flow has at once the rate to which ideal congestion control would converge. Queues, PFC and
slow convergence are not modelled. On permutation traffic the results match Swift at the packet level (docs/network.md).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric.topology import Bools, Floats, Ints


class Sharing:
    """Flows over links, prepared for `rates` with changing sets of active flows.

    The arrays `flow` and `link` have one entry per hop: flow `flow[i]` crosses link `link[i]`. Links are numbered among
    those that are used, and the hops of a flow are consecutive.
    """

    def __init__(self, paths: Ints, bandwidth: Floats) -> None:
        """Prepare flows with these paths: [F, hops] links, -1 for none.

        Raises FitError if a flow crosses a link without bandwidth.
        """
        used = paths >= 0
        self.flow = np.repeat(np.arange(len(paths)), used.sum(axis=1))
        links, self.link = np.unique(paths[used], return_inverse=True)
        self.bandwidth = bandwidth[links].astype(float)
        if (self.bandwidth <= 0).any():
            raise FitError(
                f"a flow crosses link {links[np.argmin(self.bandwidth)]}, which has no bandwidth; route around failed "
                "links first"
            )

    def rates(self, active: Bools) -> Floats:
        """Return the rates of flows, bytes/s [F], 0 for flows that are not `active`; see `compute_fair_rates`."""
        rates = np.where(active, np.inf, 0.0)
        is_active_hop = active[self.flow]
        flow = self.flow[is_active_hop]
        link = self.link[is_active_hop]
        remaining = self.bandwidth.copy()
        link_count = len(self.bandwidth)
        users = np.bincount(link, minlength=link_count)
        while len(flow):
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.where(users > 0, np.maximum(remaining, 0.0) / users, np.inf)
            # The hops of a flow are consecutive, so that `reduceat` combines them.
            first_hops = np.flatnonzero(np.diff(flow, prepend=-1))
            hop_counts = np.diff(first_hops, append=len(flow))
            hop_share = share[link]
            flow_share = np.minimum.reduceat(hop_share, first_hops)
            flow_share_of_hop = np.repeat(flow_share, hop_counts)
            # A link is a bottleneck if no flow on it has a lower share elsewhere.
            slower_flows = np.bincount(link[flow_share_of_hop < hop_share * (1 - 1e-12)], minlength=link_count)
            is_fixed = np.logical_or.reduceat((slower_flows == 0)[link], first_hops)
            rates[flow[first_hops[is_fixed]]] = flow_share[is_fixed]
            is_fixed_hop = np.repeat(is_fixed, hop_counts)
            remaining -= np.bincount(link[is_fixed_hop], weights=flow_share_of_hop[is_fixed_hop], minlength=link_count)
            users -= np.bincount(link[is_fixed_hop], minlength=link_count)
            flow = flow[~is_fixed_hop]
            link = link[~is_fixed_hop]
        return rates


def compute_fair_rates(paths: Ints, bandwidth: Floats) -> Floats:
    """Return the max-min fair rates of flows, bytes/s [F].

    In a max-min fair allocation, a flow can only get more if a flow with the same or a lower rate gets less. The method
    is progressive filling. In each round, a link is a bottleneck if its fair share is the lowest on the paths of all
    its flows, and its flows get this rate. All bottlenecks of a round are treated at once, which gives the same rates
    as one by one.

    Args:
        paths: [F, hops] links, -1 for none. A flow without links is not limited: infinite.
        bandwidth: [E] bytes/s.

    Raises:
        FitError: a flow crosses a link without bandwidth.
    """
    return Sharing(paths, bandwidth).rates(np.ones(len(paths), bool))


def compute_finish_times(
    paths: Ints,
    sizes: Floats,
    bandwidth: Floats,
    tolerance: float = 0.0,
    report: Callable[[float], None] | None = None,
) -> Floats:
    """Return the seconds at which flows finish, [F]. All start at once; rates are computed again whenever some finish.

    Args:
        paths: [F, hops] links.
        sizes: [F] bytes; a flow of 0 bytes finishes at once.
        bandwidth: [E] bytes/s.
        tolerance: relative error that is allowed for speed. Flows that finish within this share of the elapsed time end
            in one round, so that a step of 12,288 GPUs takes some hundred rounds instead of ten thousand. Freed
            bandwidth is used from the next round on, so finish times may be late by about this share, but not early.
        report: called after each round with the share of flows that have finished.
    """
    if (sizes < 0).any():
        raise ConfigError(f"a flow of {sizes.min():g} bytes: sizes must be 0 or more")
    sharing = Sharing(paths, bandwidth)
    finish = np.where(sizes > 0, np.inf, 0.0)
    remaining_bytes = sizes.astype(float).copy()
    time = 0.0
    while True:
        is_active = np.isinf(finish)
        if report is not None:
            report(1.0 - float(is_active.mean()))
        if not is_active.any():
            return finish
        rates = sharing.rates(is_active)
        with np.errstate(divide="ignore", invalid="ignore"):
            remaining_seconds = np.where(is_active, remaining_bytes / rates, np.inf)
        shortest = remaining_seconds.min()
        is_finishing = remaining_seconds <= shortest + tolerance * (time + shortest)
        elapsed = float(remaining_seconds[is_finishing].max())
        remaining_bytes[is_active] = np.maximum(0.0, remaining_bytes[is_active] - rates[is_active] * elapsed)
        finish[is_finishing] = time + remaining_seconds[is_finishing]
        time += elapsed


def compute_jain_index(rates: Floats) -> float:
    """Return Jain's fairness index: 1 for equal rates, 1/n if one flow of n has all bandwidth."""
    if len(rates) and (rates > 0).any():
        return float(rates.sum() ** 2 / (len(rates) * (rates**2).sum()))
    return 1.0
