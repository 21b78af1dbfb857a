"""Cluster files: figures of GPUs, hosts and links, each with its source. They are TOML; some are in `clusters/`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megascale.config.text_files import read_toml
from megascale.errors import ConfigError

# Kernels for attention. A cluster file must give the rates of a kernel that is used, except of "unfused".
ATTENTION_KERNELS = ("unfused", "flash1", "flash2", "cudnn")
# A bus bandwidth may exceed the nominal one, since switches that reduce halve the bytes.
_MAX_BUS_SHARE = 2.0


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _check_table(table: list[list[float]]) -> list[list[float]]:
    """Return a table that can be interpolated. Raises ValueError for another form or order of its rows."""
    is_form_right = bool(table) and all(len(row) == 2 and min(row) > 0 for row in table)
    if not is_form_right or any(following[0] <= row[0] for row, following in pairwise(table)):
        raise ValueError("rows are pairs of positive numbers, and the first number rises from row to row")
    return table


_Table = Annotated[list[list[float]], AfterValidator(_check_table)]


class GpuSpec(_Section):
    """An accelerator's figures."""

    name: str
    peak_tflops: float = Field(gt=0, description="dense bf16")
    processors: int = Field(ge=1, description="SMs: GEMM tiles run in waves of this many")
    memory_gbs: float = Field(gt=0, description="nominal HBM bandwidth")
    memory_gib: float = Field(gt=0, description="HBM size")
    float8_tflops: float | None = Field(None, gt=0, description="dense float8; absent: the GPU has none")


class Kernels(_Section):
    """Shares of the hardware's rates that kernels reach."""

    gemm: float = Field(gt=0, le=1, description="share of peak of a GEMM with whole waves and a long inner dimension")
    gemm_best: float = Field(gt=0, le=1, description="share of peak of the fastest GEMM that was measured")
    gemm_half_depth: float = Field(gt=0, description="inner dimension at which a GEMM reaches half of `gemm`")
    memory: float = Field(gt=0, le=1, description="share of the nominal HBM bandwidth that streaming kernels reach")
    accumulate_exposed: float = Field(
        ge=0, le=1, description="share of the fp32 gradient accumulation's memory traffic not hidden under its GEMM"
    )
    launch_us: float = Field(ge=0, description="gap between dependent kernels")
    gemm_gap_us: float | None = Field(None, ge=0, description="additional gap before a GEMM; absent: unknown")
    attention: dict[str, _Table] = Field(
        description="kernel -> [[sequence, TFLOP/s forward+backward of the causal half], ...], interpolated in log"
    )


class Power(_Section):
    """GEMM rates under the power limit, for a GPU on which they were measured."""

    gemm_sustained: float = Field(gt=0, le=1, description="share of peak that GEMMs without pauses sustain for seconds")
    float8_sustained: float | None = Field(
        None, gt=0, le=1, description="the same for float8 GEMMs, of the float8 peak; absent: as gemm_sustained"
    )
    idle: float = Field(ge=0, le=1, description="power while waiting between kernels, share of the limit")
    exponent: float = Field(ge=1, description="power of a GEMM is proportional to its rate to this exponent")


class LinkSpec(_Section):
    """Figures of a kind of network link, per GPU and direction."""

    gbs: float = Field(gt=0, description="nominal GB/s per GPU and direction")
    bus: _Table = Field(
        description="[[ranks, GB/s], ...]: bus bandwidth of large collectives by group size, interpolated in log",
    )
    p2p_gbs: float = Field(gt=0, description="GB/s of one large send with a concurrent receive")
    latency_us: float = Field(ge=0, description="fixed time of a collective or transfer")
    hop_us: float = Field(ge=0, description="added for each rank of a ring")
    leaf_hosts: int | None = Field(None, ge=1, description="hosts under one set of leaf switches; absent: unknown")
    uplinks: int | None = Field(None, ge=1, description="uplinks of a leaf switch, hashed over by flow")
    uplink_gbs: float | None = Field(None, gt=0, description="GB/s of an uplink")


