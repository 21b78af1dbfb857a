"""Where the widths of bands come from: errors on development rows, by group of conditions. Nothing held out is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale.simulate.calibration import Z90, Constants
from megascale.simulate.cluster import ClusterSpec, load_cluster
from megascale.simulate.prediction_band import COVERED, ends
from megascale.simulate.validation.anchors import (
    Rows,
    ablation,
    h200_peers,
    own_first,
    own_h100,
    paper_development,
    vtrain,
    vtrain_development,
)
from megascale.simulate.validation.score import TABLE_CONSTANTS, fit_rows, predict


def errors(cluster: ClusterSpec, rows: Rows, constants: Constants = Constants()) -> np.ndarray:
    """ln(predicted / measured)."""
    return np.asarray(np.log(predict(cluster, rows, constants) / rows.seconds))


def conformal(sizes: np.ndarray) -> float:
    """What COVERED of rows like these stay below: the split-conformal quantile of absolute errors."""
    ordered = np.sort(np.abs(sizes))
    rank = int(np.ceil(COVERED * (len(ordered) + 1)))
    return float(ordered[min(rank, len(ordered)) - 1])


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


def without_power() -> float:
    """Return P90 of ln(measured / predicted) of steps on H100s whose cluster gives no sustained GEMM rate."""
    limited = load_cluster("h100-host")
    unlimited = limited.model_copy(update={"power": None})
    return -ends(errors(unlimited, own_h100()))[0]


def each_gpu_doubling(folder: Path) -> float:
    """Spread a doubling of GPUs beyond a fit: drifts of series under constants of other series. Needs vTrain's rows.

    A drift is the slope of errors over doublings of GPUs. Fits of a series' own smaller rows are no evidence: those to
    256 and to 512 GPUs do not decide their constant, which is said of such a fit wherever one is made.
    """
    paper, host, hdr = load_cluster("a100-roce"), load_cluster("h200-host"), load_cluster("a100-hdr")
    rows, own, measured = paper_development(), own_first(), vtrain(folder)
    megatron, ours = rows.subset(rows.first), rows.subset(~rows.first)
    found = [
        _drift(megatron, errors(paper, megatron, _all_of(paper, ours, TABLE_CONSTANTS))),
        _drift(ours, errors(paper, ours, _all_of(paper, megatron, TABLE_CONSTANTS))),
        _drift(own, errors(host, own, _all_of(host, h200_peers(), ("compute",)))),
    ]
    unfitted = measured.subset(vtrain_development(measured))
    found.append(_drift(unfitted, errors(hdr, unfitted)))
    return conformal(np.array(found)) / Z90


def _drift(rows: Rows, off: np.ndarray) -> float:
    """How much errors grow with each doubling of GPUs: the slope of a line through them."""
    return float(np.polyfit(np.log2(rows.gpus.astype(float)), off, 1)[0])


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
