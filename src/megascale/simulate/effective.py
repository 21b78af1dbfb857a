"""Effective training time of a long run, by Monte Carlo simulation of faults; and the best checkpoint interval.

Hosts fail independently. A fault costs its detection, a restart, the work since the last committed checkpoint and, if
all spares are in use, the wait for a repaired host. Each checkpoint stalls the step for a moment. The effective share
is the time of useful steps divided by the wall-clock time: the paper's "effective training time" (section 6.2:
iterations x iteration time / total time).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

DAY = 86400.0
# A trial with more faults than this is given up and has infinite time, since its job would not finish in useful time.
MAX_FAULTS = 10_000


@dataclass(frozen=True)
class FaultRates:
    """Rates of faults, and times of recovery in seconds.

    Attributes:
        host_mtbf_days: mean time between faults of one host, in days.
        detect: time until the faulty host is known, diagnostics included.
        restart: time from then until the first step, with the checkpoint loaded.
        manual_share: share of faults that need a person.
        manual: additional time of these faults.
        spares: number of spare hosts.
        repair_days: mean time until a faulty host is repaired and becomes a spare, in days.
        save_stall: time by which a checkpoint delays the step.
    """

    host_mtbf_days: float = 540.0
    detect: float = 600.0
    restart: float = 300.0
    manual_share: float = 0.1
    manual: float = 3600.0
    spares: int = 8
    repair_days: float = 2.0
    save_stall: float = 5.0


# Sources of the defaults, for reports.
SOURCES = {
    "host_mtbf_days": "paper section 6.2: over 100 restarts in several weeks, taken as 100 in 5 weeks on 1,536 hosts",
    "detect": "paper section 6.3: detection and diagnostics under 10 minutes on average",
    "restart": "paper section 6.3: caught up within 15 minutes of the crash, less detection",
    "manual_share": "paper section 6.3: over 90% of exceptions handled automatically",
    "manual": "assumed",
    "spares": "assumed",
    "repair_days": "assumed",
    "save_stall": "paper section 4.4: several seconds",
}


@dataclass(frozen=True)
class LongRunOutcome:
    """Wall-clock time of many simulated runs.

    Attributes:
        wall: [trials] wall-clock seconds; infinite for trials that were given up.
        work: seconds of steps that each trial needs.
        faults: [trials] number of faults.
        interval: seconds of steps between checkpoints.
    """

    wall: np.ndarray
    work: float
    faults: np.ndarray
    interval: float

    @property
    def effective(self) -> np.ndarray:
        """Share of the wall-clock time that is spent on useful steps: [trials]."""
        return self.work / self.wall

    def quantile(self, share: float) -> float:
        """Return a quantile over trials of the effective share."""
        return float(np.quantile(self.effective, share))


def compute_young_daly_interval(faults: FaultRates, hosts: int) -> float:
    """Return the best interval in seconds, to first order: sqrt(2 x stall x mean time between faults of the job)."""
    return float(np.sqrt(2.0 * faults.save_stall * faults.host_mtbf_days * DAY / hosts))


def estimate_first_order_share(faults: FaultRates, hosts: np.ndarray | float) -> np.ndarray:
    """Return the effective share at the best checkpoint interval, to first order.

    The formula assumes enough spares, and no fault during a recovery. It is within two percentage points of
    `simulate_run` if spares suffice. Searches over many numbers of hosts use it.
    """
    mean_between_faults = faults.host_mtbf_days * DAY / np.asarray(hosts, dtype=float)
    interval = np.sqrt(2.0 * max(faults.save_stall, 0.01) * mean_between_faults)
    lost_seconds = faults.detect + faults.restart + faults.manual_share * faults.manual + interval / 2.0
    return np.asarray(1.0 / (1.0 + faults.save_stall / interval + lost_seconds / mean_between_faults))


def simulate_run(
    work: float, hosts: int, faults: FaultRates, interval: float, trials: int = 400, seed: int = 0
) -> LongRunOutcome:
    """Simulate the job `trials` times from start to end.

    Args:
        work: seconds of steps that the job needs.
        hosts: number of hosts, all of which must be healthy.
        interval: seconds of steps between checkpoints.
        seed: calls with equal seeds have equal faults, so that intervals can be compared without noise.
    """
    mean_between_faults = faults.host_mtbf_days * DAY / hosts
    cycle = interval + faults.save_stall
    # Attempts at an interval fail with probability 1 - exp(-cycle / mean).
    with np.errstate(over="ignore"):
        expected_faults = max(1.0, work / interval) * np.expm1(
            min(interval, work) / interval * cycle / mean_between_faults
        )
    if expected_faults > MAX_FAULTS:
        return LongRunOutcome(np.full(trials, np.inf), work, np.full(trials, MAX_FAULTS), interval)
    wall = np.zeros(trials)
    done_work = np.zeros(trials)
    fault_counts = np.zeros(trials, dtype=int)
    # Time at which each spare is available again: when the faulty host that it replaced is repaired.
    available_at = np.zeros((trials, min(max(1, faults.spares), MAX_FAULTS)))  # no trial uses more spares
    generators = [np.random.default_rng([seed, trial]) for trial in range(trials)]
    is_running = np.ones(trials, dtype=bool)
    for _ in range(MAX_FAULTS):
        active = np.flatnonzero(is_running)
        if not len(active):
            break
        # For each trial: time to the fault, whether it needs a person, time of the repair.
        draws = np.empty((len(active), 3))
        for row, trial in enumerate(active):
            generator = generators[trial]
            draws[row] = (generator.exponential(), generator.random(), generator.exponential())
        failure_times = draws[:, 0] * mean_between_faults
        # Wall-clock time to the end without a fault: the remaining work, and a checkpoint per complete interval.
        remaining = work - done_work[active]
        needed = remaining + np.floor(remaining / interval) * faults.save_stall
        is_finished = failure_times >= needed
        finished = active[is_finished]
        wall[finished] += needed[is_finished]
        is_running[finished] = False
        failed = active[~is_finished]
        failure_times = failure_times[~is_finished]
        draws = draws[~is_finished]
        done_work[failed] += np.floor(failure_times / cycle) * interval
        fault_counts[failed] += 1
        manual = np.where(draws[:, 1] < faults.manual_share, faults.manual, 0.0)
        wall[failed] += failure_times + (faults.detect + faults.restart + manual)
        repair = draws[:, 2] * faults.repair_days * DAY
        if faults.spares:
            spare = available_at[failed].argmin(axis=1)
            wall[failed] = np.maximum(wall[failed], available_at[failed, spare])
            available_at[failed, spare] = wall[failed] + repair
        else:
            wall[failed] += repair
    wall[is_running] = np.inf
    return LongRunOutcome(wall, work, fault_counts, interval)


def find_best_interval(
    work: float, hosts: int, faults: FaultRates, trials: int = 200, seed: int = 0
) -> tuple[float, list[tuple[float, float]]]:
    """Return the best checkpoint interval from a grid around that of Young and Daly.

    Returns:
        (best interval in seconds, [(interval, mean effective share), ...] for the whole grid).
    """
    middle = compute_young_daly_interval(replace(faults, save_stall=max(faults.save_stall, 0.01)), hosts)
    grid = middle * np.geomspace(1 / 8, 8, 13)
    curve = []
    for interval in grid:
        outcome = simulate_run(work, hosts, faults, float(interval), trials, seed)
        curve.append((float(interval), float(outcome.effective.mean())))
    return max(curve, key=lambda point: point[1])[0], curve
