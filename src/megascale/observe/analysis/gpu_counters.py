"""Throttling, clocks and Xid errors of GPUs while steps ran, from the counters of their hosts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from megascale.observe.analysis.rank_times import RankTimes
from megascale.observe.analysis.slow_ranks import nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]
Gpu = tuple[int, str]  # host and device name in the counters

# NVML's bits of reasons for reduced clocks, without those for idle GPUs and for clocks that users set.
REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slow-down",
    0x0000000000000020: "heat",
    0x0000000000000040: "heat (hardware)",
    0x0000000000000080: "power brake",
}
_ALL_REASONS = sum(REASONS)
_REPORTED_FRACTION = 0.2  # report a GPU that is throttled in more than this fraction of the samples
_FRACTION_GROWTH = 0.1  # a GPU is newly throttled if that fraction has grown by more than this
_COMPUTE_GROWTH = 0.005  # smallest growth of compute time that is attributed to throttling
_LOW_CLOCK = 0.97  # report a clock below this fraction of the other GPUs' median clock


def read_time_range(times: RankTimes, first: int, last: int) -> tuple[int, int]:
    """Return begin and end of the steps `first` to `last`, nanoseconds on the common clock; (0, 0) if unknown."""
    mask = (times.steps >= first) & (times.steps <= last)
    begin = times.details["first"][:, mask]
    end = times.details["last"][:, mask]
    if not np.isfinite(begin).any() or not np.isfinite(end).any():
        return 0, 0
    return int(np.nanmin(begin)), int(np.nanmax(end))


def find_gpu(times: RankTimes, row: int) -> Gpu:
    """Return the GPU of a rank. A rank's device index is its position among the ranks of its host."""
    host = int(times.host[row])
    return host, f"gpu{int((times.host[:row] == host).sum())}"


def read_counter(tables: SpanTables, name: str, begin: int, end: int) -> dict[Gpu, Array]:
    """Return the values of a counter between two times (nanoseconds on the common clock) for each GPU."""
    rows = tables.query(
        "SELECT host, device, value FROM counters WHERE name = ? AND time_ns BETWEEN ? AND ? ORDER BY time_ns",
        [name, begin, end],
    )
    values_by_gpu: dict[Gpu, list[float]] = {}
    for host, device, value in zip(*(rows[key].tolist() for key in ("host", "device", "value")), strict=True):
        values_by_gpu.setdefault((host, device), []).append(value)
    return {gpu: np.array(values) for gpu, values in values_by_gpu.items()}


def measure_throttling(reasons: Array) -> tuple[float, str]:
    """Return the fraction of samples in which a GPU was throttled, and the most frequent reason (empty if none).

    Args:
        reasons: samples of the bits in REASONS.
    """
    bits = reasons.astype(np.int64)
    if not len(bits):
        return 0.0, ""
    fractions = {name: float(((bits & bit) > 0).mean()) for bit, name in REASONS.items()}
    return float(((bits & _ALL_REASONS) > 0).mean()), max(fractions, key=lambda name: fractions[name])


def describe_gpu(tables: SpanTables, times: RankTimes, rank: int, first: int, last: int) -> list[str]:
    """Return sentences that compare a rank's GPU with the job's other GPUs during the steps `first` to `last`."""
    begin, end = read_time_range(times, first, last)
    gpu = find_gpu(times, int(np.flatnonzero(times.ranks == rank)[0]))
    sentences = []
    xids = read_counter(tables, "gpu_xid", begin, end)
    if gpu in xids:
        listed = ", ".join(f"Xid {xid:.0f}" for xid in dict.fromkeys(xids[gpu].tolist()))
        sentences.append(f"its GPU reported {listed}")
    reasons = read_counter(tables, "gpu_throttle_reasons", begin, end)
    if gpu in reasons:
        fraction, reason = measure_throttling(reasons[gpu])
        other_fractions = [measure_throttling(values)[0] for key, values in reasons.items() if key != gpu]
        if other_fractions:
            usual = float(np.median(other_fractions))
        else:
            usual = 0.0
        if fraction > max(_REPORTED_FRACTION, usual + _REPORTED_FRACTION):
            sentences.append(
                f"its GPU was throttled in {fraction:.0%} of the seconds ({reason}), the other GPUs in {usual:.0%}"
            )
    clocks = read_counter(tables, "gpu_sm_clock_mhz", begin, end)
    if gpu in clocks and len(clocks) > 1:
        clock = float(np.median(clocks[gpu]))
        usual = float(np.median([np.median(values) for key, values in clocks.items() if key != gpu]))
        if clock < _LOW_CLOCK * usual:
            sentences.append(f"its GPU's clock was {clock:.0f} MHz, the other GPUs' {usual:.0f} MHz")
    return sentences


def find_newly_throttled(
    tables: SpanTables, early: RankTimes, late: RankTimes
) -> tuple[list[str], tuple[int, ...]] | None:
    """Find ranks with longer computes whose GPUs are throttled in the later window more than in the earlier one.

    Returns:
        Sentences and the ranks, or None if there are no such ranks.
    """
    ranges = [read_time_range(times, int(times.steps[0]), int(times.steps[-1])) for times in (early, late)]
    early_reasons = read_counter(tables, "gpu_throttle_reasons", *ranges[0])
    throttled: dict[Gpu, tuple[float, str]] = {}
    for gpu, reasons in read_counter(tables, "gpu_throttle_reasons", *ranges[1]).items():
        fraction, reason = measure_throttling(reasons)
        early_fraction = 0.0
        if gpu in early_reasons:
            early_fraction, _ = measure_throttling(early_reasons[gpu])
        if fraction - early_fraction > _FRACTION_GROWTH:
            throttled[gpu] = (fraction, reason)
    if not throttled:
        return None
    growth = nan_median(late.categories["compute"]) / nan_median(early.categories["compute"]) - 1
    rows = [r for r in range(len(late.ranks)) if find_gpu(late, r) in throttled and growth[r] > _COMPUTE_GROWTH]
    if not rows:
        return None
    ranks = tuple(int(late.ranks[r]) for r in rows)
    gpus = [find_gpu(late, r) for r in rows]
    fraction = float(np.mean([throttled[gpu][0] for gpu in gpus]))
    reason = Counter(throttled[gpu][1] for gpu in gpus).most_common(1)[0][0]
    listed = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    sentences = [
        f"the GPUs of {len(ranks)} ranks ({listed}) are throttled in {fraction:.0%} of the seconds ({reason}), and "
        "were not before"
    ]
    clocks = [read_counter(tables, "gpu_sm_clock_mhz", begin, end) for begin, end in ranges]
    if all(any(gpu in values for gpu in gpus) for values in clocks):
        before, after = (
            float(np.median(np.concatenate([values[gpu] for gpu in gpus if gpu in values]))) for values in clocks
        )
        sentences.append(f"their clock is {after:.0f} MHz, {before:.0f} MHz before")
    sentences.append(f"their computes take {float(np.nanmedian(growth[rows])):.1%} longer")
    return sentences, ranks
