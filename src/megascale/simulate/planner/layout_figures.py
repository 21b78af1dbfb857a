"""Work, bubble, memory and traffic of a layout, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np

from megascale.config import Config, ModelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core import flops, inventory
from megascale.core.adapters import AdapterSpec
from megascale.core.host_memory import HostMemory, estimate_host_memory
from megascale.core.layout import Layout, lay_out
from megascale.core.memory import (
    MemoryEstimate,
)
from megascale.core.replay import ActionGraph, Timeline, replay_schedule
from megascale.core.schedule import Schedule
from megascale.core.traffic import TrafficEstimate, check_priced_axes, estimate_stage_traffic
from megascale.errors import ConfigError, FitError

GIB = 2**30
# Memory that CUDA offers of one device in GiB, by a part of its name: as in the cluster files. The sizes in vendors'
# names are larger. That of an H200 and an H100 was measured; the others are torch's totals in public error messages.
# The first entry that matches counts, so variants of a GPU with other memory stand before it.
DEVICES = {
    "GH200": 94.8,  # the size in the name of a GH200 is that of the CPU's memory
    "H100 NVL": 93.0,
    "H200": 139.8,
    "B200": 178.3,
    "H100": 79.2,
    "H800": 79.2,
    "A100": 79.2,
    "A800": 79.2,
    "L40S": 44.4,
}
# The size of the memory in a device's name, as in "A100-SXM4-40GB".
_SIZE_IN_NAME = re.compile(r"(?<![\d.])(\d+) ?G(?:i?B)?\b", re.IGNORECASE)
OFFERED_SHARE = 0.99  # share of the size in a device's name that CUDA offers: 79.2 of 80 GB
MAX_ROUNDING_GIB = 4.0  # a vendor's name of a size may exceed the device's memory by this much
# Memory of the CUDA context, communicators and allocator slack beyond the counted tensors.
RESERVE_GIB = 4.0
# Time per FLOP of the logits with their loss, and of float8 linear layers with their casts. Both are relative to a
# bfloat16 layer and come from the calibration of the simulator to H200s (gpt-13b).
LOGITS_TIME = 1.25
FLOAT8_TIME = 0.6
# Axes, besides data and pipeline, whose memory and traffic LayoutFigures can estimate.
PLANNED_AXES = ("tensor", "expert", "replicate")


# Cached because the search for a better split calls it for every move.
@lru_cache(maxsize=64)
def _count_half_flops(model: ModelConfig, linear_time: float) -> np.ndarray:
    """Return the FLOPs of each half layer (attention, then MLP of each layer), [2 x layers].

    Args:
        linear_time: weight of the FLOPs of linear layers.
    """
    halves = []
    for layer in inventory.resolve_layers(model):
        count = flops.layer_flops(layer, model.sequence_length)
        halves += [linear_time * count.projections + count.attention, linear_time * count.mlp]
    return np.array(halves)


def find_device_gib(name: str) -> float:
    """Return the memory in GiB of a device, whose name contains a key of DEVICES, such as "NVIDIA A100-SXM4-40GB".

    A smaller size in the name counts, since some GPUs are sold with less memory. Raises ConfigError for an unknown
    device, and for a size in the name that is larger than that of the known device.
    """
    key = next((key for key in DEVICES if key.lower() in name.lower()), None)
    if key is None:
        raise ConfigError(f"--device={name!r} is unknown ({', '.join(DEVICES)}); give its memory with --device-gib")
    size = _SIZE_IN_NAME.search(name)
    if size is None or key == "GH200":
        return DEVICES[key]
    gib = float(size.group(1))
    if gib > DEVICES[key] + MAX_ROUNDING_GIB:
        raise ConfigError(
            f"--device={name!r}: {key} is known with {DEVICES[key]:g} GiB only; give its memory with --device-gib"
        )
    if gib >= DEVICES[key]:
        return DEVICES[key]
    return round(OFFERED_SHARE * gib, 1)


def lay_out_priced(
    config: Config, gpus: int, *, priced_axes: Collection[str] = ("tensor", "slice", "expert")
) -> Layout:
    """Lay out `config` over `gpus` ranks. Raises the FitError of `lay_out` and of `check_priced_axes`.

    Args:
        priced_axes: axes, besides data and pipeline, whose traffic the caller can estimate.
    """
    layout = lay_out(config, gpus)
    check_priced_axes(layout.grid, priced_axes)
    return layout


@dataclass(frozen=True)
class LayoutFigures:
    """Work, bubble, memory and traffic of a layout.

    Attributes:
        device_gib: memory of a device in GiB.
    """

    layout: Layout
    device_gib: float

    @property
    def config(self) -> Config:
        """The configuration of the layout."""
        return self.layout.config

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule of a step."""
        return self.layout.schedule()

    @cached_property
    def timeline(self) -> Timeline:
        """The step replayed with free transfers. The unit of time is the forward of a mean layer."""
        graph = ActionGraph.compile(self.schedule)
        forward, backward = self.work
        return replay_schedule(graph, graph.durations(forward, backward))

    @cached_property
    def work(self) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward work of each chunk, in forwards of the mean layer: two arrays [stages, virtual]."""
        return self.compute_work([chunk.layer_count for chunk in self.layout.layers])

    def compute_work(self, split: Sequence[int | float]) -> tuple[np.ndarray, np.ndarray]:
        """Return forward and backward work as in `work`, for another number of layers of each chunk.

        Args:
            split: layers of each chunk, whole or half numbers, in model order.
        """
        model = self.config.model
        if LINEAR_PRECISIONS[self.config.train.linear_precision].float8_gemms == "none":
            linear_time = 1.0
        else:
            linear_time = FLOAT8_TIME
        half_flops = _count_half_flops(model, linear_time)
        mean_layer_flops = half_flops.sum() / model.layers
        # Index of the half layer after each chunk's last one.
        chunk_stops = np.cumsum([round(2 * count) for count in split])
        running_flops = np.concatenate([[0.0], half_flops.cumsum()])
        layers_work = np.diff(running_flops[[0, *chunk_stops]]) / mean_layer_flops
        forward = layers_work.copy()
        forward[-1] += LOGITS_TIME * flops.flops_per_token(model).logits / mean_layer_flops
        backward = 2 * forward
        if self.config.parallel.recompute == "full":
            backward = backward + layers_work  # the layers' forward is repeated, the logits' is not
        positions = self.layout.chunk_map.positions
        return forward[positions], backward[positions]

    @property
    def stages(self) -> list[int]:
        """Indices of the first, the middle and the last stage."""
        p = self.layout.grid.pipeline
        return sorted({0, p // 2, p - 1})

    @cached_property
    def memory(self) -> list[MemoryEstimate]:
        """Memory of a rank of each stage."""
        limit_bytes = (self.device_gib - RESERVE_GIB) * GIB
        estimates = []
        for stage in range(self.layout.grid.pipeline):
            estimate, _ = self.layout.stage_memory(stage, limit_bytes)
            estimates.append(estimate)
        return estimates

    def traffic(self, stage: int) -> TrafficEstimate:
        """Return the bytes that a rank of `stage` sends in a step."""
        config = self.config
        train = self.config.train
        return estimate_stage_traffic(
            config.model,
            config.parallel,
            grid=self.layout.grid,
            schedule=self.schedule,
            stage=stage,
            micro_batch=train.micro_batch,
            precision=train.precision,
            linear_precision=train.linear_precision,
            adapters=AdapterSpec.from_config(train),
            expert_exchange=config.overlap.expert,
        )

    @property
    def needed_gib(self) -> float:
        """Memory of the fullest rank with the reserve, in GiB."""
        return max(m.total for m in self.memory) / GIB + RESERVE_GIB

    @property
    def fits(self) -> bool:
        """True if every rank fits its device."""
        return self.needed_gib <= self.device_gib

    @property
    def bubble(self) -> float:
        """Idle time of the busiest stage divided by its busy time, from the replay."""
        return max(0.0, float(self.timeline.bubble))  # rounding may give -1e-16

    @property
    def idle(self) -> float:
        """Share of the step in which a stage is idle, mean over stages; contains the bubble and unequal stages."""
        return max(0.0, float(1 - self.timeline.busy.mean() / self.timeline.makespan))

    @cached_property
    def host_memory(self) -> list[HostMemory]:
        """Host memory of a rank of each stage on GPUs, besides its process."""
        grid = self.layout.grid
        has_peers = grid.host_count > 1
        estimates = []
        for stage in range(grid.pipeline):
            estimates.append(estimate_host_memory(self.layout, {stage: 1}, uses_gpus=True, has_peers=has_peers))
        return estimates

    @property
    def offloaded_gib(self) -> float:
        """Host memory of the rank with most layer inputs, in GiB."""
        return max(memory.inputs for memory in self.host_memory) / GIB

    @property
    def gathered_gib(self) -> float:
        """Parameters that the rank with most gathers receives per step, in GiB."""
        return max(self.traffic(stage).data_gather for stage in self.stages) / GIB

    def with_settings(self, **sections: dict[str, Any]) -> Self:
        """Return the same layout with other settings, given by section and key. Raises FitError if they do not fit."""
        changed_sections = {}
        for name, settings in sections.items():
            changed_sections[name] = getattr(self.config, name).model_copy(update=settings)
        config = self.config.model_copy(update=changed_sections)
        return replace(self, layout=lay_out_priced(config, self.layout.grid.world_size, priced_axes=PLANNED_AXES))

    def fits_with(self, **sections: dict[str, Any]) -> bool:
        """Return whether the layout fits the devices with other settings; False also if sizes do not divide then."""
        try:
            return self.with_settings(**sections).fits
        except FitError:
            return False
