"""The axes that an engine communicates along: their communicators, their overlaps, and start-up lines about both.

An exchange (parallel/exchange.py) moves data between the GPUs of one host by copies instead of NCCL's collectives. A
function `choose_...` returns an axis or exchange, and start-up lines by name. Each line says what was chosen and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from megascale.config import Config
from megascale.config.axes import AXES
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core.copy_choice import explain_collective_gathers, explain_collective_reductions
from megascale.core.expert_ranks import gathers_expert_tokens
from megascale.core.group_names import remove_attempt
from megascale.core.head_exchange import HEAD_PARTS, count_head_parts, list_gather_kernels, share_heads
from megascale.core.inventory import count_distinct_layers
from megascale.core.layout import Layout
from megascale.core.memory import gathers_float8
from megascale.core.rank_memory import rounds_block_gradients
from megascale.core.schedule import ActionKind
from megascale.core.spans import SpanAxis
from megascale.core.unit_slots import has_chunk_slots
from megascale.errors import ConfigError
from megascale.parallel import symmetric
from megascale.parallel.buffers import Axes, ParamAndGradBuffer
from megascale.parallel.collectives import Axis
from megascale.parallel.copy_reduction import CopyReduction, count_slot_elements, count_wide_elements
from megascale.parallel.exchange import Exchange
from megascale.parallel.mapped_slots import MappedSlots, map_slots, select_mapped_buckets
from megascale.parallel.peer_memory import count_peer_memory_bytes
from megascale.parallel.pipeline import P2PStream, P2PStreams
from megascale.parallel.runtime import Runtime
from megascale.parallel.slot_units import assign_units
from megascale.rendezvous.group_plan import find_replica_axis
from megascale.rendezvous.groups import Groups

_SWITCH = {True: "on", False: "off"}


class GatherChoice(NamedTuple):
    """Transport of the matrices of units: copies or collectives.

    Attributes:
        exchange: the exchange that copies them; None: collectives gather.
        mapped: slots in which own shards lie; None: own shards are copied.
        lines: start-up lines by name.
    """

    exchange: Exchange | None
    mapped: MappedSlots | None
    lines: dict[str, str]


class ReductionChoice(NamedTuple):
    """Transport of the gradients of units: copies or collectives.

    Attributes:
        copy_reduction: reduction by copies; None: by collectives.
        exchange: the exchange that copies for it.
        lines: start-up lines by name.
    """

    copy_reduction: CopyReduction | None
    exchange: Exchange | None
    lines: dict[str, str]


def make_axis(runtime: Runtime, groups: Groups | None, kind: str) -> Axis:
    """Return the axis of the rank's group of a kind, or an axis with a single member if the rank has no such group.

    Args:
        kind: name of the group, such as "tensor" or "data_reduce" (rendezvous/groups.py).
    """
    if groups is None or kind not in groups.by_kind:
        return Axis(runtime=runtime)
    group = groups.by_kind[kind]
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    name = remove_attempt(group.group_name)
    return Axis(group, size, rank, name=name, kind=SpanAxis.of_group(kind), runtime=runtime)


def make_world(runtime: Runtime, groups: Groups | None) -> Axis:
    if groups is None or groups.grid.world_size == 1:
        return Axis(runtime=runtime)
    size = groups.grid.world_size
    return Axis(groups.world, size, groups.rank, name="world", kind=SpanAxis.WORLD, runtime=runtime)


def make_model_axes(runtime: Runtime, groups: Groups | None) -> dict[str, Axis]:
    """Return the axes that the model's layers communicate along, by name.

    "context" is the axis along which ranks divide the tokens of a sequence, whether or not they divide experts too.
    """
    axes = {name: make_axis(runtime, groups, name) for name, facts in AXES.items() if facts.has_group}
    if axes["slice"].size > 1:
        axes["context"] = axes["slice"]
    return axes


def make_axes(runtime: Runtime, groups: Groups | None, layout: Layout, model_axes: Mapping[str, Axis]) -> Axes:
    """Return the axes that a rank's buffers are reduced, gathered and summed over."""
    # The ranks whose shards together make up the stage. Without ZeRO a shard is a whole buffer.
    if layout.config.parallel.zero:
        has_copies = layout.grid.count(AXES.copies) > 1
        stage = make_axis(runtime, groups, "state" if has_copies else "stage")
    else:
        replica_axis_name = find_replica_axis(layout.grid)
        if replica_axis_name is None:
            stage = make_axis(runtime, groups, "replica")
        else:
            stage = model_axes[replica_axis_name]
    return Axes(
        data=make_axis(runtime, groups, "data_gather"),
        reduce=make_axis(runtime, groups, "data_reduce"),
        model=model_axes,
        tied=make_axis(runtime, groups, "embedding"),
        stage=stage,
    )


