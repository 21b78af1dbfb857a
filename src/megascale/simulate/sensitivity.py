"""Sensitivities of a step's time: its change if one figure of the cluster or the calibration changes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.scenario import Scenario
from megascale.simulate.step import estimate_step


class _Figure(NamedTuple):
    """A figure of a cluster file, by section and key."""

    section: str
    key: str


# Figures that `compute_sensitivities` changes, by name.
FIGURES = {
    "GPU peak": _Figure("gpu", "peak_tflops"),
    "HBM bandwidth": _Figure("gpu", "memory_gbs"),
    "NVLink bandwidth": _Figure("inside", "bus"),
    "NIC bandwidth": _Figure("between", "gbs"),
    "share of slow hosts": _Figure("stragglers", "slow_hosts"),
    "how slow they are": _Figure("stragglers", "slow_by"),
    "TP overlap residual": _Figure("overlap", "tp_residual"),
    "collectives slow compute": _Figure("overlap", "slowdown"),
}


def scale_cluster(cluster: ClusterSpec, section_name: str, key: str, factor: float) -> ClusterSpec:
    """Return the cluster with one figure multiplied by `factor`.

    All bandwidths of a link scale together, and so do the peaks of a GPU.
    """
    section = getattr(cluster, section_name)
    updates: dict[str, object] = {}
    if section_name in ("inside", "between") and key in ("gbs", "bus"):
        updates = {
            "gbs": section.gbs * factor,
            "bus": [[ranks, gbs * factor] for ranks, gbs in section.bus],
            "p2p_gbs": section.p2p_gbs * factor,
        }
    elif key == "peak_tflops":
        updates = {key: section.peak_tflops * factor}
        if section.float8_tflops is not None:
            updates["float8_tflops"] = section.float8_tflops * factor
    else:
        updates = {key: getattr(section, key) * factor}
    return cluster.model_copy(update={section_name: section.model_copy(update=updates)})


def _scale_figure(scenario: Scenario, section_name: str, key: str, factor: float) -> Scenario:
    """Return the scenario with a figure multiplied by `factor`.

    A figure that the calibration has fitted replaces the cluster's, so it is the one that is multiplied.
    """
    calibration = scenario.calibration
    fitted_value = getattr(calibration.constants, key, None)
    if fitted_value is None:
        return replace(scenario, cluster=scale_cluster(scenario.cluster, section_name, key, factor))
    constants = replace(calibration.constants, **{key: fitted_value * factor})
    return replace(scenario, calibration=replace(calibration, constants=constants))


def compute_sensitivities(scenario: Scenario, change: float = 0.2) -> dict[str, tuple[float, float]]:
    """Return the relative change of the step's time if a figure falls and if it rises, by figure.

    The figure with the largest effect comes first.

    Args:
        change: relative change of each figure.
    """
    base_seconds = estimate_step(scenario, check_memory=False).seconds
    effects = {}
    for name, figure in FIGURES.items():
        lower_scenario = _scale_figure(scenario, figure.section, figure.key, factor=1 - change)
        higher_scenario = _scale_figure(scenario, figure.section, figure.key, factor=1 + change)
        effect_of_fall = estimate_step(lower_scenario, check_memory=False).seconds / base_seconds - 1
        effect_of_rise = estimate_step(higher_scenario, check_memory=False).seconds / base_seconds - 1
        effects[name] = (effect_of_fall, effect_of_rise)
    return dict(sorted(effects.items(), key=lambda item: -max(abs(effect) for effect in item[1])))