class Overlap(_Section):
    """Shares of communication that stay exposed although they overlap with compute, and the slow-down of compute."""

    tp_residual: float = Field(ge=0, le=1, description="share of tensor-parallel communication still exposed")
    pp_residual: float = Field(ge=0, le=1, description="share of pipeline transfers still exposed")
    slowdown: float = Field(ge=0, le=1, description="fraction by which compute slows while a collective overlaps it")
    blocking_us: float = Field(ge=0, description="idle time of a blocking exchange beyond the transfer (host sync)")


class Stragglers(_Section):
    """Slow hosts and noise."""

    slow_hosts: float = Field(ge=0, lt=1, description="share of hosts that are persistently slow")
    slow_by: float = Field(ge=0, description="fraction by which such a host's forward takes longer")
    spread: float = Field(ge=0, le=0.2, description="standard deviation of GPUs' persistent speeds, relative")
    jitter: float = Field(ge=0, description="relative standard deviation of one chunk's time, independent noise")


class Host(_Section):
    """Figures of the CPUs, which launch kernels."""

    slowness: float = Field(gt=0, le=20, description="time to launch kernels from Python, relative to a DGX host")


class ClusterSpec(_Section):
    """Figures of a cluster."""

    name: str
    description: str
    gpus_per_host: int = Field(ge=1)
    gpu: GpuSpec
    kernels: Kernels
    power: Power | None = Field(None, description="absent without a measurement")
    host: Host | None = Field(None, description="absent: launches take as long as on a DGX host")
    inside: LinkSpec = Field(description="within a host")
    between: LinkSpec = Field(description="between hosts")
    overlap: Overlap
    stragglers: Stragglers
    sources: dict[str, str] = Field(description="key -> where its value comes from; every figure has one")

    @property
    def host_slowness(self) -> float:
        """Time of a kernel launch relative to a DGX host."""
        if self.host is None:
            return 1.0
        return self.host.slowness


def list_shipped_clusters() -> list[str]:
    """Return the names of the clusters that come with the package."""
    folder = resources.files("megascale.simulate") / "clusters"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_cluster(name: str) -> ClusterSpec:
    """Load a shipped cluster by name, or a TOML file by path. Raises ConfigError with key and value if it is wrong."""
    path = Path(name)
    if name in list_shipped_clusters():
        tree = tomllib.loads((resources.files("megascale.simulate") / "clusters" / f"{name}.toml").read_text())
    elif path.suffix == ".toml" and path.is_file():
        tree = read_toml(path, "cluster file")
    else:
        raise ConfigError(
            f"--cluster={name!r} is neither a shipped cluster ({', '.join(list_shipped_clusters())}) nor a TOML file; "
            "copy a shipped file from megascale/simulate/clusters and edit it"
        )
    return validate_cluster(tree)


def set_value(cluster: ClusterSpec, section_name: str, key: str, value: Any) -> ClusterSpec:
    """Return the cluster with one figure replaced. Raises ConfigError for an unknown key or a wrong value.

    Another `gbs` scales the bandwidths of the link's collectives and transfers by the same factor. Another
    `peak_tflops` scales `float8_tflops`.
    """
    section = getattr(cluster, section_name, None)
    if not isinstance(section, _Section) or key not in type(section).model_fields:
        parts = ", ".join(name for name in type(cluster).model_fields if isinstance(getattr(cluster, name), _Section))
        raise ConfigError(
            f"cluster.{section_name}.{key}: no such figure; write cluster.PART.KEY, as cluster.between.gbs "
            f"(parts: {parts})"
        )
    current = getattr(section, key)
    if isinstance(current, bool) or not isinstance(current, int | float):
        raise ConfigError(f"cluster.{section_name}.{key}: only numbers can be set, this is {current!r}")
    tree = section.model_dump()
    tree[key] = value
    if isinstance(section, LinkSpec) and key == "gbs" and isinstance(value, int | float):
        tree["bus"] = [[ranks, gbs * value / current] for ranks, gbs in section.bus]
        tree["p2p_gbs"] = section.p2p_gbs * value / current
    if key == "peak_tflops" and tree["float8_tflops"] is not None and isinstance(value, int | float):
        tree["float8_tflops"] *= value / current
    try:
        return cluster.model_copy(update={section_name: type(section).model_validate(tree)})
    except ValidationError as error:
        first = next((e for e in error.errors() if e["loc"][:1] == (key,)), error.errors()[0])
        raise ConfigError(f"cluster.{section_name}.{key}={value!r} is wrong: {first['msg']}") from None


