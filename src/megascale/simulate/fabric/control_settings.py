"""Parameters of congestion controls. Each set of parameters has a source. No numba."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from megascale.errors import ConfigError

NONE, DCQCN, SWIFT, DCQCN_AND_SWIFT, CUT = range(5)
CONTROLS = {"none": NONE, "dcqcn": DCQCN, "swift": SWIFT, "hybrid-both": DCQCN_AND_SWIFT, "hybrid-cut": CUT}


def control_number(name: str) -> int:
    """Return the number of a congestion control. Raises ConfigError for an unknown name."""
    if name not in CONTROLS:
        raise ConfigError(f"--control={name!r} is unknown; {', '.join(CONTROLS)}")
    return CONTROLS[name]


@dataclass(frozen=True)
class DcqcnSettings:
    """Parameters of DCQCN, with the names of the paper where it has one. Times are in microseconds.

    Attributes:
        kmin_kb, kmax_kb, pmax: ECN marking of a 25 Gb/s port: queue from which on packets are marked sometimes, queue
            from which on all are marked, and probability just below.
        g: weight of a notification in alpha.
        alpha_us: period of alpha's decay.
        rise_us: period of rate increases.
        cut_us: minimum time between two cuts of a flow's rate.
        cnp_us: minimum time between two notifications of a flow.
        fast: number of increases towards the target before the target itself rises.
        byte_mb: MB between two increases by the byte counter; 0: no byte counter.
        additive_mbps, hyper_mbps: steps of the target in Mb/s, for a 25 Gb/s NIC.
        scale_ecn: whether the queues of ECN marking scale with the port's rate.
        scale_rates: whether the steps scale with the NIC's rate.
    """

    source: str
    kmin_kb: float
    kmax_kb: float
    pmax: float
    g: float = 1 / 256
    alpha_us: float = 55.0
    rise_us: float = 55.0
    cut_us: float = 50.0
    cnp_us: float = 50.0
    fast: int = 5
    byte_mb: float = 10.0
    additive_mbps: float = 40.0
    hyper_mbps: float = 0.0
    scale_ecn: bool = True
    scale_rates: bool = True

    def __post_init__(self) -> None:
        for key in ("alpha_us", "rise_us", "cut_us", "cnp_us", "byte_mb", "additive_mbps", "hyper_mbps", "kmin_kb"):
            if getattr(self, key) < 0:
                raise ConfigError(
                    f"dcqcn.{key}={getattr(self, key):g} is negative; times, rates and sizes must be 0 or more"
                )
        if not 0 < self.g <= 1 or not 0 < self.pmax <= 1 or self.kmax_kb < self.kmin_kb or self.rise_us <= 0:
            raise ConfigError(
                f"dcqcn: g={self.g:g} and pmax={self.pmax:g} must be in (0, 1], kmin_kb={self.kmin_kb:g} at most "
                f"kmax_kb={self.kmax_kb:g}, and rise_us={self.rise_us:g} positive"
            )


SETS = {
    "paper": DcqcnSettings(
        "Zhu et al. 2015, table of section 5, 40G: recalled, not read again", 5, 200, 0.01, scale_ecn=False,
        scale_rates=False,
    ),
    "hpcc": DcqcnSettings(
        "HPCC's ns-3 settings 'dcqcn' (production, scaled with the port)", 100, 400, 0.2, alpha_us=1, cut_us=4,
        rise_us=300, fast=1, byte_mb=0, additive_mbps=5, hyper_mbps=50,
    ),
    "hpcc-paper": DcqcnSettings(
        "HPCC's ns-3 settings 'dcqcn_paper' (the paper's timers, production thresholds)", 100, 400, 0.2, alpha_us=50,
        cut_us=50, rise_us=55, fast=1, byte_mb=0, additive_mbps=5, hyper_mbps=50,
    ),
    "fast": DcqcnSettings(
        "assumed: tuned here for 200G NICs (megascale network tune-dcqcn's grid, docs/network.md)", 100, 400, 0.2,
        alpha_us=10, cut_us=10, cnp_us=10, rise_us=10, fast=3, byte_mb=1, additive_mbps=125, hyper_mbps=625,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SwiftSettings:
    """Parameters of Swift. Times are in microseconds, windows in packets.

    Attributes:
        base_us, hop_us: the target delay of a path is `base_us` plus `hop_us` per link.
        ai: additive increase of the window per round trip.
        beta: multiplicative decrease, relative to the excess of the delay.
        max_cut: largest cut of the window, as a fraction.
        flow_range_us: maximum delay that flow scaling adds to the target; 0: no flow scaling.
        flow_least, flow_most: windows at which flow scaling adds the maximum, and nothing.
        least: smallest window; packets of windows below 1 are paced.
        first: initial window; 0: the window that fills the path, since RDMA NICs start at line rate.
    """

    source: str = "htsim's defaults, each called a guess there: beta, max_cut, ai, flow scaling 5 x base"
    base_us: float = 20.0
    hop_us: float = 3.05
    ai: float = 1.0
    beta: float = 0.8
    max_cut: float = 0.5
    flow_range_us: float = 100.0
    flow_least: float = 0.1
    flow_most: float = 100.0
    least: float = 0.001
    first: float = 0.0

    def __post_init__(self) -> None:
        for key in ("base_us", "hop_us", "ai", "flow_range_us"):
            if getattr(self, key) < 0:
                raise ConfigError(f"swift.{key}={getattr(self, key):g} is negative; delays and steps must be 0 or more")
        is_positive = min(self.base_us, self.beta, self.least) > 0
        if not is_positive or self.first < 0 or not 0 < self.max_cut < 1:
            raise ConfigError(
                f"swift: base_us={self.base_us:g}, beta={self.beta:g} and least={self.least:g} must be positive, "
                f"max_cut={self.max_cut:g} between 0 and 1, first={self.first:g} 0 or more"
            )
        if not 0 < self.flow_least < self.flow_most:
            raise ConfigError(
                f"swift.flow_least={self.flow_least:g} must be positive and below flow_most={self.flow_most:g}"
            )

    def flow_scaling(self) -> tuple[float, float]:
        """Return (a, shift) in us: flow scaling adds a / sqrt(window) + shift, limited to 0 and `flow_range_us`."""
        a = self.flow_range_us / (1 / sqrt(self.flow_least) - 1 / sqrt(self.flow_most))
        return a, -a / sqrt(self.flow_most)