def choose_tensor_overlap(
    axis: Axis, config: Config, dtype: torch.dtype, device: torch.device
) -> tuple[Axis, dict[str, str]]:
    """Return the tensor axis with the overlap that is available on this device, and its start-up line by name.

    Raises ConfigError if overlap.tensor=fused is unavailable.
    """
    if axis.size == 1:
        return axis, {}
    requested = config.overlap.tensor
    if requested in ("async", "off"):
        return replace(axis, overlap=requested), {"tensor overlap": requested}
    model, train = config.model, config.train
    length = model.sequence_length // config.parallel.context
    shard_bytes = length // axis.size * train.micro_batch * model.hidden * dtype.itemsize
    exchange = symmetric.make_exchange(
        axis, shard_bytes, device, on_side_stream=config.gemms_on_side_stream, timeout=config.rendezvous.group_timeout
    )
    if isinstance(exchange, symmetric.Exchange):
        return replace(axis, overlap="fused", exchange=exchange), {"tensor overlap": "fused"}
    reason = exchange
    if requested == "fused":
        raise ConfigError(
            f"overlap.tensor=fused is unavailable: {reason}; set --overlap.tensor=auto or async, "
            "or put each tensor-parallel group on one host whose GPUs reach each other"
        )
    return replace(axis, overlap="async"), {"tensor overlap": f"async (not fused: {reason})"}


def choose_gathers(
    axis: Axis,
    layout: Layout,
    buffers: Sequence[ParamAndGradBuffer],
    gathers_in_float8: bool,
    device: torch.device,
    chunk_slots: Sequence[int] | None,
) -> GatherChoice:
    """Return how the matrices of units are gathered under ZeRO-3 (overlap.gathers).

    Raises ConfigError if overlap.gathers=copies is unavailable.

    Args:
        chunk_slots: slot of each chunk if complete chunks are gathered (core/unit_slots.py).
    """
    config = layout.config
    if config.parallel.zero != 3 or axis.size == 1 or config.overlap.gathers == "collectives":
        return GatherChoice(None, None, {})
    reason = explain_collective_gathers(config, layout.grid)
    if not reason:
        buckets, copy_reason = select_mapped_buckets(buffers, gathers_in_float8, device)
        peer_bytes = count_peer_memory_bytes(buffers, gathers_in_float8, buckets)
        exchange = _make_peer_exchange(axis, config, device, peer_bytes)
        mapped = None
        if buckets and not isinstance(exchange, str):
            units, _ = assign_units(buffers, chunk_slots, config.parallel.zero3_keep_layers)
            slots = map_slots(axis, buffers, units, buckets=buckets, device=device)
            if isinstance(slots, str):
                copy_reason = slots
                exchange.close()
                exchange = _make_peer_exchange(
                    axis, config, device, count_peer_memory_bytes(buffers, gathers_in_float8)
                )
            else:
                mapped = slots
        if not isinstance(exchange, str):
            return GatherChoice(exchange, mapped, {"matrices gathered by": _describe_gathers(mapped, copy_reason)})
        reason = exchange
    if config.overlap.gathers == "copies":
        raise ConfigError(
            f"overlap.gathers=copies is unavailable: {reason}; set --overlap.gathers=collectives, or put each "
            "data-parallel group on one host whose GPUs reach each other"
        )
    return GatherChoice(None, None, {"matrices gathered by": f"collectives (no copies: {reason})"})


def _describe_gathers(mapped: MappedSlots | None, copy_reason: str) -> str:
    """Return the start-up line of gathers by copies.

    Args:
        copy_reason: why own shards are copied, if `mapped` is None.
    """
    if mapped is None:
        return f"copy engines (own shards are copied too: {copy_reason})"
    return "copy engines, with own shards mapped into slots"


def choose_reductions(
    axis: Axis,
    layout: Layout,
    buffers: Sequence[ParamAndGradBuffer],
    device: torch.device,
    reduce_dtype: torch.dtype | None,
) -> ReductionChoice:
    """Return how units' gradients are reduced from ZeRO-2 on (overlap.reductions).

    Raises ConfigError if overlap.reductions=copies is unavailable.

    Args:
        reduce_dtype: type in which gradients are sent; None for the type of the gradients.
    """
    config = layout.config
    if config.parallel.zero < 2 or axis.size == 1 or config.overlap.reductions == "collectives":
        return ReductionChoice(None, None, {})
    element_count = count_slot_elements(buffers)
    dtype = buffers[0].grad_dtype
    sent_dtype = reduce_dtype or dtype
    exchange: Exchange | str = explain_collective_reductions(config, layout.grid)
    if not exchange:
        exchange = _make_peer_exchange(axis, config, device, element_count * sent_dtype.itemsize)
    if not isinstance(exchange, str):
        line = "copy engines"
        wide_count = None
        if rounds_block_gradients(config, layout.grid):
            wide_count = count_wide_elements(buffers)
            line = "copy engines; blocks have gradients in bfloat16 only"
        copy_reduction = CopyReduction(exchange, element_count, dtype, sent_dtype, wide_count=wide_count)
        return ReductionChoice(copy_reduction, exchange, {"gradients of units reduced by": line})
    if config.overlap.reductions == "copies":
        raise ConfigError(
            f"overlap.reductions=copies is unavailable: {exchange}; set --overlap.reductions=collectives, or put each "
            "data-parallel group on one host whose GPUs reach each other"
        )
    line = f"collectives (no copies: {exchange})"
    return ReductionChoice(None, None, {"gradients of units reduced by": line})


