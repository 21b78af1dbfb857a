"""Flaps (outages of a link for seconds): the stall of a connection, and the choice of retransmission timers.

A queue pair whose packets are lost sends them again each time its timer expires. After its last retry it gives up: NCCL
returns an error and the job restarts. The timer is 4.096 us x 2^NCCL_IB_TIMEOUT (InfiniBand's local ACK time-out), and
NCCL_IB_RETRY_CNT is the number of retries. With adaptive retransmission (a setting of the NIC) the timer starts at some
microseconds and doubles up to this value, and the queue pair gives up after the same total time.
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
ADAPTIVE_US = 16.0  # assumed: first adaptive timer; the NIC's minimum is 4 us
MAX_RETRIES = 7  # the queue pair's context has three bits for the retries


def compute_timer(timeout: int) -> float:
    """Return the seconds of a value of NCCL_IB_TIMEOUT."""
    return float(4.096e-6 * 2.0**timeout)


class Retransmissions(NamedTuple):
    """Seconds from a loss to each retransmission (`times`), and until the queue pair gives up (`end`)."""

    times: Any
    end: float


def list_retransmissions(timeout: int, retries: int, adaptive_us: float = 0.0) -> Retransmissions:
    """Return the retransmissions of a lost packet under these timers."""
    full = compute_timer(timeout)
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
    """Stalls of a connection by flaps.

    Attributes:
        seconds: [n] seconds from the beginning of a flap until data moves again; inf if the queue pair gives up.
        end: seconds until the queue pair gives up.
    """

    seconds: Floats
    end: float


def compute_stalls(durations: Floats, timeout: int, retries: int, adaptive_us: float = 0.0) -> Stalls:
    """Return how long flaps of these durations (seconds, [n]) stall a connection.

    The first packet is assumed lost when the flap begins: a busy connection loses one within microseconds.
    """
    if (durations < 0).any():
        raise ConfigError(f"a flap of {durations.min():g} s: durations must be 0 or more")
    times, end = list_retransmissions(timeout, retries, adaptive_us)
    index = np.searchsorted(times, durations, side="left")
    return Stalls(np.append(times, np.inf)[index], end)


@dataclass(frozen=True)
class TimerOutcome:
    """The outcome of one timer setting for a set of flaps.

    Attributes:
        timeout, retries: values of NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT.
        adaptive: whether retransmission is adaptive.
        abort: probability that a flap ends in an error of NCCL.
        idle: mean seconds from the end of a flap until data moves again, over flaps without an error.
        stalled: mean seconds from the beginning of a flap until data moves again, over the same flaps.
        gives_up: seconds until the queue pair gives up.
        cost: mean seconds that a flap costs the job, restarts included.
    """

    timeout: int
    retries: int
    adaptive: bool
    abort: float
    idle: float
    stalled: float
    gives_up: float
    cost: float


def score_setting(
    durations: Floats, timeout: int, retries: int, adaptive: bool, restart: float, dead: float
) -> TimerOutcome:
    """Score one setting against flaps of these durations.

    Args:
        restart: seconds that the job loses if NCCL gives up.
        dead: share of losses from which the link never returns.
    """
    times, end = compute_stalls(durations, timeout, retries, ADAPTIVE_US if adaptive else 0.0)
    survives = np.isfinite(times)
    abort = float(1 - survives.mean())
    stalled = 0.0
    idle = 0.0
    if survives.any():
        stalled = float(times[survives].mean())
        idle = float((times - durations)[survives].mean())
    flap_cost = (1 - abort) * stalled + abort * (end + restart)
    cost = (1 - dead) * flap_cost + dead * (end + restart)
    return TimerOutcome(timeout, retries, adaptive, abort=abort, idle=idle, stalled=stalled, gives_up=end, cost=cost)


def rank_settings(durations: Floats, restart: float, dead: float, adaptive: bool | None) -> list[TimerOutcome]:
    """Return the outcomes of all settings, cheapest first. `adaptive`: None tries both."""
    timers = []
    for timeout in TIMEOUTS:
        for retries in range(1, MAX_RETRIES + 1):
            for is_adaptive in _list_adaptive(adaptive):
                timers.append(score_setting(durations, timeout, retries, is_adaptive, restart, dead))
    return sorted(timers, key=lambda outcome: (outcome.cost, outcome.gives_up))


def _list_adaptive(adaptive: bool | None) -> tuple[bool, ...]:
    return (False, True) if adaptive is None else (adaptive,)


@dataclass(frozen=True)
class Advice:
    """The cheapest timer setting, and how certain it is.

    The certainty comes from other sets of flaps, which are resampled or redrawn.

    Attributes:
        table: outcomes with MAX_RETRIES, for each time-out with and without adaptive retransmission.
        agreement: share of the other sets in which `best` costs at most 10% more than the set's cheapest setting.
        regret: 90th percentile over the other sets of the additional cost of `best`, in seconds per flap.
        flaps: number of observed durations, 0 for an assumed distribution.
    """

    best: TimerOutcome
    table: list[TimerOutcome]
    agreement: float
    regret: float
    flaps: int


def list_lognormal_quantiles(median: float, sigma: float, count: int = 2000) -> Floats:
    """Return `count` evenly spaced quantiles of a log-normal distribution, instead of random samples."""
    from statistics import NormalDist

    quantiles = (np.arange(count) + 0.5) / count
    return median * np.exp(sigma * np.array([NormalDist().inv_cdf(float(x)) for x in quantiles]))


def read_durations(path: Path) -> Floats:
    """Return the durations in a file with one number of seconds per line. Raises DataError if it is malformed."""
    try:
        values = np.array([float(line) for line in read_text(path).split()])
    except (OSError, ValueError) as error:
        raise DataError(f"--flaps={path}: {error}; give seconds, one per line, or a median such as --flaps 3") from None
    if not len(values) or (values < 0).any() or not np.isfinite(values).all():
        raise DataError(f"--flaps={path} must hold at least one duration, all 0 or more; one per line, in seconds")
    return values


def advise_timers(
    median: float | None, sigma: float, observed: Floats | None, restart: float, dead: float,
    adaptive: bool | None = None, draws: int = 60, seed: int = 0,
) -> Advice:  # fmt: skip
    """Return the cheapest setting, and how certain it is.

    Observed durations are resampled. Without them, other log-normal distributions are drawn: with a median within a
    factor of about 1.5, and a sigma between 0.5 and 1.5.

    Args:
        median, sigma: of the assumed log-normal distribution of durations, in seconds.
        observed: observed durations, which replace the distribution.
        restart: seconds that the job loses if NCCL gives up.
        dead: share of losses from which the link never returns.
        adaptive: whether retransmission is adaptive; None: both are tried.
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
        durations = list_lognormal_quantiles(median, sigma)
        resamples = [
            list_lognormal_quantiles(median * float(np.exp(rng.normal(0, 0.4))), float(rng.uniform(0.5, 1.5)), 400)
            for _ in range(draws)
        ]
    best = rank_settings(durations, restart, dead, adaptive)[0]
    additional_costs = []
    agreements = 0
    for resample in resamples:
        best_cost = rank_settings(resample, restart, dead, adaptive)[0].cost
        advised_cost = score_setting(resample, best.timeout, best.retries, best.adaptive, restart, dead).cost
        additional_costs.append(advised_cost - best_cost)
        if advised_cost <= 1.1 * best_cost:
            agreements += 1
    table = []
    for timeout in TIMEOUTS:
        for is_adaptive in _list_adaptive(adaptive):
            table.append(score_setting(durations, timeout, MAX_RETRIES, is_adaptive, restart, dead))
    regret = float(np.percentile(additional_costs, 90))
    flaps = 0 if observed is None else len(observed)
    return Advice(best, table, agreement=agreements / draws, regret=regret, flaps=flaps)


def format_environment(best: TimerOutcome, description: str) -> str:
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
