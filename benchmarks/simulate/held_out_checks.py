"""Checks A10 to A13 on held-out rows: bands, H100s and H200s under this engine and others, stacks on A100s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.simulate.published_rows import (
    LARGE,
    VTRAIN_FILE,
    Rows,
    anchor_file,
    full_sharding_rows,
    korthikanti,
    later_peers,
    list_rounds,
    load_h100_runs,
    load_round,
    load_round_predictions,
    nemo_h100,
    strong_scaling,
    vtrain,
    vtrain_development,
    weak_scaling,
)
from benchmarks.simulate.score import (
    FITTED,
    NOTHING,
    AnchorCheck,
    ScoreColumn,
    column,
    constants_of,
    describe_split,
    efficiency_control,
    listing,
    percent,
    predict,
    scored,
)
from megascale.simulate.calibration import Calibration, load_calibration
from megascale.simulate.cluster import ClusterSpec, load_cluster
from megascale.simulate.prediction_band import list_feature_ranges
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.software import find_stack
from megascale.simulate.step import estimate_step

# Rounds of own runs that nothing was fitted on, and the cluster of each.
ROUNDS = {"h100-fifth": "h100-host", "h200-fifth": "h200-host"}
# Share of measured steps that bands are to hold, in percent, and how far from it still passes.
COVERAGE_TARGET, TOLERANCE = 80.0, 10.0
# Most of the A100 rows of other stacks that may lie outside their bands, in percent.
MAXIMUM_OUTSIDE = 25.0


def check_unseen_runs() -> AnchorCheck:
    """Return A11: the fifth round of own runs, predicted with constants of runs that were measured earlier."""
    title = (
        "own engine on 1, 2 and 4 H100 and on 1 and 2 H200, configurations never measured before, by the model "
        "frozen before them"
    )
    shipped = list_rounds()
    missing = [name for name in ROUNDS if name not in shipped]
    if missing:
        return AnchorCheck("A11", title, skipped=f"no measurement is shipped of round {', '.join(missing)}")
    rounds = [_UnseenRound.load(name, cluster) for name, cluster in ROUNDS.items()]
    predicted = np.concatenate([item.predicted for item in rounds])
    seconds = np.concatenate([item.rows.seconds for item in rounds])
    inside = np.concatenate([item.inside for item in rounds])
    width = np.concatenate([item.width for item in rounds])
    overall = scored(
        "fitted on earlier runs, event level, both machines",
        percent(predicted, seconds),
        float(np.mean(inside)),
        float(np.mean(width)),
    )
    columns = [overall]
    for item in rounds:
        columns.extend(item.columns())
    figures = {
        "mean": (overall.mean, 3.0, "%"),
        "worst": (overall.worst, 10.0, "%"),
        "coverage off 80": coverage_error(overall),
    }
    fitted = "; ".join(f"{item.engine.name}: {constants_of(item.engine)}" for item in rounds)
    return AnchorCheck(
        "A11",
        title,
        figures,
        f"nothing of these rows; calibrations {fitted}",
        (describe_split("own-fifth"),),
        tuple(
            line for item in rounds for line in listing(item.rows, item.predicted, np.zeros(len(item.rows), dtype=bool))
        ),
        columns=tuple(columns),
    )


@dataclass(frozen=True)
class _UnseenRound:
    """A round of own runs on one cluster, with the event-level predictions of `simulate predict`.

    Attributes:
        predicted: step times in seconds, one per row, like `inside` (whether the band holds the measured step) and
            `width` (of the band, relative to the prediction).
    """

    cluster: ClusterSpec
    engine: Calibration
    rows: Rows
    predicted: np.ndarray
    inside: np.ndarray
    width: np.ndarray

    @classmethod
    def load(cls, name: str, cluster_name: str) -> _UnseenRound:
        """Predict each measured run of round `name`."""
        cluster = load_cluster(cluster_name)
        engine = load_calibration(None, cluster.name, "megascale")
        measured = anchor_file("own-runs")[name]["seconds"]
        estimates, seconds = [], []
        for prediction in load_round_predictions(name)[1]:
            if prediction.name not in measured:
                continue
            config, base = prediction.config("auto"), find_stack(prediction.software)
            scenario = Scenario(config, prediction.gpus, cluster, engine, make_engine_software(config, base), base=base)
            estimates.append(estimate_step(scenario, "event"))
            seconds.append(float(measured[prediction.name]))
        return cls(
            cluster=cluster,
            engine=engine,
            rows=load_round(name),
            predicted=np.array([estimate.seconds for estimate in estimates]),
            inside=np.array(
                [estimate.low <= step <= estimate.high for estimate, step in zip(estimates, seconds, strict=True)]
            ),
            width=np.array([(estimate.high - estimate.low) / estimate.seconds for estimate in estimates]),
        )

    def columns(self) -> tuple[ScoreColumn, ...]:
        """Score this round alone: the event level, the closed form with and without constants, and the control."""
        if self.cluster.name == "h100-host":
            earlier = load_h100_runs()
        else:
            earlier = load_round("h200")
        control = efficiency_control(self.rows, earlier)
        machine = self.cluster.name
        return (
            scored(
                f"{machine}: {FITTED} on {len(self.engine.residuals)} earlier runs, event level",
                percent(self.predicted, self.rows.seconds),
                float(np.mean(self.inside)),
                float(np.mean(self.width)),
            ),
            column(f"{machine}: {FITTED}, closed form", self.cluster, self.rows, self.engine, "megascale"),
            column(f"{machine}: {NOTHING}, closed form", self.cluster, self.rows, None, "megascale"),
            scored(f"{machine}: control, the earlier runs' efficiency", percent(control, self.rows.seconds)),
        )


def check_nemo() -> AnchorCheck:
    """A12: NVIDIA's published steps on H100 that are held out, by constants of those that are not."""
    title = "NeMo and Megatron-Bridge on 8 to 2,048 H100, bfloat16 and float8: held-out rows of public tables"
    cluster = load_cluster("h100-dgx")
    rows, development = nemo_h100()
    held_out, development_rows = rows.subset(~development), rows.subset(development)
    nemo = load_calibration(None, cluster.name, "nemo")
    score = column(f"{FITTED} on {len(development_rows)} development rows", cluster, held_out, nemo, "nemo")
    rented, peers = load_cluster("h100-host"), later_peers("peers")
    control = efficiency_control(held_out, development_rows)
    columns = (
        score,
        column(NOTHING, cluster, held_out, None, "nemo"),
        column("development rows", cluster, development_rows, nemo, "nemo"),
        column("Megatron-Core measured here, development", rented, peers, None, "megatron-core"),
        scored("control: development rows' efficiency", percent(control, held_out.seconds)),
    )
    figures = {"mean": (score.mean, 4.0, "%"), "coverage off 80": coverage_error(score)}
    predicted = predict(cluster, held_out, nemo.constants)
    return _check("A12", title, figures, held_out, predicted, nemo, (describe_split("nemo-h100"),), columns)


