"""Cluster file and calibration from the figures that `megascale simulate measure` measured, and a shipped cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tomli_w

from megascale.simulate.calibration import Calibration
from megascale.simulate.cluster import ClusterSpec, Power, validate_cluster
from megascale.simulate.kernel_times import wave_efficiency

# Assumed figures of [power]: `simulate measure` does not measure power and clock separately.
ASSUMED_IDLE = 0.35
ASSUMED_EXPONENT = 2.5


def make_cluster(figures: dict[str, Any], base: ClusterSpec, name: str) -> ClusterSpec:
    """Return the cluster `base` with the measured figures and their sources.

    Other figures and their sources are those of `base`. The peak of a CPU is the rate of its fastest GEMM, since CPUs
    have no published peak.
    """
    tree = base.model_dump(exclude_none=True)
    sources: dict[str, str] = {k: f"not measured, of {base.name}: {v}" for k, v in base.sources.items()}
    measurement = f"measured {figures['date']} on {figures['device']}, torch {figures['torch']}"
    fastest = max(rate for *_, rate in figures["gemms"])
    is_cpu = figures["device"] == "cpu"

    def set_figure(section: str, key: str, value: Any, source: str = "") -> None:
        tree[section][key] = value
        sources[f"{section}.{key}"] = f"{measurement}: {source}" if source else measurement

    tree["name"] = name
    tree["description"] = f"{figures['device']}, {measurement}; the rest as {base.name}"
    tree["gpu"]["name"] = figures["device"]
    set_figure("gpu", "processors", figures["processors"])
    if is_cpu:
        set_figure("gpu", "peak_tflops", fastest, "the fastest GEMM; a CPU has no printed peak")
        set_figure("gpu", "memory_gbs", max(figures["copy_gbs"], figures["add_gbs"]), "the faster of copy and addition")
    else:
        set_figure("gpu", "memory_gib", figures["memory_gib"])
    peak, bandwidth = tree["gpu"]["peak_tflops"], tree["gpu"]["memory_gbs"]
    half = tree["kernels"]["gemm_half_depth"]
    best = min(1.0, fastest / peak)
    set_figure("kernels", "gemm_best", best, f"{fastest:.4g} TFLOP/s, the fastest of {len(figures['gemms'])} shapes")
    # The share of peak that each shape would reach with whole waves and a long inner dimension. The median is used,
    # because single shapes may be unusually fast or slow.
    ideal_shares = []
    for m, n, k, rate in figures["gemms"]:
        waves = float(wave_efficiency(m, n, figures["processors"]))
        ideal_shares.append(rate / peak / (waves * k / (k + half)))
    ideal_shares.sort()
    median_share = ideal_shares[len(ideal_shares) // 2]
    set_figure("kernels", "gemm", min(1.0, max(best, median_share)), "median shape over its wave and depth losses")
    set_figure(
        "kernels", "memory", min(1.0, min(figures["copy_gbs"], figures["add_gbs"]) / bandwidth), "copy and addition"
    )
    table = [[length, rate] for length, rate in figures["attention"]]
    set_figure("kernels", "attention", dict.fromkeys(tree["kernels"]["attention"], table), "PyTorch's fastest kernel")
    sustained_share = min(1.0, figures["sustained_tflops"] / peak)
    tree.pop("power", None)
    for key in Power.model_fields:
        sources.pop(f"power.{key}", None)
    tree["power"] = {"idle": ASSUMED_IDLE, "exponent": ASSUMED_EXPONENT}
    watts = f" at {figures['watts']:.0f} W" if figures["watts"] else ""
    set_figure(
        "power",
        "gemm_sustained",
        sustained_share,
        f"8,192^3 for seconds on end{watts}" if not is_cpu else "for a while",
    )
    sources["power.idle"] = sources["power.exponent"] = "assumed"
    if base.power is not None and base.power.float8_sustained is not None and not is_cpu:
        share = base.power.float8_sustained / base.power.gemm_sustained
        tree["power"]["float8_sustained"] = min(1.0, sustained_share * share)
        sources["power.float8_sustained"] = f"not measured, in proportion to the bfloat16 rates of {base.name}"
    if figures["collectives"]:
        set_figure("inside", "bus", [[n, bus] for n, bus, *_ in figures["collectives"]], "all-gather over this host")
        set_figure("inside", "p2p_gbs", figures["collectives"][0][2], "send and receive in a pair")
        set_figure("inside", "latency_us", figures["collectives"][0][3], "the smallest all-gather of a pair")
        set_figure("inside", "gbs", max(bus for _, bus, *_ in figures["collectives"]), "the fastest collective")
    tree["sources"] = sources
    return validate_cluster(tree)


def make_calibration(figures: dict[str, Any], cluster: ClusterSpec) -> Calibration:
    """Return an uncalibrated calibration of a machine, whose rows are the measured kernels."""
    rows = [f"GEMM {m} x {n} x {k}: {rate:.4g} TFLOP/s" for m, n, k, rate in figures["gemms"]]
    rows += [f"attention, {length} tokens: {rate:.4g} TFLOP/s" for length, rate in figures["attention"]]
    rows += [
        f"sustained GEMM: {figures['sustained_tflops']:.4g} TFLOP/s",
        f"copy {figures['copy_gbs']:.4g} GB/s, addition {figures['add_gbs']:.4g} GB/s",
        f"launch of a small kernel: {figures['launch_us']:.3g} us of the host (stacks have their own: software.py)",
    ]
    rows += [f"all-gather over {n} ranks: {bus:.4g} GB/s" for n, bus, *_ in figures["collectives"]]
    provenance = f"{figures['date']}, megascale simulate measure; no steps were measured, so nothing is fitted"
    return replace(Calibration(cluster.name, cluster.name), rows=tuple(rows), provenance=provenance)


def format_cluster_toml(cluster: ClusterSpec) -> str:
    """Return the text of a file that `load_cluster` reads."""
    return tomli_w.dumps(cluster.model_dump(exclude_none=True))
