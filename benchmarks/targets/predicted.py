"""Step times that the simulator said of cases before they were measured: targets_predicted.toml.

Each is for a case as it was, by TargetCase.key: a case that changes, or runs with other settings, has none until
`python -m benchmarks targets --predict >> targets_predicted.toml` says one, with that day's date. None is ever changed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache

from benchmarks.targets.cases import TargetCase, shipped

FILE = "targets_predicted.toml"
CLUSTER, CALIBRATION = "h200-host", "h200-engine"
# Replicas that machines of one, two, four and eight GPUs have.
REPLICAS = (1, 2, 4, 8)
# GB/s a direction of a GPU whose bytes NCCL moves through the host's memory, measured in a pair (dev/log.md).
HOST_MEMORY_GBS = 11.2


@cache
def predictions() -> Mapping[str, float]:
    """Seconds of a step by TargetCase.key."""
    result = tomllib.loads(shipped(FILE)).get("predicted", [])
    return {item["key"]: float(item["seconds"]) for item in result}


def predicted(case: TargetCase, replicas: int) -> float | None:
    """Return the predicted seconds of a step with so many replicas, or None."""
    return predictions().get(case.key(replicas))


def predict(case: TargetCase, replicas: int) -> tuple[float, float, float]:
    """Seconds of a step on H200s as the simulator says today, and its P10 and P90."""
    from megascale.simulate.calibration import load_calibration
    from megascale.simulate.cluster import load_cluster
    from megascale.simulate.scenario import Scenario, make_engine_software
    from megascale.simulate.software import MEGASCALE_H200
    from megascale.simulate.step import estimate_step

    cluster, config = load_cluster(CLUSTER), case.config(replicas)
    constants = load_calibration(CALIBRATION, cluster.name)
    if case.environment.get("NCCL_P2P_DISABLE") == "1":
        slow = {"bus": [[2, HOST_MEMORY_GBS]], "p2p_gbs": HOST_MEMORY_GBS}
        cluster = cluster.model_copy(update={"inside": cluster.inside.model_copy(update=slow)})
    software = make_engine_software(config, MEGASCALE_H200)
    result = estimate_step(Scenario(config, replicas * case.gpus, cluster, constants, software), "event")
    return result.seconds, result.low, result.high


def lines(cases: Iterable[TargetCase]) -> Iterable[str]:
    """Return TOML of the simulator's predictions for those cases on GPUs without any."""
    for case in cases:
        for replicas in REPLICAS if case.gpus else ():
            if not case.least <= replicas <= case.data or predicted(case, replicas) is not None:
                continue
            seconds, low, high = predict(case, replicas)
            yield "\n".join(
                [
                    "[[predicted]]",
                    f'case = "{case.name}"',
                    f"gpus = {replicas * case.gpus}",
                    f"seconds = {seconds:.4f}",
                    f"p10_p90 = [{low:.4f}, {high:.4f}]",
                    f'made = "{date.today().isoformat()}, {CLUSTER}, {CALIBRATION}"',
                    f'key = "{case.key(replicas)}"',
                    "",
                ]
            )
