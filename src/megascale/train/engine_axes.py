"""The axes that an engine computes on: their communicators, their overlaps, and the start-up lines about those."""

from __future__ import annotations

from dataclasses import replace

import torch

from megascale.config import Config
from megascale.core.layout import Layout
from megascale.core.schedule import ActionKind
from megascale.core.spans import SpanAxis
from megascale.errors import ConfigError
from megascale.parallel import symmetric
from megascale.parallel.buffers import Axes
from megascale.parallel.collectives import SINGLE_RANK, Axis
from megascale.parallel.pipeline import P2PStream, P2PStreams
from megascale.parallel.runtime import Runtime
from megascale.rendezvous.groups import Groups

_SWITCH = {True: "on", False: "off"}


def make_axis(runtime: Runtime, groups: Groups | None, name: str, size: int, rank: int) -> Axis:
    """Return the axis on group `name`, or one with a single member if the rank has no such group."""
    if groups is not None:
        group = getattr(groups, name)
    else:
        group = None
    if size == 1 or group is None:
        return Axis(runtime=runtime)
    kind = SpanAxis[name.partition("_")[0].upper()]
    label = name if name == "world" else group.group_name
    return Axis(group, size, rank, name=label, kind=kind, runtime=runtime)


def make_axes(runtime: Runtime, groups: Groups | None, layout: Layout, rank: int, tensor: Axis) -> Axes:
    """Return the axes that a rank's buffers are reduced, gathered and summed over."""
    grid, parallel = layout.grid, layout.config.parallel
    coordinate = grid.coordinate(rank)
    stage, tied = tensor, SINGLE_RANK
    if parallel.zero:  # without ZeRO the tensor-parallel ranks of one replica hold all shards of the stage
        stage_ranks = list(grid.group(("tensor", "data"), rank))
        stage = make_axis(runtime, groups, "stage", len(stage_ranks), stage_ranks.index(rank))
    end_stages = layout.chunk_map.end_stages
    if layout.config.model.tied_embeddings and len(end_stages) > 1 and coordinate.pipeline in end_stages:
        tied = make_axis(runtime, groups, "embedding", 2, sorted(end_stages).index(coordinate.pipeline))
    return Axes(
        data=make_axis(runtime, groups, "data_gather", grid.data, coordinate.data),
        reduce=make_axis(runtime, groups, "data_reduce", grid.data, coordinate.data),
        tensor=tensor,
        tied=tied,
        stage=stage,
    )


def choose_tensor_overlap(
    axis: Axis, config: Config, dtype: torch.dtype, device: torch.device
) -> tuple[Axis, dict[str, str]]:
    """Return the tensor axis with the overlap that works here, and its start-up line by name.

    Raises ConfigError if overlap.tensor=fused does not work here.
    """
    if axis.size == 1:
        return axis, {}
    requested = config.overlap.tensor
    if requested in ("async", "off"):
        return replace(axis, overlap=requested), {"tensor overlap": requested}
    model, train = config.model, config.train
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    part_bytes = model.sequence_length // axis.size * train.micro_batch * model.hidden * element_bytes
    exchange = symmetric.make_exchange(axis, part_bytes, device, config.gemms_on_side_stream)
    if isinstance(exchange, symmetric.Exchange):
        return replace(axis, overlap="fused", exchange=exchange), {"tensor overlap": "fused"}
    reason = exchange
    if requested == "fused":
        raise ConfigError(
            f"overlap.tensor=fused is unavailable: {reason}; set --overlap.tensor=auto or async, "
            "or put each tensor-parallel group on one host whose GPUs reach each other"
        )
    return replace(axis, overlap="async"), {"tensor overlap": f"async (not fused: {reason})"}


def describe_overlaps(layout: Layout, device: torch.device) -> dict[str, str]:
    """Return the start-up lines about the overlaps of pipeline and data parallelism and about their NCCL channels."""
    config, grid = layout.config, layout.grid
    lines = {}
    if grid.pipeline > 1:
        lines["pipeline overlap"] = _SWITCH[config.overlap.pipeline]
    if grid.data > 1:
        lines["data overlap"] = _SWITCH[config.overlap.data]
    for name, size in (("pipeline", grid.pipeline), ("data", grid.data)):
        channels = config.overlap.max_channels(name)
        if size > 1 and channels is not None and device.type == "cuda":
            lines[f"{name} channels"] = f"at most {channels}"
        elif size > 1 and f"{name}_channels" in config.overlap.model_fields_set:
            if device.type != "cuda":
                reason = "only NCCL has channels"
            else:
                reason = f"overlap.{name} is off"
            lines[f"{name} channels"] = f"not bounded: {reason}"
    return lines


def make_p2p_streams(groups: Groups | None) -> P2PStreams:
    """Return the pipeline's channels: one per directed edge and direction of travel."""
    if groups is None:
        return {}
    return {
        (ActionKind[name.upper()], stage): P2PStream(channel.group, channel.peer, channel.group.group_name)
        for (name, stage), channel in groups.p2p.items()
    }
