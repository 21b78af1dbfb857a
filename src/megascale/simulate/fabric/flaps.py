"""Links that go down for seconds: whether connections survive, how long they stand, and which timers to set.

A queue pair whose packets are lost sends them again each time its timer runs out, and gives up after its retries: then
NCCL returns an error and the job restarts. The timer is 4.096 us x 2^NCCL_IB_TIMEOUT (InfiniBand's local ACK time-out),
the retries NCCL_IB_RETRY_CNT. With adaptive retransmission (a setting of the NIC) the timer starts at some microseconds
and doubles up to that value, and gives up after the same total.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megascale.config.text_files import read_text
from megascale.errors import ConfigError, DataError
from megascale.simulate.fabric.topology import Floats

TIMEOUTS = range(14, 25)
ADAPTIVE_US = 16.0  # assumed: first adaptive timer; the NIC's least base is 4 us
MOST_RETRIES = 7  # three bits in the queue pair's context


def timer(timeout: int) -> float:
    """Return the seconds of a value of NCCL_IB_TIMEOUT."""
    return float(4.096e-6 * 2.0**timeout)


class Retransmissions(NamedTuple):
    """Seconds after a loss: `times` of the retransmissions, and `end`, when the queue pair gives up."""

    times: Any
    end: float


def list_retransmissions(timeout: int, retries: int, adaptive_us: float = 0.0) -> Retransmissions:
    """Return the retransmissions of a lost packet under these timers."""
    full = timer(timeout)
    if not adaptive_us:
        return Retransmissions(full * np.arange(1.0, retries + 1), full * (retries + 1))
    elapsed = 0.0
    wait = min(adaptive_us * 1e-6, full)
    times = []
    while (elapsed := elapsed + wait) < full * retries:
        times.append(elapsed)
        wait = min(2 * wait, full)
    return Retransmissions(np.array(times), elapsed)


class Stalls(NamedTuple):
    """Seconds from a link's loss.

    Attributes:
        seconds: [n] until data moves again, per flap; inf if the queue pair gives up.
        end: until the queue pair gives up.
    """

    seconds: Floats
    end: float


def compute_stalls(durations: Floats, timeout: int, retries: int, adaptive_us: float = 0.0) -> Stalls:
    """Return how long flaps of these durations (seconds, [n]) stall a connection.

    The first packet is assumed lost when the flap begins: a busy connection loses one within microseconds.
    """
    if (durations < 0).any():
        raise ConfigError(f"a flap of {durations.min():g} s: durations are 0 or more")
    times, end = list_retransmissions(timeout, retries, adaptive_us)
    index = np.searchsorted(times, durations, side="left")
    return Stalls(np.append(times, np.inf)[index], end)


@dataclass(frozen=True)
class Timers:
    """The outcome of one timer setting for a set of flaps.

    Attributes:
        abort: probability that a flap ends in an error of NCCL.
        idle: mean seconds from the link's return until data moves again, over flaps without an abort.
        stalled: mean seconds from the loss until data moves again, over the same flaps.
        gives_up: seconds until a link that stays down is reported.
        cost: seconds of the job that a flap costs on average, restarts included.
    """

    timeout: int
    retries: int
    adaptive: bool
    abort: float
    idle: float
    stalled: float
    gives_up: float
    cost: float


def judge(durations: Floats, timeout: int, retries: int, adaptive: bool, restart: float, dead: float) -> Timers:
    """Score one setting against flaps of these durations.

    Args:
        restart: seconds that the job loses if NCCL gives up.
        dead: share of losses from which the link never returns.
    """
    times, end = compute_stalls(durations, timeout, retries, ADAPTIVE_US if adaptive else 0.0)
    lives = np.isfinite(times)
    abort = float(1 - lives.mean())
    stalled = float(times[lives].mean()) if lives.any() else 0.0
    if lives.any():
        idle = float((times - durations)[lives].mean())
    else:
        idle = 0.0
    recovery = (1 - abort) * stalled + abort * (end + restart)
    return Timers(timeout, retries, adaptive, abort, idle, stalled, end, (1 - dead) * recovery + dead * (end + restart))


def candidates(durations: Floats, restart: float, dead: float, adaptive: bool | None) -> list[Timers]:
    """Return all settings, cheapest first."""
    kinds = (False, True) if adaptive is None else (adaptive,)
    timers = [
        judge(durations, timeout, retries, kind, restart, dead)
        for timeout in TIMEOUTS
        for retries in range(1, MOST_RETRIES + 1)
        for kind in kinds
    ]
    return sorted(timers, key=lambda t: (t.cost, t.gives_up))


@dataclass(frozen=True)
class Advice:
    """Attributes:

    best: the setting.
    table: retries at most, each time-out with and without adaptive retransmission.
    agreement: share of the resampled or redrawn sets of flaps in which it costs at most 10% more than their own best.
    regret: what it costs more than their own best at the 90th percentile of those sets, seconds a flap.
    flaps: how many durations it rests on, 0 for an assumed distribution.
    """

    best: Timers
    table: list[Timers]
    agreement: float
    regret: float
    flaps: int


def lognormal(median: float, sigma: float, count: int = 2000) -> Floats:
    """Quantiles of a log-normal distribution: the same answer at each call."""
    from statistics import NormalDist

    quantiles = (np.arange(count) + 0.5) / count
    return median * np.exp(sigma * np.array([NormalDist().inv_cdf(float(x)) for x in quantiles]))


def read_durations(path: Path) -> Floats:
    """Seconds, one a line; DataError if it holds anything else."""
    try:
        values = np.array([float(line) for line in read_text(path).split()])
    except (OSError, ValueError) as error:
        raise DataError(f"--flaps={path}: {error}; give seconds, one a line, or a median such as --flaps 3") from None
    if not len(values) or (values < 0).any() or not np.isfinite(values).all():
        raise DataError(f"--flaps={path} must hold at least one duration, all 0 or more; one a line, in seconds")
    return values


def advise(
    median: float | None, sigma: float, observed: Floats | None, restart: float, dead: float,
    adaptive: bool | None = None, draws: int = 60, seed: int = 0,
) -> Advice:  # fmt: skip
    """Return the setting of least cost, and how certain it is.

    Observed durations are resampled for the certainty. Without them, the unknown parameters are drawn: the median
    within a factor of about 1.5 either way, the spread between 0.5 and 1.5.
    """
    if not (0 <= restart < np.inf and 0 <= dead <= 1 and 0 <= sigma < np.inf and (median is None or 0 < median < 1e6)):
        raise ConfigError(
            f"--restart={restart:g} is 0 or more, --dead={dead:g} lies in 0..1, --sigma={sigma:g} is 0 or more and the "
            f"median of --flaps{'' if median is None else f'={median:g}'} positive and under 10^6 s"
        )
    rng = np.random.default_rng(seed)
    if observed is not None:
        durations = observed
        resamples = [rng.choice(observed, len(observed)) for _ in range(draws)]
    else:
        assert median is not None
        durations = lognormal(median, sigma)
        resamples = [
            lognormal(median * float(np.exp(rng.normal(0, 0.4))), float(rng.uniform(0.5, 1.5)), 400)
            for _ in range(draws)
        ]
    best = candidates(durations, restart, dead, adaptive)[0]
    extra, agree = [], 0
    for resample in resamples:
        best_cost = candidates(resample, restart, dead, adaptive)[0].cost
        advised_cost = judge(resample, best.timeout, best.retries, best.adaptive, restart, dead).cost
        extra.append(advised_cost - best_cost)
        agree += advised_cost <= 1.1 * best_cost
    kinds = (False, True) if adaptive is None else (adaptive,)
    table = [judge(durations, t, MOST_RETRIES, k, restart, dead) for t in TIMEOUTS for k in kinds]
    return Advice(best, table, agree / draws, float(np.percentile(extra, 90)), 0 if observed is None else len(observed))


def environment(best: Timers, description: str) -> str:
    """Return the text for `megascale launch --resilience.environment=FILE`, which a shell's `.` reads too."""
    lines = [
        f"# {description}",
        f"# abort {best.abort:.2%} of flaps, {best.idle:.1f} s idle after the link is back, gives up after "
        f"{best.gives_up:.0f} s",
        f"NCCL_IB_TIMEOUT={best.timeout}",
        f"NCCL_IB_RETRY_CNT={best.retries}",
    ]
    setting = "0x1" if best.adaptive else "0x0"
    lines += [
        f"# On every NIC, as root (adaptive retransmission {'on' if best.adaptive else 'off'}):",
        f'# mlxreg -d DEVICE --yes --reg_name ROCE_ACCL --set "roce_adp_retrans_field_select=0x1,'
        f'roce_adp_retrans_en={setting}"',
    ]
    return "\n".join(lines) + "\n"