def _make_peer_exchange(axis: Axis, config: Config, device: torch.device, peer_memory_bytes: int) -> Exchange | str:
    """Return an exchange without buffers whose memory peers read, or why it is unavailable. Collective."""
    return symmetric.make_exchange(
        axis,
        shard_bytes=0,
        device=device,
        timeout=config.rendezvous.group_timeout,
        peer_memory_bytes=peer_memory_bytes,
    )


def choose_context_exchange(
    axis: Axis, config: Config, dtype: torch.dtype, device: torch.device
) -> tuple[Axis, dict[str, str]]:
    """Return the context axis with the exchange that is available on this device, and its start-up lines by name.

    Raises ConfigError if overlap.context=copies is unavailable.
    """
    if axis.size == 1:
        return axis, {}
    tensor, context = config.parallel.tensor, config.parallel.context
    widths = []  # elements that each kind of layer exchanges per token
    has_parts = []  # for each kind of layer, whether its heads are exchanged in parts
    descriptions: dict[str, None] = {}  # phrases for the kinds of layers, in order and without repetitions
    for layer, _ in count_distinct_layers(config.model):
        mixer = layer.mixer
        share = share_heads(mixer.heads // tensor, mixer.kv_heads // tensor, context)
        has_parts.append(not mixer.has_sinks and count_head_parts(share, config.exchanges_heads_in_parts) > 1)
        if share.gathers_keys:
            widths.append(2 * share.kv_heads * mixer.head_size)
            kernels = list_gather_kernels(mixer.softcap, config.data.document_mask)
            kernel = kernels[0] if len(kernels) == 1 else "the fastest with such a mask"
            descriptions[
                f"gathers keys and values where {context} context ranks do not divide {share.heads} heads "
                f"(kernel: {kernel})"
            ] = None
        else:
            widths.append((share.heads + 2 * share.kv_heads) * mixer.head_size)
            copies = f", each key/value head on {share.copies} ranks" if share.copies > 1 else ""
            descriptions[f"exchanges slices for heads{copies}"] = None
    lines = {"context attention": "; ".join(descriptions)}
    requested = config.overlap.context
    if any(has_parts):
        extent = "" if all(has_parts) else " of some layers"
        line = f"collectives, in parts of the heads{extent}"
        return replace(axis, overlap="parts"), {**lines, "context exchange": line}
    if config.exchanges_heads_in_parts:
        reason = (
            f"overlap.context_parts=true needs key/value heads per rank that {HEAD_PARTS} divides, without copies of "
            "them and without sinks"
        )
        return axis, {**lines, "context exchange": f"collectives, of all heads at once ({reason})"}
    if requested == "collectives":
        return axis, {**lines, "context exchange": requested}
    token_count = config.model.sequence_length // context * config.train.micro_batch
    shard_bytes = token_count * max(widths) * dtype.itemsize
    exchange = symmetric.make_exchange(axis, shard_bytes, device, timeout=config.rendezvous.group_timeout)
    if isinstance(exchange, symmetric.Exchange):
        return replace(axis, exchange=exchange), {**lines, "context exchange": "copies"}
    if requested == "copies":
        raise ConfigError(
            f"overlap.context=copies is unavailable: {exchange}; set --overlap.context=auto or collectives, or put "
            "each group of context ranks on one host whose GPUs reach each other"
        )
    return axis, {**lines, "context exchange": f"collectives (no copies: {exchange})"}


def choose_expert_exchange(
    axis: Axis, config: Config, dtype: torch.dtype, device: torch.device
) -> tuple[Axis, dict[str, str]]:
    """Return the expert axis with the exchange that is available on this device, and its start-up line by name.

    Only gathers of tokens have an exchange, without tensor parallelism and biases. Raises ConfigError if
    overlap.expert=copies is unavailable.
    """
    if axis.size == 1:
        return axis, {}
    requested = config.overlap.expert
    settings, parallel = config.model.expert_settings, config.parallel
    if requested == "collectives":
        return axis, {"expert exchange": requested}
    if parallel.tensor > 1 or settings.biases or not gathers_expert_tokens(settings, 1, axis.size, requested):
        reason = "only gathers without parallel.tensor and model.experts.biases have copies"
    else:
        token_count = config.model.sequence_length // parallel.context * config.train.micro_batch
        shard_bytes = token_count * config.model.hidden * dtype.itemsize
        exchange = symmetric.make_exchange(axis, shard_bytes, device, timeout=config.rendezvous.group_timeout)
        if isinstance(exchange, symmetric.Exchange):
            return replace(axis, exchange=exchange), {"expert exchange": "copies"}
        reason = exchange
    if requested == "copies":
        raise ConfigError(f"overlap.expert=copies is unavailable: {reason}; set --overlap.expert=auto or collectives")
    return axis, {"expert exchange": f"collectives (no copies: {reason})"}


def choose_float8_gathers(layout: Layout) -> tuple[bool, dict[str, str]]:
    """Return whether data-parallel ranks gather the matrices of linear layers as float8, and start-up lines by name."""
    config, data_size = layout.config, layout.grid.shards
    if config.train.lora is not None:
        return False, {}  # the matrices are not trained, and so never gathered
    gathers_in_float8 = gathers_float8(config.model, config.parallel, config.train.linear_precision, data_size)
    can_gather_float8 = LINEAR_PRECISIONS[config.train.linear_precision].gathered_weight_bytes is not None
    if not can_gather_float8:
        return gathers_in_float8, {}  # without a choice there is nothing to record
    requested, precision = config.parallel.gather_precision, config.train.precision
    text = ""
    if gathers_in_float8:
        text = f"float8: matrices of linear layers; {precision}: all other parameters"
    elif data_size > 1 and config.parallel.zero:
        text = f"{precision} (parallel.gather_precision={requested})"
    elif requested == "float8":
        text = "nothing is gathered: there is one data-parallel rank"
    if not text:
        return gathers_in_float8, {}
    return gathers_in_float8, {"parameters gathered in": text}


def describe_overlaps(layout: Layout, device: torch.device) -> dict[str, str]:
    """Return the start-up lines about the overlaps of pipeline and data parallelism and about their NCCL channels.

    NCCL runs a collective on several channels, each of which occupies an SM.
    """
    config, grid = layout.config, layout.grid
    lines = {}
    if grid.pipeline > 1:
        lines["pipeline overlap"] = _SWITCH[config.overlap.pipeline]
    if grid.shards > 1:
        lines["data overlap"] = _SWITCH[config.overlap.data]
    if config.parallel.zero >= 2:
        lines["sharding"] = _describe_sharding(layout)
    for name, size in (("pipeline", grid.pipeline), ("data", grid.shards)):
        channels = config.max_channels(name)
        if size > 1 and channels is not None and device.type == "cuda":
            lines[f"{name} channels"] = f"at most {channels}"
        elif size > 1 and f"{name}_channels" in config.overlap.model_fields_set:
            if device.type != "cuda":
                reason = "only NCCL has channels"
            else:
                reason = f"overlap.{name} is off"
            lines[f"{name} channels"] = f"not bounded: {reason}"
    return lines


def _describe_sharding(layout: Layout) -> str:
    """Return what parallel.zero=2 or 3 shards, and when it communicates."""
    parallel = layout.config.parallel
    if layout.grid.shards == 1:
        return f"parallel.zero={parallel.zero} shards nothing: there is one data-parallel rank"
    if parallel.zero == 2:
        text = "gradients, reduced block by block in each micro-batch"
    elif has_chunk_slots(parallel.virtual_stages):
        text = "gradients and matrices, gathered chunk by chunk once per round of micro-batches"
    else:
        text = "gradients and matrices, gathered block by block in each micro-batch"
        if parallel.zero3_keep_layers:
            text += f"; at most {parallel.zero3_keep_layers} blocks per stage stay gathered until the update"
    if layout.grid.count(AXES.copies) > 1:
        text += f"; {layout.grid.count(AXES.copies)} copies of the state, whose gradients are summed once per step"
    if parallel.zero == 3 and "bucket_elements" in parallel.model_fields_set:
        text += "; parallel.bucket_elements divides only norms, biases and a tied embedding"
    return text


def make_p2p_streams(groups: Groups | None) -> P2PStreams:
    """Return the pipeline's channels by kind of action and peer stage; none without groups."""
    if groups is None:
        return {}
    streams = {}
    for (kind_name, peer_stage), channel in groups.p2p.items():
        stream = P2PStream(channel.group, channel.peer, name=remove_attempt(channel.group.group_name))
        streams[ActionKind[kind_name.upper()], peer_stage] = stream
    return streams
