"""The axes that an engine computes on: their communicators, their overlaps, and what is said of those."""

from __future__ import annotations

from dataclasses import replace

import torch

from megascale.config import Config
from megascale.core.layout import Layout
from megascale.core.spans import SpanAxis
from megascale.errors import ConfigError
from megascale.parallel import symmetric
from megascale.parallel.buffers import Axes
from megascale.parallel.collectives import ALONE, Axis
from megascale.parallel.pipeline import P2PStream, P2PStreams
from megascale.parallel.runtime import Runtime
from megascale.rendezvous.groups import Groups


def make_axis(runtime: Runtime, groups: Groups | None, name: str, size: int, rank: int) -> Axis:
    """One axis of `groups`; a single-member one where there is nobody else."""
    group = getattr(groups, name) if groups is not None else None
    if size == 1 or group is None:
        return Axis(runtime=runtime)
    kind = SpanAxis[name.partition("_")[0].upper()]
    return Axis(group, size, rank, name="world" if name == "world" else group.group_name, kind=kind, runtime=runtime)


def make_axes(runtime: Runtime, groups: Groups | None, layout: Layout, rank: int, tensor: Axis) -> Axes:
    """What the buffers of a rank are reduced, gathered and summed over."""
    grid, config = layout.grid, layout.config
    at = grid.coordinate(rank)
    first, last = at.pipeline == 0, at.pipeline == grid.pipeline - 1
    tied = config.model.tied_embeddings and grid.pipeline > 1 and (first or last)
    return Axes(
        data=make_axis(runtime, groups, "data_gather", grid.data, at.data),
        reduce=make_axis(runtime, groups, "data_reduce", grid.data, at.data),
        tensor=tensor,
        tied=make_axis(runtime, groups, "embedding", 2, int(last)) if tied else ALONE,
        stage=_stage_axis(runtime, groups, layout, rank, tensor),
    )


def _stage_axis(runtime: Runtime, groups: Groups | None, layout: Layout, rank: int, tensor: Axis) -> Axis:
    """The ranks whose shards make up this stage: without ZeRO each replica's tensor-parallel ranks have it all."""
    if not layout.config.parallel.zero:
        return tensor
    ranks = layout.grid.group(("tensor", "data"), rank)
    return make_axis(runtime, groups, "stage", len(ranks), list(ranks).index(rank))


def overlapped(axis: Axis, config: Config, dtype: torch.dtype, device: torch.device) -> tuple[Axis, dict[str, str]]:
    """The tensor axis with the overlap that works here, and what is said of it; ConfigError if the one asked for does
    not work."""
    if axis.size == 1:
        return axis, {}
    wanted = config.overlap.tensor
    if wanted in ("async", "off"):
        return replace(axis, overlap=wanted), {"tensor overlap": wanted}
    model, train = config.model, config.train
    element = torch.empty(0, dtype=dtype).element_size()
    part = model.sequence_length // axis.size * train.micro_batch * model.hidden * element
    found = symmetric.make_exchange(axis, part, device, config.gemms_on_side_stream)
    if isinstance(found, symmetric.Exchange):
        return replace(axis, overlap="fused", exchange=found), {"tensor overlap": "fused"}
    if wanted == "fused":
        raise ConfigError(
            f"overlap.tensor=fused cannot be had: {found}; set --overlap.tensor=auto or async, "
            "or keep a tensor-parallel group on one host whose GPUs reach each other"
        )
    return replace(axis, overlap="async"), {"tensor overlap": f"async (not fused: {found})"}


def other_overlaps(layout: Layout, device: torch.device) -> dict[str, str]:
    """What is said at start of the overlaps of pipeline and data parallelism, and of their NCCL channels."""
    config, grid = layout.config, layout.grid
    said = {}
    if grid.pipeline > 1:
        said["pipeline overlap"] = "on" if config.overlap.pipeline else "off"
    if grid.data > 1:
        said["data overlap"] = "on" if config.overlap.data else "off"
    for name, size in (("pipeline", grid.pipeline), ("data", grid.data)):
        channels = config.overlap.max_channels(name)
        if size > 1 and channels is not None and device.type == "cuda":
            said[f"{name} channels"] = f"at most {channels}"
        elif size > 1 and f"{name}_channels" in config.overlap.model_fields_set:
            why = "only NCCL has channels" if device.type != "cuda" else f"overlap.{name} is off"
            said[f"{name} channels"] = f"not bounded: {why}"
    return said


def make_p2p_streams(groups: Groups | None) -> P2PStreams:
    """The pipeline's channels: one for each directed edge and direction of travel."""
    if groups is None:
        return P2PStreams()
    names = ("send_forward", "recv_forward", "send_backward", "recv_backward")
    ends = {name: getattr(groups, name) for name in names}
    return P2PStreams(
        **{n: None if e is None else P2PStream(e.group, e.peer, e.group.group_name) for n, e in ends.items()},
    )
