"""Max-min fair sharing of links by progressive filling, and finish times of flows under it.

The flow level: rates are what ideal congestion control would settle at, at once. It matches packet-level Swift on
permutation traffic (docs/network.md), and knows nothing of queues, PFC or slow convergence.
"""

from __future__ import annotations

import numpy as np

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric.topology import Bools, Floats, Ints


class Sharing:
    """Flows over links, prepared for `rates` with changing sets of active flows.

    Entry i says that flow[i] crosses link[i] (links numbered among those used); entries of a flow lie together.
    """

    def __init__(self, paths: Ints, bandwidth: Floats) -> None:
        """paths: [F, hops] links, -1 for none. FitError if a flow crosses a link without bandwidth."""
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
        """[F] bytes/s; see fair_rates."""
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

    No flow can get more unless a flow of the same or a lower rate gets less.

    Links fill together; a link whose fair share is the least that any of its flows sees is a bottleneck, and its flows
    are fixed there. All such links of a round are fixed at once, with the same rates as one by one.

    Args:
        paths: [F, hops] links, -1 for none. A flow without links is not limited: infinite.
        bandwidth: [E] bytes/s.
        active: [F] which flows take part; the others get 0.

    Raises:
        FitError: a flow crosses a link without bandwidth.
    """
    return Sharing(paths, bandwidth).rates(active)


def finish_times(
    paths: Ints, sizes: Floats, bandwidth: Floats, tolerance: float = 0.0, starts: Floats | None = None
) -> Floats:
    """Return the seconds at which flows finish, [F]; rates are computed anew whenever flows finish or start.

    Args:
        paths: [F, hops] links.
        sizes: [F] bytes; a flow of 0 is done when it starts.
        bandwidth: [E] bytes/s.
        tolerance: rates are computed anew only once per this share of the time since the start: a step of 12,288 GPUs
            then takes some hundred rounds instead of ten thousand. Other flows get freed bandwidth only at the next
            computation, so finish times may be late by about this share, never early.
        starts: [F] seconds at which flows begin; default all at 0.
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
    """Jain's fairness index: 1 for equal rates, 1/n for one that has all."""
    if len(rates) and (rates > 0).any():
        return float(rates.sum() ** 2 / (len(rates) * (rates**2).sum()))
    return 1.0
