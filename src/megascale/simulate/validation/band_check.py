"""A10: whether bands hold what they say, on held-out rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megascale.simulate.calibration import Calibration, load_calibration
from megascale.simulate.cluster import ClusterSpec, load_cluster
from megascale.simulate.prediction_band import ranges_of
from megascale.simulate.validation.anchors import (
    LARGE,
    VTRAIN_FILE,
    Rows,
    load_round,
    strong_scaling,
    vtrain,
    vtrain_development,
    weak_scaling,
)
from megascale.simulate.validation.score import AnchorCheck, column, describe_split, predict


def unfitted_evidence(cluster: ClusterSpec, rows: Rows) -> Calibration:
    """Return the errors and ranges of rows for bands of similar rows without a fit."""
    off = np.log(predict(cluster, rows) / rows.seconds)
    return Calibration(
        "nothing fitted", cluster.name, residuals=tuple(off.tolist()), rows=rows.names, ranges=ranges_of(rows.cases)
    )


def check_bands(cluster: ClusterSpec, folder: Path | None) -> list[AnchorCheck]:
    """A10: how many held-out rows lie inside P10 to P90, and how wide that is."""
    table = strong_scaling()
    shipped = load_calibration(None, cluster.name)
    h200, engine = load_cluster("h200-host"), load_calibration("h200-engine", "h200-host")
    parts = [
        column("paper from 3,072 GPUs", cluster, table.subset(table.gpus >= LARGE), shipped),
        column("530B", cluster, weak_scaling()[0], shipped),
        column("own second round", h200, load_round("h200-second"), engine),
    ]
    if folder is not None and (folder / VTRAIN_FILE).is_file():
        hdr, rows = load_cluster("a100-hdr"), vtrain(folder)
        ours = vtrain_development(rows)
        held_out, evidence = rows.subset(~ours), unfitted_evidence(hdr, rows.subset(ours))
        parts.append(column("vTrain, held-out half, by its development rows' errors", hdr, held_out, evidence))
    count = sum(p.rows for p in parts)
    covered = 100.0 * sum(p.rows * (p.covered or 0.0) for p in parts) / count
    width = 100.0 * sum(p.rows * (p.width or 0.0) for p in parts) / count
    return [
        AnchorCheck(
            "A10",
            f"bands on {count} held-out rows: coverage of P10 to P90 (80 wanted) and mean width",
            {"coverage off 80": (abs(covered - 80.0), 8.0, " points"), "width": (width, 15.0, "%")},
            "nothing of these rows; widths were set on development rows",
            (f"covered {covered:.0f}%", describe_split("paper-large", "weak-scaling", "own-second", "vtrain-multi")),
            columns=tuple(parts),
        )
    ]
