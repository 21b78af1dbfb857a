"""Step times of cases that the simulator predicted before they were measured: targets_predicted.toml.

TargetCase.make_key identifies the case. A case that changes, or runs with other settings, has no prediction until the
output of `python -m benchmarks targets --predict` is appended to that file. Its entries are never changed afterwards.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache

from benchmarks.targets.cases import TargetCase, read_shipped_file

FILE = "targets_predicted.toml"
CLUSTER = "h200-host"
CALIBRATION = "h200-engine"
# Numbers of replicas on machines of one, two, four and eight GPUs.
REPLICAS = (1, 2, 4, 8)
# GB/s per direction and GPU if NCCL moves bytes through the host's memory, measured on a pair of GPUs (dev/log.md).
HOST_MEMORY_GBS = 11.2


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step time in seconds, with its 10th and 90th percentiles."""

    seconds: float
    p10: float
    p90: float


@cache
def load_predictions() -> Mapping[str, float]:
    """Return the shipped step times in seconds by TargetCase.make_key."""
    tables = tomllib.loads(read_shipped_file(FILE)).get("predicted", [])
    return {table["key"]: float(table["seconds"]) for table in tables}


def find_predicted_seconds(case: TargetCase, replicas: int) -> float | None:
    """Return the shipped step time of the case with `replicas` replicas in seconds, or None."""
    return load_predictions().get(case.make_key(replicas))


def predict_step(case: TargetCase, replicas: int) -> StepPrediction:
    """Simulate a step of the case with `replicas` replicas on H200 GPUs."""
    from megascale.simulate.calibration import load_calibration
    from megascale.simulate.cluster import load_cluster
    from megascale.simulate.scenario import Scenario, make_engine_software
    from megascale.simulate.software import MEGASCALE_H200
    from megascale.simulate.step import estimate_step

    config = case.make_config(replicas)
    cluster = load_cluster(CLUSTER)
    constants = load_calibration(CALIBRATION, cluster.name)
    if case.environment.get("NCCL_P2P_DISABLE") == "1":
        slow_links = {"bus": [[2, HOST_MEMORY_GBS]], "p2p_gbs": HOST_MEMORY_GBS}
        cluster = cluster.model_copy(update={"inside": cluster.inside.model_copy(update=slow_links)})
    software = make_engine_software(config, MEGASCALE_H200)
    result = estimate_step(Scenario(config, replicas * case.gpus, cluster, constants, software), "event")
    return StepPrediction(result.seconds, p10=result.low, p90=result.high)


def format_new_predictions(cases: Iterable[TargetCase]) -> Iterator[str]:
    """Yield a TOML table for each case on GPUs, and each number of replicas, without a shipped prediction."""
    for case in cases:
        if case.gpus == 0:
            continue
        for replicas in REPLICAS:
            if not case.min_data <= replicas <= case.data:
                continue
            if find_predicted_seconds(case, replicas) is None:
                yield _format_prediction(case, replicas)


def _format_prediction(case: TargetCase, replicas: int) -> str:
    prediction = predict_step(case, replicas)
    lines = [
        "[[predicted]]",
        f'case = "{case.name}"',
        f"gpus = {replicas * case.gpus}",
        f"seconds = {prediction.seconds:.4f}",
        f"p10_p90 = [{prediction.p10:.4f}, {prediction.p90:.4f}]",
        f'made = "{date.today().isoformat()}, {CLUSTER}, {CALIBRATION}"',
        f'key = "{case.make_key(replicas)}"',
        "",
    ]
    return "\n".join(lines)
