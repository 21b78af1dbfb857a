"""A11 to A13: H100s under this engine and under other stacks, and other stacks on A100s, on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale.simulate.calibration import Calibration, load_calibration
from megascale.simulate.cluster import ClusterSpec, load_cluster
from megascale.simulate.measured_runs import load_predictions
from megascale.simulate.software import stack
from megascale.simulate.step import Scenario, engine_software, run
from megascale.simulate.validation.anchors import (
    VTRAIN_FILE,
    Rows,
    anchor_file,
    full_sharding_rows,
    korthikanti,
    later_peers,
    list_rounds,
    load_h100_runs,
    nemo_h100,
    own_runs,
    vtrain,
    vtrain_development,
)
from megascale.simulate.validation.score import (
    FITTED,
    NOTHING,
    AnchorCheck,
    ScoreColumn,
    column,
    constants_of,
    efficiency_control,
    listing,
    percent,
    predict,
    scored,
    seen,
)

ROUND = "h100-fifth"
# Share of measured steps that bands are to hold, in percent, and how far from it still passes.
WANTED, TOLERANCE = 80.0, 10.0
# Most of the A100 rows of other stacks that may lie outside their bands, in percent.
MOST_OUTSIDE = 25.0


def check_own_h100() -> AnchorCheck:
    """A11: the fifth round of own runs, by constants of the runs on H100 that were known before."""
    what = "own engine on 1, 2 and 4 H100, configurations never measured before, by the model frozen before them"
    if ROUND not in list_rounds():
        return AnchorCheck("A11", what, skipped=f"no measurement of round {ROUND} is shipped")
    cluster, rows = load_cluster("h100-host"), own_runs(ROUND)
    engine = load_calibration(None, cluster.name, "megascale")
    predicted, held = _event_level(cluster, engine)
    control = efficiency_control(rows, load_h100_runs())
    columns = (
        held,
        column(f"{FITTED}, closed form", cluster, rows, engine, "megascale"),
        column(f"{NOTHING}, closed form", cluster, rows, None, "megascale"),
        column("development rows", cluster, load_h100_runs(), engine, "megascale"),
        scored("control: the earlier runs' efficiency", percent(control, rows.seconds)),
    )
    figures = {"mean": (held.mean, 3.0, "%"), "worst": (held.worst, 10.0, "%"), "coverage off 80": _off(held)}
    return _check("A11", what, figures, rows, predicted, engine, (seen("own-fifth"),), columns)


def _event_level(cluster: ClusterSpec, engine: Calibration) -> tuple[np.ndarray, ScoreColumn]:
    """Return the round's steps as `simulate predict` says them, and their score."""
    measured = anchor_file("own-runs")[ROUND]["seconds"]
    estimates, seconds = [], []
    for one in load_predictions(ROUND)[1]:
        if one.name not in measured:
            continue
        config, base = one.config("auto"), stack(one.software)
        scenario = Scenario(config, one.gpus, cluster, engine, engine_software(config, base), base=base)
        estimates.append(run(scenario, "event"))
        seconds.append(float(measured[one.name]))
    predicted, told = np.array([one.seconds for one in estimates]), np.array(seconds)
    inside = [one.low <= step <= one.high for one, step in zip(estimates, seconds, strict=True)]
    width = [(one.high - one.low) / one.seconds for one in estimates]
    name = f"{FITTED} on {len(engine.residuals)} earlier runs, event level"
    return predicted, scored(name, percent(predicted, told), float(np.mean(inside)), float(np.mean(width)))


def check_nemo() -> AnchorCheck:
    """A12: NVIDIA's published steps on H100 that are held out, by constants of those that are not."""
    what = "NeMo and Megatron-Bridge on 8 to 2,048 H100, bfloat16 and float8: held-out rows of public tables"
    cluster = load_cluster("h100-dgx")
    rows, development = nemo_h100()
    held_rows, known = rows.subset(~development), rows.subset(development)
    nemo = load_calibration(None, cluster.name, "nemo")
    held = column(f"{FITTED} on {len(known)} development rows", cluster, held_rows, nemo, "nemo")
    rented, peers = load_cluster("h100-host"), later_peers("peers")
    control = efficiency_control(held_rows, known)
    columns = (
        held,
        column(NOTHING, cluster, held_rows, None, "nemo"),
        column("development rows", cluster, known, nemo, "nemo"),
        column("Megatron-Core measured here, development", rented, peers, None, "megatron-core"),
        scored("control: development rows' efficiency", percent(control, held_rows.seconds)),
    )
    figures = {"mean": (held.mean, 4.0, "%"), "coverage off 80": _off(held)}
    predicted = predict(cluster, held_rows, nemo.constants)
    return _check("A12", what, figures, held_rows, predicted, nemo, (seen("nemo-h100"),), columns)


def check_a100_stacks(folder: Path | None) -> AnchorCheck:
    """A13: whether the bands of stacks on A100s hold their held-out steps; nothing is fitted."""
    paper = load_cluster("a100-roce")
    columns = [column("Korthikanti et al. 2022, Megatron-LM", paper, korthikanti(), None, "megatron-2023")]
    for table in full_sharding_rows():
        held = table.rows.subset(~table.development)
        if len(held) and table.cluster.startswith("a100"):
            columns.append(column("PyTorch's FSDP (YaFSDP's table)", load_cluster(table.cluster), held, None, "fsdp"))
    if folder is not None and (folder / VTRAIN_FILE).is_file():
        measured = vtrain(folder)
        held = measured.subset(~vtrain_development(measured))
        columns.append(column("vTrain, held-out half", load_cluster("a100-hdr"), held, None, "megatron-deepspeed"))
    count = sum(one.rows for one in columns)
    outside = 100.0 * sum(one.rows * (1.0 - (one.covered or 0.0)) for one in columns) / count
    return AnchorCheck(
        "A13",
        f"bands of other stacks on A100s, {count} held-out rows, nothing fitted",
        {"outside": (outside, MOST_OUTSIDE, "%")},
        "nothing",
        (
            seen("korthikanti-2022", "fsdp", "vtrain-multi"),
            "after a first score of 25% of Korthikanti's rows inside, the band with nothing fitted was made that of "
            "the worst group of development rows instead of quantiles of all rows",
            "PyTorch's FSDP: after a first score of 19.1% mean error, passes of eager kernels were counted "
            "(development rows asked for them)",
        ),
        columns=tuple(columns),
    )


def _off(held: ScoreColumn) -> tuple[float, float, str]:
    return abs(100.0 * (held.covered or 0.0) - WANTED), TOLERANCE, " points"


def _check(
    key: str,
    what: str,
    figures: dict[str, tuple[float, float, str]],
    rows: Rows,
    predicted: np.ndarray,
    calibration: Calibration,
    notes: tuple[str, ...],
    columns: Sequence[ScoreColumn],
) -> AnchorCheck:
    fitted = np.zeros(len(rows), dtype=bool)
    return AnchorCheck(
        key,
        what,
        figures,
        f"nothing of these rows; calibration {calibration.name}: {constants_of(calibration)}",
        notes,
        listing(rows, predicted, fitted),
        columns=tuple(columns),
    )
