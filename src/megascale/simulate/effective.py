"""Effective time of a long run: Monte Carlo of faults, detection, spares and checkpoints; the best interval.

A job needs so many seconds of stepping on so many hosts. Hosts fail independently; a fault costs its detection, a
restart, the work since the last committed checkpoint and, with no spare at hand, the wait for one. Saving stalls
the step for a moment every interval. The effective share is stepping over wall-clock time, the paper's "effective
training time" (section 6.2: iterations x iteration time / total time).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

DAY = 86400.0
# Trials advance together; a job that needs more faults than this in a trial will not finish in useful time.
MOST_FAULTS = 100_000


@dataclass(frozen=True)
class FaultRates:
    """Rates at which hosts fail, and times in which the job recovers, in seconds.

    Attributes:
        host_mtbf_days: mean time between faults of one host.
        detect: until the fault is known and the faulty host named, diagnostics included.
        restart: until the first step after that, checkpoint loaded.
        manual_share, manual: share of faults that need a person, and how long that takes.
        spares: hosts that stand by.
        repair_days: until a faulty host is back as a spare.
        save_stall: for which a checkpoint holds the step up.
    """

    host_mtbf_days: float = 540.0
    detect: float = 600.0
    restart: float = 300.0
    manual_share: float = 0.1
    manual: float = 3600.0
    spares: int = 8
    repair_days: float = 2.0
    save_stall: float = 5.0


# Where the defaults come from, for reports.
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
        wall: seconds of each trial.
        work: seconds of stepping each needs.
        faults: of each trial.
        interval: seconds between checkpoints.
    """

    wall: np.ndarray
    work: float
    faults: np.ndarray
    interval: float

    @property
    def effective(self) -> np.ndarray:
        """Share of the wall-clock time spent stepping towards the end, of each trial."""
        return self.work / self.wall

    def quantile(self, share: float) -> float:
        """Quantile of the effective share."""
        return float(np.quantile(self.effective, share))


def young_daly(faults: FaultRates, hosts: int) -> float:
    """First-order best interval in seconds: sqrt(2 x stall x mean time between faults of the job)."""
    return float(np.sqrt(2.0 * faults.save_stall * faults.host_mtbf_days * DAY / hosts))


def first_order_share(faults: FaultRates, hosts: np.ndarray | float) -> np.ndarray:
    """Return the share of time spent stepping at the best checkpoint interval, to first order.

    It assumes no fault during a recovery and enough spares. Searches over many numbers of hosts use it; it is within
    two points of `simulate_run` while spares last.
    """
    mean = faults.host_mtbf_days * DAY / np.asarray(hosts, dtype=float)
    interval = np.sqrt(2.0 * max(faults.save_stall, 0.01) * mean)
    lost = faults.detect + faults.restart + faults.manual_share * faults.manual + interval / 2.0
    return np.asarray(1.0 / (1.0 + faults.save_stall / interval + lost / mean))


def simulate_run(
    work: float, hosts: int, faults: FaultRates, interval: float, trials: int = 400, seed: int = 0
) -> LongRunOutcome:
    """Run the job `trials` times to its end.

    Args:
        work: seconds of stepping needed.
        hosts: that must all be healthy.
        interval: seconds of stepping between checkpoints.
        seed: two calls with the same seed see the same faults, so that intervals compare without noise.
    """
    mean = faults.host_mtbf_days * DAY / hosts
    wall, done = np.zeros(trials), np.zeros(trials)
    count = np.zeros(trials, dtype=int)
    # When each borrowed spare's faulty predecessor is repaired; a slot in the past is a spare at hand.
    pool = np.zeros((trials, max(1, faults.spares)))
    streams = [np.random.default_rng([seed, i]) for i in range(trials)]
    running = np.ones(trials, dtype=bool)
    cycle = interval + faults.save_stall
    for _ in range(MOST_FAULTS):
        active = np.flatnonzero(running)
        if not len(active):
            break
        draws = np.array([(r.exponential(), r.random(), r.exponential()) for r in (streams[i] for i in active)])
        failure_times = draws[:, 0] * mean
        # Wall-clock time to the end if nothing fails: the work left and its whole intervals' saves.
        remaining = work - done[active]
        need = remaining + np.floor(remaining / interval) * faults.save_stall
        ends = failure_times >= need
        finished = active[ends]
        wall[finished] += need[ends]
        running[finished] = False
        hit = active[~ends]
        failure_times = failure_times[~ends]
        draws = draws[~ends]
        done[hit] += np.floor(failure_times / cycle) * interval
        count[hit] += 1
        down = faults.detect + faults.restart + np.where(draws[:, 1] < faults.manual_share, faults.manual, 0.0)
        wall[hit] += failure_times + down
        if faults.spares:
            slot = pool[hit].argmin(axis=1)
            wall[hit] = np.maximum(wall[hit], pool[hit, slot])
            pool[hit, slot] = wall[hit] + draws[:, 2] * faults.repair_days * DAY
        else:
            wall[hit] += draws[:, 2] * faults.repair_days * DAY
    return LongRunOutcome(wall, work, count, interval)


def best_interval(
    work: float, hosts: int, faults: FaultRates, trials: int = 200, seed: int = 0
) -> tuple[float, list[tuple[float, float]]]:
    """(best seconds between checkpoints, [(interval, mean effective share), ...]) over a grid around Young-Daly."""
    middle = young_daly(replace(faults, save_stall=max(faults.save_stall, 0.01)), hosts)
    grid = middle * np.geomspace(1 / 8, 8, 13)
    curve = []
    for interval in grid:
        outcome = simulate_run(work, hosts, faults, float(interval), trials, seed)
        curve.append((float(interval), float(outcome.effective.mean())))
    return max(curve, key=lambda point: point[1])[0], curve
