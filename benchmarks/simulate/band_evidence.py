"""Evidence for band widths: errors on development rows per group of conditions. No held-out row is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.simulate.published_rows import (
    Rows,
    ablation,
    full_sharding_rows,
    h200_peers,
    later_peers,
    load_first_round,
    load_h100_runs,
    nemo_development,
    paper_development,
    vtrain,
    vtrain_development,
)
from benchmarks.simulate.score import TABLE_CONSTANTS, fit_rows, predict
from megascale.simulate.calibration import Z90, Constants, load_calibration
from megascale.simulate.cluster import ClusterSpec, load_cluster
from megascale.simulate.prediction_band import COVERED, compute_band_ends

VTRAIN = "vTrain"


def errors(cluster: ClusterSpec, rows: Rows, constants: Constants = Constants()) -> np.ndarray:
    """ln(predicted / measured)."""
    return np.asarray(np.log(predict(cluster, rows, constants) / rows.seconds))


def conformal(sizes: np.ndarray) -> float:
    """Return the split-conformal quantile: the share COVERED of absolute errors stays below it."""
    ordered = np.sort(np.abs(sizes))
    rank = int(np.ceil(COVERED * (len(ordered) + 1)))
    return float(ordered[min(rank, len(ordered)) - 1])


def _spread(parts: Iterable[np.ndarray]) -> float:
    """Relative standard deviation of a normal distribution whose band holds COVERED of these errors."""
    return conformal(np.concatenate(list(parts))) / Z90


def _under(machine: str, rows: Rows, calibration: str) -> np.ndarray:
    """Errors of rows on a machine under the constants of a shipped calibration."""
    return errors(load_cluster(machine), rows, load_calibration(calibration, machine).constants)


def another_series() -> float:
    """Spread of one series' steps under constants of another of the same machine and stack."""
    return _spread(
        [
            _under("a100-roce", ablation()[0], "a100-roce"),
            _under("h200-host", later_peers("peers-h200"), "h200-host"),
        ]
    )


def unfitted_stack_spread() -> float:
    """Spread under constants of another stack on the same machine."""
    return _spread(
        [
            _under("h200-host", load_first_round(), "h200-host"),
            _under("h200-host", h200_peers(), "h200-engine"),
            _under("h100-host", load_h100_runs(), "h100-host"),
            _under("h100-host", later_peers("peers"), "h100-engine"),
        ]
    )


def unfitted_machine_spread() -> float:
    """Spread under constants of the same stack on another machine."""
    return _spread(
        [
            _under("h100-host", load_h100_runs(), "h200-engine"),
            _under("h200-host", load_first_round(), "h100-engine"),
            _under("h100-host", later_peers("peers"), "h200-host"),
            _under("h200-host", h200_peers(), "h100-host"),
            _under("h200-host", later_peers("peers-h200"), "h100-host"),
        ]
    )


def unfitted_stack_and_machine_spread() -> float:
    """Spread under constants of another stack on another machine."""
    return _spread(
        [
            _under("h100-host", load_h100_runs(), "h200-host"),
            _under("h200-host", load_first_round(), "h100-host"),
            _under("h100-host", later_peers("peers"), "h200-engine"),
            _under("h200-host", h200_peers(), "h100-engine"),
            _under("h100-dgx", nemo_development(), "h100-host"),
        ]
    )


def without_power() -> float:
    """Return P90 of ln(measured / predicted) of steps on H100s whose cluster gives no sustained GEMM rate."""
    limited = load_cluster("h100-host")
    unlimited = limited.model_copy(update={"power": None})
    return -compute_band_ends(errors(unlimited, load_h100_runs()))[0]


def spread_per_doubling(folder: Path) -> float:
    """Spread a doubling of GPUs beyond a fit: drifts of series under constants of other series. Needs vTrain's rows.

    A drift is the slope of errors over doublings of GPUs. Fits of a series' own smaller rows are not evidence: those to
    256 and to 512 GPUs do not decide their constant, which is said of such a fit wherever one is made.
    """
    paper, hdr = load_cluster("a100-roce"), load_cluster("a100-hdr")
    rows = paper_development()
    engine_rows = load_first_round()
    measured = vtrain(folder)
    megatron, ours = rows.subset(rows.first), rows.subset(~rows.first)
    unfitted = measured.subset(vtrain_development(measured))
    samples = [
        _drift(megatron, errors(paper, megatron, _all_of(paper, ours))),
        _drift(ours, errors(paper, ours, _all_of(paper, megatron))),
        _drift(engine_rows, _under("h200-host", engine_rows, "h200-host")),
        _drift(unfitted, errors(hdr, unfitted)),
    ]
    return conformal(np.array(samples)) / Z90


def _all_of(cluster: ClusterSpec, rows: Rows) -> Constants:
    return fit_rows(cluster, rows, TABLE_CONSTANTS, np.ones(len(rows), dtype=bool)).constants


def _drift(rows: Rows, off: np.ndarray) -> float:
    """Return the slope of errors over doublings of GPUs."""
    return float(np.polyfit(np.log2(rows.gpus.astype(float)), off, 1)[0])


def vtrain_unfitted(folder: Path) -> np.ndarray:
    """Errors of vTrain's development rows with nothing fitted."""
    measured = vtrain(folder)
    return errors(load_cluster("a100-hdr"), measured.subset(vtrain_development(measured)))


def load_error_groups(folder: Path) -> dict[str, np.ndarray]:
    """Errors with nothing fitted, by group of one machine and one stack. Needs vTrain's rows."""
    paper, table = load_cluster("a100-roce"), paper_development()
    host, rented = load_cluster("h200-host"), load_cluster("h100-host")
    techniques = errors(paper, ablation()[0])
    return {
        VTRAIN: vtrain_unfitted(folder),
        "Megatron-LM in the paper": errors(paper, table.subset(table.first)),
        "MegaScale in the paper": np.concatenate([errors(paper, table.subset(~table.first)), techniques]),
        "Megatron-Core on H200": np.concatenate([errors(host, h200_peers()), errors(host, later_peers("peers-h200"))]),
        "Megatron-Core on H100": errors(rented, later_peers("peers")),
        "this engine on H200": errors(host, load_first_round()),
        "this engine on H100": errors(rented, load_h100_runs()),
        "NeMo on H100": errors(load_cluster("h100-dgx"), nemo_development()),
    }


def unfitted_spread(folder: Path) -> tuple[float, float]:
    """P10 and P90 with nothing fitted on known machines and stacks: those of the groups furthest out.

    What is predicted is a group of its own, so quantiles are of groups and not of their rows. vTrain's group, which
    `KNOWN_PAIRS` has a width for, is left out.
    """
    quantiles = [
        compute_band_ends(errors_of_group)
        for name, errors_of_group in load_error_groups(folder).items()
        if name != VTRAIN
    ]
    return min(low for low, _ in quantiles), max(high for _, high in quantiles)


def unseen_spread(folder: Path) -> tuple[float, float]:
    """P10 of the group that is predicted fastest and P90 of the slowest; full sharding's groups are among them."""
    groups = list(load_error_groups(folder).values())
    for table in full_sharding_rows():
        if table.development.any():
            groups.append(errors(load_cluster(table.cluster), table.rows.subset(table.development)))
    quantiles = [compute_band_ends(group) for group in groups]
    return min(low for low, _ in quantiles), max(high for _, high in quantiles)
