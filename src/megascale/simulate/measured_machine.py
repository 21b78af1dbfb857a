"""A cluster file and a calibration out of what `megascale simulate measure` measured, on top of a shipped cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tomli_w

from megascale.simulate.calibration import Calibration
from megascale.simulate.cluster import ClusterSpec, Power, cluster_of
from megascale.simulate.kernel_times import wave_efficiency

# Idle power and exponent of a machine whose power was not told apart from its clock.
ASSUMED_IDLE, ASSUMED_EXPONENT = 0.35, 2.5


def cluster_from(figures: dict[str, Any], base: ClusterSpec, name: str) -> ClusterSpec:
    """Return `base` with every measured figure and its source replaced; other figures keep `base`'s source.

    A CPU has no published peak: the fastest GEMM stands for it.
    """
    tree = base.model_dump(exclude_none=True)
    sources: dict[str, str] = {k: f"not measured, of {base.name}: {v}" for k, v in base.sources.items()}
    how = f"measured {figures['date']} on {figures['device']}, torch {figures['torch']}"
    fastest = max(rate for *_, rate in figures["gemms"])
    cpu = figures["device"] == "cpu"

    def put(part: str, key: str, value: Any, source: str = "") -> None:
        tree[part][key] = value
        sources[f"{part}.{key}"] = f"{how}{': ' + source if source else ''}"

    tree["name"] = name
    tree["description"] = f"{figures['device']}, {how}; the rest as {base.name}"
    tree["gpu"]["name"] = figures["device"]
    put("gpu", "processors", figures["processors"])
    if cpu:
        put("gpu", "peak_tflops", fastest, "the fastest GEMM; a CPU has no printed peak")
        put("gpu", "memory_gbs", max(figures["copy_gbs"], figures["add_gbs"]), "the faster of copy and addition")
    else:
        put("gpu", "memory_gib", figures["memory_gib"])
    peak, bandwidth = tree["gpu"]["peak_tflops"], tree["gpu"]["memory_gbs"]
    half = tree["kernels"]["gemm_half_depth"]
    best = min(1.0, fastest / peak)
    put("kernels", "gemm_best", best, f"{fastest:.4g} TFLOP/s, the fastest of {len(figures['gemms'])} shapes")
    # What each shape would reach with whole waves and a long inner dimension; the median, so that one shape's luck
    # does not count.
    bare = sorted(
        rate / peak / (float(wave_efficiency(m, n, figures["processors"])) * k / (k + half))
        for m, n, k, rate in figures["gemms"]
    )
    put("kernels", "gemm", min(1.0, max(best, bare[len(bare) // 2])), "median shape over its wave and depth losses")
    put("kernels", "memory", min(1.0, min(figures["copy_gbs"], figures["add_gbs"]) / bandwidth), "copy and addition")
    table = [[length, rate] for length, rate in figures["attention"]]
    put("kernels", "attention", dict.fromkeys(tree["kernels"]["attention"], table), "PyTorch's fastest kernel")
    sustained_share = min(1.0, figures["sustained_tflops"] / peak)
    tree.pop("power", None)
    for key in Power.model_fields:
        sources.pop(f"power.{key}", None)
    tree["power"] = {"idle": ASSUMED_IDLE, "exponent": ASSUMED_EXPONENT}
    if figures["watts"]:
        watts = f" at {figures['watts']:.0f} W"
    else:
        watts = ""
    put("power", "gemm_sustained", sustained_share, f"8,192^3 for seconds on end{watts}" if not cpu else "for a while")
    sources["power.idle"] = sources["power.exponent"] = "assumed"
    if base.power is not None and base.power.float8_sustained is not None and not cpu:
        share = base.power.float8_sustained / base.power.gemm_sustained
        tree["power"]["float8_sustained"] = min(1.0, sustained_share * share)
        sources["power.float8_sustained"] = f"not measured, in proportion to the bfloat16 rates of {base.name}"
    if figures["collectives"]:
        put("inside", "bus", [[n, bus] for n, bus, *_ in figures["collectives"]], "all-gather over this host")
        put("inside", "p2p_gbs", figures["collectives"][0][2], "send and receive in a pair")
        put("inside", "latency_us", figures["collectives"][0][3], "the smallest all-gather of a pair")
        put("inside", "gbs", max(bus for _, bus, *_ in figures["collectives"]), "the fastest collective")
    tree["sources"] = sources
    return cluster_of(tree)


def calibration_from(figures: dict[str, Any], cluster: ClusterSpec) -> Calibration:
    """Return unfitted constants of a machine on which only kernels were measured, with the evidence."""
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


def cluster_toml(cluster: ClusterSpec) -> str:
    """A file that `load_cluster` reads."""
    return tomli_w.dumps(cluster.model_dump(exclude_none=True))
