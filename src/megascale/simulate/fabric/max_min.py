"""Max-min fair sharing of links by progressive filling, and finish times of flows under it.

This is the flow level: each flow has at once the rate to which ideal congestion control would converge. Queues, PFC and
slow convergence are not modelled. On permutation traffic the results match Swift at the packet level (docs/network.md).
"""

from __future__ import annotations

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
        self.count = len(paths)
        self.flow = np.repeat(np.arange(len(paths)), used.sum(axis=1))
        links, self.link = np.unique(paths[used], return_inverse=True)
        self.bandwidth = bandwidth[links].astype(float)
        if (self.bandwidth <= 0).any():
            raise FitError(
                f"a flow crosses link {links[np.argmin(self.bandwidth)]}, which has no bandwidth; route around failed "
                "links first"
            )

    def rates(self, active: Bools | None = None) -> Floats:
        """Return the rates of flows, bytes/s [F]; see `fair_rates`."""
        rates = np.full(self.count, np.inf)
        if active is not None:
            rates[~active] = 0.0
        flow, link = self.flow, self.link
        if active is not None:
            is_fixed = active[flow]
            flow, link = flow[is_fixed], link[is_fixed]
        remaining, n = self.bandwidth.copy(), len(self.bandwidth)
        users = np.bincount(link, minlength=n)
        while len(flow):
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.where(users > 0, np.maximum(remaining, 0.0) / users, np.inf)
            first = np.flatnonzero(np.diff(flow, prepend=-1))
            flow_share = share[link]
            least = np.minimum.reduceat(flow_share, first)
            of_entry = np.repeat(least, np.diff(first, append=len(flow)))
            # A link whose every flow sees it as its tightest is a bottleneck; the rest wait for their flows' own.
            loose = np.bincount(link[of_entry < flow_share * (1 - 1e-12)], minlength=n)
            fixed = np.logical_or.reduceat((loose == 0)[link], first)
            rates[flow[first[fixed]]] = least[fixed]
            removed = np.repeat(fixed, np.diff(first, append=len(flow)))
            remaining -= np.bincount(link[removed], weights=of_entry[removed], minlength=n)
            users -= np.bincount(link[removed], minlength=n)
            flow, link = flow[~removed], link[~removed]
        return rates


def fair_rates(paths: Ints, bandwidth: Floats, active: Bools | None = None) -> Floats:
    """Return the max-min fair rates of flows, bytes/s [F].

    In a max-min fair allocation, a flow can only get more if a flow with the same or a lower rate gets less. The method
    is progressive filling. In each round, a link is a bottleneck if its fair share is the lowest on the paths of all
    its flows, and its flows get this rate. All bottlenecks of a round are treated at once, which gives the same rates
    as one by one.

    Args:
        paths: [F, hops] links, -1 for none. A flow without links is not limited: infinite.
        bandwidth: [E] bytes/s.
        active: [F] whether a flow is active; inactive flows have rate 0.

    Raises:
        FitError: a flow crosses a link without bandwidth.
    """
    return Sharing(paths, bandwidth).rates(active)


def finish_times(
    paths: Ints, sizes: Floats, bandwidth: Floats, tolerance: float = 0.0, starts: Floats | None = None
) -> Floats:
    """Return the seconds at which flows finish, [F]. Rates are computed again whenever flows finish or start.

    Args:
        paths: [F, hops] links.
        sizes: [F] bytes; a flow of 0 bytes finishes when it starts.
        bandwidth: [E] bytes/s.
        tolerance: relative error that is allowed for speed. Flows that finish within this share of the elapsed time end
            in one round, so that a step of 12,288 GPUs takes some hundred rounds instead of ten thousand. Freed
            bandwidth is used from the next round on, so finish times may be late by about this share, but not early.
        starts: [F] seconds at which flows start; default: 0.
    """
    if (sizes < 0).any():
        raise ConfigError(f"a flow of {sizes.min():g} bytes: sizes are 0 or more")
    if starts is None:
        begin = np.zeros(len(sizes))
    else:
        begin = np.asarray(starts, float)
    if (begin < 0).any():
        raise ConfigError(f"a flow starts at {begin.min():g} s: delays are 0 or more")
    sharing = Sharing(paths, bandwidth)
    done = np.where(sizes > 0, np.inf, begin)
    remaining = sizes.astype(float).copy()
    time = 0.0
    while True:
        open_ = np.isinf(done)
        if not open_.any():
            return done
        active = open_ & (begin <= time)
        later = begin[open_ & (begin > time)]
        coming = later.min() if len(later) else np.inf
        if not active.any():
            time = coming
            continue
        rates = sharing.rates(active)
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(active, remaining / rates, np.inf)
        first = need.min()
        horizon = first + tolerance * (time + first)
        if time + horizon >= coming:
            horizon = coming - time
        over = need <= horizon
        if over.any():
            spent = max(first, float(need[over].max()))
        else:
            spent = horizon
        remaining[active] = np.maximum(0.0, remaining[active] - rates[active] * spent)
        done[over] = time + need[over]
        time += spent


def jain(rates: Floats) -> float:
    """Return Jain's fairness index: 1 for equal rates, 1/n if one flow of n has all bandwidth."""
    if len(rates) and (rates > 0).any():
        return float(rates.sum() ** 2 / (len(rates) * (rates**2).sum()))
    return 1.0
