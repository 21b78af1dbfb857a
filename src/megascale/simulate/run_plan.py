"""The plan of an existing run: the results of `megascale plan` and `megascale simulate step` for its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megascale import config as configuration
from megascale.core.schedule import ActionKind
from megascale.core.untrusted_files import is_small_file
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.simulate.calibration import load_calibration
from megascale.simulate.cluster import list_shipped_clusters, load_cluster
from megascale.simulate.planner.layout_cost import make_plan
from megascale.simulate.planner.layout_figures import DEVICES
from megascale.simulate.scenario import Scenario, make_engine_software, match_hosts
from megascale.simulate.software import choose_engine_stack, find_stack
from megascale.simulate.step import estimate_step

_DEFAULT_DEVICE = "A100"  # gives the device memory if no cluster is named
_MAX_BARS = 6000  # bars in the picture of a schedule


def plan_run(run: Path, world: int, cluster: str = "") -> dict[str, Any]:
    """Return `LayoutCost.to_dict` with the replayed schedule and the step model's prediction.

    `bars` is a list of [stage, is backward, chunk, micro-batch, start, end] with times in forwards of a mean layer. It
    is empty if there are too many bars to draw. `predicted` has the prediction of the step on `cluster`. It is None if
    `cluster` is empty or the step cannot be predicted, and `not_predicted` is the reason.

    Args:
        world: number of ranks; 0 if unknown: those of the configuration.
        cluster: name of a cluster that comes with the simulator, or "".

    Raises MegascaleError for a configuration that cannot be planned, or for an unknown cluster.
    """
    if cluster and cluster not in list_shipped_clusters():
        raise ConfigError(f"cluster={cluster[:60]} is unknown; clusters are {', '.join(list_shipped_clusters())}")
    file = run / "config.toml"
    if not is_small_file(file):
        raise DataError(f"{run.name} has no config.toml that can be read: what it trains is unknown")
    try:
        config = configuration.load(file, keep_unknown_parts=True)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the config.toml of {run.name} is damaged: {error}") from None
    if not world:
        world = config.parallel.model_ranks * (config.parallel.data or 1)
    machine = load_cluster(cluster) if cluster else None
    device_gib = DEVICES[_DEFAULT_DEVICE] if machine is None else machine.gpu.memory_gib
    if machine is not None:
        config, machine = match_hosts(config, machine)
    plan = make_plan(config, world, device_gib)
    timeline = plan.timeline
    graph = timeline.graph
    bars = []
    if int(graph.is_compute.sum()) <= _MAX_BARS:
        bars = [
            [
                int(graph.stage[n]), int(graph.kind[n] != ActionKind.FORWARD), int(graph.chunk[n]),
                int(graph.microbatch[n]), round(float(timeline.start[n]), 3), round(float(timeline.end[n]), 3),
            ]
            for n in np.flatnonzero(graph.is_compute).tolist()
        ]  # fmt: skip
    report = plan.to_dict() | {"bars": bars, "makespan": float(timeline.makespan), "precision": config.train.precision}
    predicted = None
    reason = ""
    if machine is not None:
        try:
            software = make_engine_software(config, find_stack(choose_engine_stack(machine)))
            calibration = load_calibration(None, machine.name, software.family)
            scenario = Scenario(config, world, machine, calibration, software, "megascale")
            estimate = estimate_step(scenario, check_memory=False)
            predicted = {
                "seconds": estimate.seconds,
                "low": estimate.low,
                "high": estimate.high,
                "mfu": estimate.mfu,
                "tokens_per_second": estimate.tokens_per_second,
                "parts": dict(estimate.parts),
                "cautions": list(estimate.cautions),
            }
        except MegascaleError as error:
            reason = str(error)
    return report | {
        "predicted": predicted,
        "not_predicted": reason,
        "cluster": cluster,
        "clusters": list_shipped_clusters(),
    }
