"""Where the widths of bands come from: errors on development rows, by group of conditions. Nothing held out is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale.simulate.calibration import Z90, Constants
from megascale.simulate.cluster import ClusterSpec, load_cluster
from megascale.simulate.validation.anchors import (
    Rows,
    ablation,
    h200_peers,
    own_first,
    paper_development,
    vtrain,
    vtrain_development,
)
from megascale.simulate.validation.score import TABLE_CONSTANTS, fit_rows, predict

COVERED = 0.8


def errors(cluster: ClusterSpec, rows: Rows, constants: Constants = Constants()) -> np.ndarray:
    """ln(predicted / measured)."""
    return np.asarray(np.log(predict(cluster, rows, constants) / rows.seconds))


def conformal(sizes: np.ndarray) -> float:
    """What COVERED of rows like these stay below: the split-conformal quantile of absolute errors."""
    ordered = np.sort(np.abs(sizes))
    rank = int(np.ceil(COVERED * (len(ordered) + 1)))
    return float(ordered[min(rank, len(ordered)) - 1])


def ends(signed: np.ndarray) -> tuple[float, float]:
    """P10 and P90 of errors like these, outwards to the next rank."""
    ordered, n = np.sort(signed), len(signed)
    tail = (1.0 - COVERED) / 2.0
    low, high = int(np.floor(tail * (n + 1))), int(np.ceil((1.0 - tail) * (n + 1)))
    return float(ordered[max(low, 1) - 1]), float(ordered[min(high, n) - 1])


def _all_of(cluster: ClusterSpec, rows: Rows, names: Sequence[str]) -> Constants:
    return fit_rows(cluster, rows, names, np.ones(len(rows), dtype=bool)).constants


def another_series() -> float:
    """Spread of one series' steps under constants fitted on another of the same machine."""
    paper, host = load_cluster("a100-roce"), load_cluster("h200-host")
    peers, own = h200_peers(), own_first()
    found = [
        errors(paper, ablation()[0], _all_of(paper, paper_development(), TABLE_CONSTANTS)),
        errors(host, own, _all_of(host, peers, ("compute",))),
        errors(host, peers, _all_of(host, own, ("compute", "tp_residual"))),
    ]
    return conformal(np.concatenate(found)) / Z90


def each_gpu_doubling() -> float:
    """Spread a doubling of GPUs beyond a fit: the paper's rows to 1,024 by those to 256 and by those to 512."""
    cluster, rows = load_cluster("a100-roce"), paper_development()
    found = []
    for most in (256, 512):
        beyond = rows.subset(rows.gpus > most)
        constants = fit_rows(cluster, rows, TABLE_CONSTANTS, rows.gpus <= most).constants
        found.append(errors(cluster, beyond, constants) / np.log2(beyond.gpus / most))
    return conformal(np.concatenate(found)) / Z90


def nothing_fitted(folder: Path) -> tuple[float, float]:
    """P10 and P90 with nothing fitted. Needs vTrain's rows."""
    measured = vtrain(folder)
    sets = [
        ("a100-hdr", measured.subset(vtrain_development(measured))),
        ("a100-roce", paper_development()),
        ("a100-roce", ablation()[0]),
        ("h200-host", h200_peers()),
        ("h200-host", own_first()),
    ]
    return ends(np.concatenate([errors(load_cluster(name), rows) for name, rows in sets]))
