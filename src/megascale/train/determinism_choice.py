"""Decision of kernels.deterministic=auto: whether a repeated step gives the same bits.

A repeated step gives the same bits if all operators sum in a fixed order. All built-in operators except attention's
backward do. The cost of determinism is therefore the difference in time between the fastest attention kernel with a
fixed order and the fastest kernel. Every rank measures both for each shape. Determinism is on if the difference is at
most MAX_EXTRA_TIME on the slowest rank, for all shapes and kinds of devices.

The decision is saved with the choice of attention kernels (train/attention_choice.py), because it changes rounding. A
run that resumes keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

MAX_EXTRA_TIME = 0.01  # share of the time of attention's forward and backward
# A run's choices of kernels have the decision under these keys: choices[ALL_KINDS][ORDER] is FIXED or VARYING. The
# decision is the same for all kinds of devices.
ALL_KINDS = "all devices"
ORDER = "order of sums"
FIXED, VARYING = "fixed", "varying"
# By kind of device and shape: the kernels whose time is within MAX_EXTRA_TIME of the fastest.
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
        earlier_choices: choices of earlier starts. Those passed on rank 0 count.
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
        # Another order would round differently than the run so far. Runs of earlier releases have no entry. Their sums
        # had a varying order.
        is_on = choices.get(ALL_KINDS, {}).get(ORDER) == FIXED
        reason = "kept with the run"
    else:
        reason = peers.find_first_problem(find_obstacle(config, dtype) or None) or ""
        if not reason:
            comparison = _compare_orders(
                config,
                tensor=tensor,
                dtype=dtype,
                device=device,
                chooser=chooser,
                documents=documents,
                context=context,
                peers=peers,
            )
            is_on = comparison.is_cheap
            reason = comparison.reason
            measured = comparison.measured
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


class _Comparison(NamedTuple):
    """The times of attention kernels with a fixed and with a varying order, compared.

    Attributes:
        reason: why it is or is not.
        measured: this rank's measurements by shape, with the fixed order if it is cheap, else with the varying order.
    """

    is_cheap: bool
    reason: str
    measured: dict[str, Measurement]


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
) -> _Comparison:
    """Measure attention kernels with both orders, on all ranks."""
    kind = find_device_kind(device)
    shapes = list_shapes(config, tensor, dtype, documents, context)
    kernel_names: list[str] | None = None  # all kernels
    if config.kernels.attention != "auto":
        kernel_names = [config.kernels.attention]
    varying = {str(shape): measure_shape(chooser, shape, device, kernel_names) for shape in shapes}
    varying_by_rank = peers.gather((kind, varying), RankMeasurement)
    candidates = peers.broadcast(find_candidates(varying_by_rank), Candidates)
    fixed: dict[str, Measurement] = {}
    with Kernels(config.kernels.mode, deterministic=True).as_current():
        for shape in shapes:
            fixed[str(shape)] = measure_shape(chooser, shape, device, candidates[kind][str(shape)])
    fixed_by_rank = peers.gather((kind, fixed), RankMeasurement)
    is_cheap, reason = peers.broadcast(compare_times(varying_by_rank, fixed_by_rank), tuple[bool, str])
    return _Comparison(is_cheap, reason, measured=fixed if is_cheap else varying)


def _group_by_kind(measurements: list[RankMeasurement]) -> dict[str, dict[str, list[Measurement]]]:
    """Return the measurements of the ranks with each kind of device, by kind and shape."""
    grouped: dict[str, dict[str, list[Measurement]]] = {}
    for kind, measured in measurements:
        shapes = grouped.setdefault(kind, {})
        for shape, measurement in measured.items():
            shapes.setdefault(shape, []).append(measurement)
    return grouped


def find_candidates(varying: list[RankMeasurement]) -> Candidates:
    """Return the kernels within MAX_EXTRA_TIME of the fastest.

    Only these are measured with a fixed order, because no kernel is faster with a fixed order than with a varying one.

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
    largest_extra = float("-inf")  # longest extra time of all shapes, as a share of the fastest kernel's time
    slowest_name = ""  # the kernel that takes this extra time
    for kind, shapes in _group_by_kind(varying).items():
        for shape, measurements in shapes.items():
            varying_times = find_slowest_times(measurements)
            fixed_times = find_slowest_times(fixed_by_kind[kind][shape])
            if not varying_times or not all(varying_times.values()):
                return False, f"attention kernels for {shape} are not measured on {kind}"
            fastest = min(varying_times, key=varying_times.__getitem__)
            # Time 0 on any rank stands for a fallback that was not measured there, because no candidate has run.
            measured_times = {
                name: milliseconds
                for name, milliseconds in fixed_times.items()
                if all(times[name] > 0 for times, _ in fixed_by_kind[kind][shape])
            }
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
