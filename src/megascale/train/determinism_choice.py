"""Decision of kernels.deterministic=auto: whether a repeated step gives the same bits.

All built-in operators but attention's backward sum in a fixed order anyway. So determinism costs what the fastest
attention kernel with a fixed order takes longer than the fastest kernel. Every rank measures both for each shape. It is
on if that is at most MAX_EXTRA_TIME on the slowest rank, for all shapes and kinds of devices.

The decision is saved with the choice of attention kernels (train/attention_choice.py), because it changes rounding. A
run that resumes keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale.checkpoint.object_collectives import Peers
from megascale.config import Config
from megascale.config.parts import LOSSES, OPTIMIZERS
from megascale.core.rank_memory import find_plugin_setting
from megascale.ops.attention import AttentionChooser
from megascale.ops.dispatch import Kernels, prepare_workspace
from megascale.train.attention_choice import (
    Choices,
    Measurement,
    RankMeasurement,
    find_slowest_times,
    list_shapes,
    measure_shape,
)
from megascale.train.rank_info import find_device_kind

MAX_EXTRA_TIME = 0.01  # of attention's forward and backward
# Where the decision is in a run's choices of kernels. It is the same for all kinds of devices.
ALL_KINDS = "all devices"
ORDER = "order of sums"
FIXED, VARYING = "fixed", "varying"
# Kind of device -> shape -> kernels whose time is within MAX_EXTRA_TIME of the fastest.
Candidates = dict[str, dict[str, list[str]]]


@dataclass(frozen=True)
class Determinism:
    """A decision on determinism, the same on all ranks.

    Attributes:
        is_on: whether a repeated step must give the same bits.
        description: the decision and its reason, for the start-up lines; "" if there is nothing to say.
        choices: choices of kernels of earlier starts, with this decision.
        measured: this rank's measurements by shape, with the order that was chosen.
    """

    is_on: bool
    description: str
    choices: Choices
    measured: dict[str, Measurement]


def decide_determinism(
    config: Config,
    *,
    tensor: int,
    dtype: torch.dtype,
    device: torch.device,
    earlier_choices: Choices | None,
    chooser: AttentionChooser,
    documents: int = 0,
    context: int = 1,
) -> Determinism:
    """Decide whether steps must repeat bit for bit. Collective over the default group on GPUs.

    Args:
        tensor: tensor-parallel size.
        earlier_choices: choices of earlier starts; rank 0's are used.
        chooser: measures attention kernels.
        documents: largest number of documents in a sample; 0: a sample is one document.
        context: number of ranks that divide the tokens of a sequence.
    """
    requested = config.requested_determinism
    if not can_measure(device):
        # A CPU computes the same bits without the setting, so kernels.deterministic=auto changes nothing there.
        return Determinism(requested is True, "", earlier_choices or {}, {})
    peers = Peers()
    choices = peers.broadcast(earlier_choices or {}, Choices)
    is_on = False
    reason = ""
    measured: dict[str, Measurement] = {}
    if requested is not None:
        is_on = requested
    elif choices:
        # Another order rounds differently. Runs of earlier releases have no entry, and summed in a varying order.
        is_on = choices.get(ALL_KINDS, {}).get(ORDER) == FIXED
        reason = "kept with the run"
    else:
        reason = peers.find_first_problem(find_obstacle(config, dtype) or None) or ""
        if not reason:
            is_on, reason, measured = _compare_orders(
                config,
                tensor=tensor,
                dtype=dtype,
                device=device,
                chooser=chooser,
                documents=documents,
                context=context,
                peers=peers,
            )
    description = ""
    order = VARYING
    if is_on:
        description = "a repeated step gives the same bits"
        order = FIXED
    elif reason:
        description = "off"
    if reason:
        description += f" (kernels.deterministic=auto: {reason})"
    choices = {**choices, ALL_KINDS: {ORDER: order}}
    return Determinism(is_on, description, choices, measured)


def can_measure(device: torch.device) -> bool:
    """Return whether a device has several attention kernels, whose times differ."""
    return device.type == "cuda"


def find_obstacle(config: Config, dtype: torch.dtype) -> str:
    """Return why the cost of determinism cannot be measured on a GPU, or "" if it can."""
    setting = find_plugin_setting(config)
    for registry, name in ((LOSSES, config.train.loss), (OPTIMIZERS, config.optimizer.name)):
        if name not in registry.builtin_names:
            setting = f"{registry.key}={name}"
    if setting:
        return f"{setting} is registered by a package and may use operators that torch refuses then"
    if config.kernels.mode == "reference":
        return "torch's operators with a fixed order are slower (kernels.mode=reference)"
    if config.kernels.attention == "cudnn":
        return "kernels.attention=cudnn sums in a varying order"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"attention kernels are not measured in {str(dtype).removeprefix('torch.')}"
    workspace_problem = prepare_workspace()
    if workspace_problem:
        return f"it needs {workspace_problem}"
    return ""


def _compare_orders(
    config: Config,
    *,
    tensor: int,
    dtype: torch.dtype,
    device: torch.device,
    chooser: AttentionChooser,
    documents: int,
    context: int,
    peers: Peers,
) -> tuple[bool, str, dict[str, Measurement]]:
    """Measure attention kernels in both orders, on all ranks.

    Returns:
        (whether the fixed order is cheap, the reason, this rank's measurements with the order that was chosen).
    """
    kind = find_device_kind(device)
    shapes = list_shapes(config, tensor, dtype, documents, context)
    named: list[str] | None = None
    if config.kernels.attention != "auto":
        named = [config.kernels.attention]
    varying = {str(shape): measure_shape(chooser, shape, device, named) for shape in shapes}
    varying_by_rank = peers.gather((kind, varying), RankMeasurement)
    candidates = peers.broadcast(find_candidates(varying_by_rank), Candidates)
    fixed: dict[str, Measurement] = {}
    with Kernels(config.kernels.mode, deterministic=True).as_current():
        for shape in shapes:
            fixed[str(shape)] = measure_shape(chooser, shape, device, candidates[kind][str(shape)])
    fixed_by_rank = peers.gather((kind, fixed), RankMeasurement)
    is_cheap, reason = peers.broadcast(compare_times(varying_by_rank, fixed_by_rank), tuple[bool, str])
    if is_cheap:
        return True, reason, fixed
    return False, reason, varying


def _group_by_kind(measurements: list[RankMeasurement]) -> dict[str, dict[str, list[Measurement]]]:
    """Return kind -> shape -> the measurements of the ranks with that kind of device."""
    grouped: dict[str, dict[str, list[Measurement]]] = {}
    for kind, measured in measurements:
        shapes = grouped.setdefault(kind, {})
        for shape, measurement in measured.items():
            shapes.setdefault(shape, []).append(measurement)
    return grouped


def find_candidates(varying: list[RankMeasurement]) -> Candidates:
    """Return the kernels within MAX_EXTRA_TIME of the fastest. No other can be as fast with a fixed order.

    Args:
        varying: measurements of all ranks with a varying order.
    """
    candidates: Candidates = {}
    for kind, shapes in _group_by_kind(varying).items():
        candidates[kind] = {}
        for shape, measurements in shapes.items():
            times = find_slowest_times(measurements)
            limit = min(times.values(), default=0.0) * (1 + MAX_EXTRA_TIME)
            candidates[kind][shape] = [name for name, milliseconds in times.items() if milliseconds <= limit]
    return candidates


def compare_times(varying: list[RankMeasurement], fixed: list[RankMeasurement]) -> tuple[bool, str]:
    """Return whether a fixed order takes at most MAX_EXTRA_TIME longer for all shapes, and the reason.

    Args:
        varying: measurements of all ranks with a varying order.
        fixed: measurements of all ranks with a fixed order, of the fastest kernels only.
    """
    fixed_by_kind = _group_by_kind(fixed)
    largest_extra = float("-inf")
    slowest_name = ""
    for kind, shapes in _group_by_kind(varying).items():
        for shape, measurements in shapes.items():
            varying_times = find_slowest_times(measurements)
            fixed_times = find_slowest_times(fixed_by_kind[kind][shape])
            if not varying_times or not all(varying_times.values()):
                return False, f"attention kernels for {shape} are not measured on {kind}"
            fastest = min(varying_times, key=varying_times.__getitem__)
            # Time 0 stands for a fallback that was not measured, because no candidate has a fixed order.
            measured_times = {name: milliseconds for name, milliseconds in fixed_times.items() if milliseconds > 0}
            if not measured_times:
                return False, f"{fastest}, the fastest attention kernel for {shape} on {kind}, has no fixed order"
            name = min(measured_times, key=measured_times.__getitem__)
            extra = measured_times[name] / varying_times[fastest] - 1
            if extra > MAX_EXTRA_TIME:
                return False, (
                    f"attention {shape} on {kind} would take {extra:.1%} longer by {name} with a fixed order than by "
                    f"{fastest}"
                )
            if extra > largest_extra:
                largest_extra = extra
                slowest_name = name
    if not slowest_name:
        return False, "the model has no attention kernels that are measured"
    return True, f"attention takes {largest_extra:.1%} longer by {slowest_name} with a fixed order"
