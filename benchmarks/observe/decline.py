"""Check that causes of a decline are named, on replayed jobs whose steps grow for a known reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.observe.replayed_job import Extra, replayed
from benchmarks.observe.replayed_runs import keep
from benchmarks.observe.synthetic_spans import Job
from megascale.observe.analysis.decline import Decline, choose_windows, explain_decline
from megascale.observe.analysis.rank_times import read_rank_times
from megascale.observe.store.frames import COUNTER
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

STEPS = 300
JOB = Job(tensor=2, stages=4, virtual=2, data=16, microbatches=16)
# Of about 1 s, at the end of the run; it grows from nothing over the second half. Stages with slack hide some of it.
_ADDED_NS = 150e6
_CLOCK = 1980.0
_SLOW_CLOCK = 1720.0
_POWER_CAP = 4.0
_THROTTLED, _PACE = 8, 1.15

CAUSES = ("garbage collection", "allocator retries", "throttling", "samples", "late launch", "")


def _grown(steps: int) -> Array:
    """Return factors that grow from 0 in the first half to 1 at the end, [steps, 1]."""
    return np.clip(2 * np.arange(steps) / (steps - 1) - 1, 0, 1)[:, None]


def extra_of(cause: str, world: int, steps: int, random: Any) -> tuple[Extra, list[int]]:
    """Return the time that a cause adds, and the ranks whose GPU counters show throttling."""
    grown, shape = _grown(steps), (steps, world)
    sample = random.random(shape) < 3 / world  # about three ranks a step, others each time
    if cause == "garbage collection":
        pauses = random.random(shape) < 1 / 64  # a rank collects every 64th step; the heap grows
        return Extra(pause_ns=pauses * (5e6 + _ADDED_NS * grown), pauses=pauses), []
    if cause == "allocator retries":
        late = sample * (grown > 0)
        return Extra(late_ns=late * _ADDED_NS * grown, retries=late * random.integers(1, 4, shape)), []
    if cause == "throttling":
        ranks = random.choice(world, _THROTTLED, replace=False)
        pace = np.ones(shape)
        pace[:, ranks] += (_PACE - 1) * (grown > 0)
        return Extra(pace=pace), ranks.tolist()
    if cause == "samples":
        return Extra(samples_ns=_ADDED_NS * grown * np.exp(0.3 * random.standard_normal(shape))), []
    if cause == "late launch":
        return Extra(late_ns=sample * _ADDED_NS * grown * random.uniform(0.7, 1.3, shape)), []
    return Extra(), []


def gpu_counters(world: int, throttled: list[int], steps: int) -> Callable[[int, int], Array]:
    """Counters of all GPUs at a step's beginning: those throttled are so in the second half of the run."""

    def sample(step: int, current: int) -> Array:
        slow = np.zeros(world, bool)
        slow[throttled] = step > steps / 2
        records = np.zeros(2 * world, COUNTER)
        records["time_ns"] = current + 1_000_000
        records["name"][:world], records["name"][world:] = b"gpu_throttle_reasons", b"gpu_sm_clock_mhz"
        records["value"][:world] = np.where(slow, _POWER_CAP, 0.0)
        records["value"][world:] = np.where(slow, _SLOW_CLOCK, _CLOCK)
        records["device"] = np.tile([f"gpu{rank}".encode() for rank in range(world)], 2)
        return records

    return sample


def look(folder: Path) -> Decline:
    """Return the causes that the analysis names for a run."""
    with SpanTables(folder, threads=2) as tables:
        first, second, series = choose_windows(tables, 1)
        return explain_decline(lambda low, high: read_rank_times(tables, 1, low, high), first, second, tables, series)


def measure(folder: Path, runs: int, seed: int) -> dict[str, Any]:
    """`runs` replayed runs of each cause, and as many without any."""
    job = JOB
    record: dict[str, Any] = {"world": job.world, "steps": STEPS, "seed": seed, "runs": []}
    for number in range(runs):
        for cause in CAUSES:
            random = np.random.default_rng([seed, number, CAUSES.index(cause)])
            extra, throttled = extra_of(cause, job.world, STEPS, random)
            steps = replayed(job, STEPS, int(random.integers(1 << 30)), extra=extra)
            run = keep(folder / "replayed", job, steps, gpu_counters(job.world, throttled, STEPS))
            result = look(run)
            record["runs"].append(
                {
                    "cause": cause,
                    "named": [item.name for item in result.main_causes],
                    "growth": result.growth,
                    "shares": {item.name: item.share for item in result.causes},
                }
            )
    return record


def scores(record: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return for each cause the runs in which it ranked first, and the healthy runs without a decline."""
    result = {}
    for cause in CAUSES:
        local = [item for item in record["runs"] if item["cause"] == cause]
        good = sum(run["named"][:1] == [cause] if cause else not run["named"] for run in local)
        result[cause or "no decline"] = (good, len(local))
    return result


def missed(record: dict[str, Any]) -> list[str]:
    """Causes that were not named in every run."""
    return [f"decline: {name}: {good} of {of}" for name, (good, of) in scores(record).items() if good < of]


def lines(record: dict[str, Any]) -> list[str]:
    """The figures in words."""
    result = [f"decline: {record['world']:,} ranks, {record['steps']} steps, seed {record['seed']}"]
    for name, (good, of) in scores(record).items():
        local = [item for item in record["runs"] if (item["cause"] or "no decline") == name]
        growth = float(np.median([run["growth"] for run in local]))
        text = f"  {name}: {good} of {of}; steps {growth:+.1%}"
        if name != "no decline":
            share = float(np.median([run["shares"].get(name, 0.0) for run in local]))
            also = sorted({cause for run in local for cause in run["named"]} - {name})
            text += f", {share:.0%} of it put down to this" + (f"; also named: {', '.join(also)}" if also else "")
        result.append(text)
    return result