def _check_units(cluster: ClusterSpec) -> None:
    """Raise ConfigError for a figure that is wrong by so much that its unit is likely another one."""
    gpu = cluster.gpu
    if gpu.name == "cpu":  # has other magnitudes, and links of processes on one host
        return
    ranges = {
        "gpu.peak_tflops": (gpu.peak_tflops, 10.0, 1e5, "TFLOP/s"),
        "gpu.memory_gbs": (gpu.memory_gbs, 100.0, 1e5, "GB/s"),
        "gpu.memory_gib": (gpu.memory_gib, 1.0, 4096.0, "GiB"),
    }
    for kernel, table in cluster.kernels.attention.items():
        fastest = max(rate for _, rate in table)
        ranges[f"kernels.attention.{kernel}"] = (fastest, 0.0, gpu.peak_tflops, "TFLOP/s, at most gpu.peak_tflops")
    for name in ("inside", "between"):
        link: LinkSpec = getattr(cluster, name)
        limit = _MAX_BUS_SHARE * link.gbs
        unit = f"GB/s (8 Gbit/s each), at most {_MAX_BUS_SHARE:g} times {name}.gbs"
        ranges[f"{name}.bus"] = (max(gbs for _, gbs in link.bus), 0.0, limit, unit)
        ranges[f"{name}.p2p_gbs"] = (link.p2p_gbs, 0.0, limit, unit)
    for key, (value, low, high, unit) in ranges.items():
        if not low <= value <= high:
            raise ConfigError(
                f"cluster {cluster.name!r}: {key}={value:g} lies outside {low:g} to {high:g}; its unit is {unit}"
            )
    unknown = sorted(set(cluster.kernels.attention) - set(ATTENTION_KERNELS))
    if unknown:
        raise ConfigError(
            f"cluster {cluster.name!r}: kernels.attention.{unknown[0]} is unknown; kernels are "
            f"{', '.join(ATTENTION_KERNELS)}"
        )


def validate_cluster(tree: Mapping[str, Any]) -> ClusterSpec:
    """Return the cluster of a parsed file. Raises ConfigError for a wrong value, or a figure without a source."""
    try:
        cluster = ClusterSpec.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(p) for p in first["loc"])
        raise ConfigError(
            f"cluster key {key}={first['input']!r} is wrong: {first['msg'].removeprefix('Value error, ')}"
        ) from None
    _check_units(cluster)
    figures = {
        f"{section}.{key}"
        for section in ("gpu", "kernels", "power", "host", "inside", "between", "overlap", "stragglers")
        if getattr(cluster, section) is not None
        for key in type(getattr(cluster, section)).model_fields
        if key != "name" and getattr(getattr(cluster, section), key) is not None
    }
    missing = sorted(figures - set(cluster.sources))
    if missing:
        raise ConfigError(
            f"cluster {cluster.name!r} gives no source for {', '.join(missing[:4])}; add each under [sources]"
        )
    unknown = sorted(set(cluster.sources) - figures)
    if unknown:
        raise ConfigError(f"cluster {cluster.name!r} names a source for {unknown[0]!r}, which it has no figure for")
    return cluster