def check_a100_stacks(folder: Path | None) -> AnchorCheck:
    """A13: whether the bands of stacks on A100s hold their held-out steps; nothing is fitted."""
    paper = load_cluster("a100-roce")
    columns = [column("Korthikanti et al. 2022, Megatron-LM", paper, korthikanti(), None, "megatron-2023")]
    for table in full_sharding_rows():
        held_out = table.rows.subset(~table.development)
        if len(held_out) and table.cluster.startswith("a100"):
            columns.append(
                column("PyTorch's FSDP (YaFSDP's table)", load_cluster(table.cluster), held_out, None, "fsdp")
            )
    if folder is not None and (folder / VTRAIN_FILE).is_file():
        measured = vtrain(folder)
        held_out = measured.subset(~vtrain_development(measured))
        columns.append(column("vTrain, held-out half", load_cluster("a100-hdr"), held_out, None, "megatron-deepspeed"))
    count = sum(score.rows for score in columns)
    outside = 100.0 * sum(score.rows * (1.0 - (score.covered or 0.0)) for score in columns) / count
    return AnchorCheck(
        "A13",
        f"bands of other stacks on A100s, {count} held-out rows, nothing fitted",
        {"outside": (outside, MAXIMUM_OUTSIDE, "%")},
        "nothing",
        (
            describe_split("korthikanti-2022", "fsdp", "vtrain-multi"),
            "after a first score of 25% of Korthikanti's rows inside, the band with nothing fitted was made that of "
            "the worst group of development rows instead of quantiles of all rows",
            "PyTorch's FSDP: after a first score of 19.1% mean error, passes of eager kernels were counted "
            "(development rows asked for them)",
        ),
        columns=tuple(columns),
    )


def coverage_error(score: ScoreColumn) -> tuple[float, float, str]:
    return abs(100.0 * (score.covered or 0.0) - COVERAGE_TARGET), TOLERANCE, " points"


def _check(
    key: str,
    title: str,
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
        title,
        figures,
        f"nothing of these rows; calibration {calibration.name}: {constants_of(calibration)}",
        notes,
        listing(rows, predicted, fitted),
        columns=tuple(columns),
    )


def unfitted_evidence(cluster: ClusterSpec, rows: Rows) -> Calibration:
    """Return the errors and ranges of rows for bands of similar rows without a fit."""
    off = np.log(predict(cluster, rows) / rows.seconds)
    return Calibration(
        "nothing fitted",
        cluster.name,
        residuals=tuple(off.tolist()),
        rows=rows.names,
        ranges=list_feature_ranges(rows.cases),
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
