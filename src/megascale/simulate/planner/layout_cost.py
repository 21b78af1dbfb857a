"""Memory, bubble, FLOPs and traffic of a layout, without a GPU, and notes on settings that do not pay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np

from megascale.config import Config, ModelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core import flops, inventory
from megascale.core.adapters import AdapterSpec, count_adapter_elements
from megascale.core.inventory import BLOCK_PARTS
from megascale.core.layout import Layout, lay_out
from megascale.core.memory import MemoryEstimate, count_offloaded_state_bytes, estimate_offloaded_input_bytes
from megascale.core.parameter_counts import count_stage_parameters
from megascale.core.replay import ActionGraph, Timeline, replay_schedule
from megascale.core.schedule import Schedule, compute_ideal_bubble
from megascale.core.traffic import TrafficEstimate, check_priced_axes, estimate_stage_traffic
from megascale.core.unit_slots import has_chunk_slots
from megascale.errors import FitError

GIB = 2**30
# Nominal memory of one device in GiB, by a part of its name.
DEVICES = {"H200": 141.0, "B200": 180.0, "H100": 80.0, "H800": 80.0, "A100": 80.0, "A800": 80.0, "L40S": 48.0}
# Memory of the CUDA context, communicators and allocator slack beyond the counted tensors.
RESERVE_GIB = 4.0
# cuDNN's attention with a window of w tokens runs at w / (w + WINDOW_OVERHEAD) of the rate of full attention (H200,
# cuDNN 9.19, forward and backward: 0.36 of the time at 1,024 of 8,192 tokens, 0.98 at 512 of 2,048).
WINDOW_OVERHEAD = 600.0
MAX_WINDOW_TIME = 0.9  # of full attention's time; a slower window gets a note
# Time per FLOP of the logits with their loss, and of float8 linear layers with their casts. Both are relative to a
# bfloat16 layer and come from the calibration of the simulator to H200s (gpt-13b).
LOGITS_TIME = 1.25
FLOAT8_TIME = 0.6
# Axes, besides data and pipeline, whose memory and traffic the plan can estimate.
_PLANNED_AXES = ("tensor", "expert", "replicate")
SHORTEST_SLICE = 4096  # tokens of a context rank; shorter slices are not proposed
_MAX_REPLAYED_ACTIONS = 4_000_000  # actions of all splits that one replay compares, which bounds its memory
_MIN_SAVING = 0.005  # share of a step that a proposed split must save


def estimate_window_time(sequence: int, window: int) -> float:
    """Return the time of attention with a window, divided by the time of full attention; both by the fastest kernel."""
    return inventory.window_area_fraction(sequence, window) * (1 + WINDOW_OVERHEAD / window)


# Cached because the search for a better split calls it for every move.
@lru_cache(maxsize=64)
def _count_half_flops(model: ModelConfig, linear_time: float) -> np.ndarray:
    """Return the FLOPs of each half of each layer, with linear layers weighted by `linear_time`: [2 x layers]."""
    halves = []
    for layer in inventory.resolve_layers(model):
        count = flops.layer_flops(layer, model.sequence_length)
        halves += [linear_time * count.projections + count.attention, linear_time * count.mlp]
    return np.array(halves)


def lay_out_priced(
    config: Config, gpus: int, *, priced_axes: Collection[str] = ("tensor", "slice", "expert")
) -> Layout:
    """Lay out `config` over `gpus` ranks. Raises the FitError of `lay_out` and of `check_priced_axes`.

    Args:
        known: axes, besides data and pipeline, whose traffic the caller can estimate.
    """
    layout = lay_out(config, gpus)
    check_priced_axes(layout.grid, priced_axes)
    return layout


@dataclass(frozen=True)
class LayoutCost:
    """All figures of `megascale plan`.

    Attributes:
        layout: the planned layout.
        device_gib: memory of a device in GiB.
    """

    layout: Layout
    device_gib: float

    @property
    def config(self) -> Config:
        """The configuration planned."""
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
        return self._compute_work([chunk.layer_count for chunk in self.layout.layers])

    def _compute_work(self, split: Sequence[int | float]) -> tuple[np.ndarray, np.ndarray]:
        """Return `work` for another number of layers of each chunk."""
        model = self.config.model
        if LINEAR_PRECISIONS[self.config.train.linear_precision].float8_gemms == "none":
            linear_time = 1.0
        else:
            linear_time = FLOAT8_TIME
        half_flops = _count_half_flops(model, linear_time)
        mean_layer_flops = half_flops.sum() / model.layers
        # Index of the half layer after each chunk's last one.
        half_stops = np.cumsum([round(2 * count) for count in split])
        running_flops = np.concatenate([[0.0], half_flops.cumsum()])
        layers_work = np.diff(running_flops[[0, *half_stops]]) / mean_layer_flops
        forward = layers_work.copy()
        forward[-1] += LOGITS_TIME * flops.flops_per_token(model).logits / mean_layer_flops
        backward = 2 * forward
        if self.config.parallel.recompute == "full":
            backward = backward + layers_work
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
        limit = (self.device_gib - RESERVE_GIB) * GIB
        return [self.layout.stage_memory(stage, limit)[0] for stage in range(self.layout.grid.pipeline)]

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
        """Idle over busy time of the busiest stage, from the replay."""
        return float(self.timeline.bubble)

    @property
    def idle(self) -> float:
        """Share of the step in which a stage is idle, mean over stages; contains the bubble and unequal stages."""
        return float(1 - self.timeline.busy.mean() / self.timeline.makespan)

    @cached_property
    def faster_split(self) -> tuple[list[int | float], float] | None:
        """A split of layers with a shorter step: (layers of each chunk, saved share of the step); None if not found.

        The default split balances the stages' work. But the first stage begins first and ends last, while the others
        wait for its first results, so more work on the first stage fills the bubble. The search moves one layer at a
        time off the busiest stage and replays the schedule. Then it moves half layers, if blocks can be divided. A
        better split may exist.
        """
        stages = self.layout.grid.pipeline
        split = [chunk.layer_count for chunk in self.layout.layers]
        if stages == 1:
            return None
        default_time = float(self.timeline.makespan)
        shortest_time = default_time
        move_sizes = (1, 0.5) if BLOCK_PARTS[self.config.model.block].can_split else (1,)
        for size in move_sizes:
            for _ in range(stages):
                move = self._find_best_move(split, size)
                if move is None or move[1] > shortest_time * (1 - 1e-3):
                    break
                split, shortest_time = move
        if shortest_time < default_time * (1 - _MIN_SAVING):
            return (split, 1 - shortest_time / default_time)
        return None

    def _find_best_move(self, split: list[int | float], size: float) -> tuple[list[int | float], float] | None:
        """Return the best split after a move of `size` layers off the busiest stage: (split, time of the step).

        Returns None if no move is possible.
        """
        stages = self.layout.grid.pipeline
        graph = self.timeline.graph
        forward, backward = self._compute_work(split)
        busiest = int(np.argmax((forward + backward).sum(axis=1)))
        sources = [chunk for chunk in range(busiest, len(split), stages) if split[chunk] > size]
        # Later chunks first, since later stages have fewer micro-batches in flight.
        targets = [chunk for chunk in reversed(range(len(split))) if chunk % stages != busiest]
        move_count = len(sources) * len(targets)
        # With many moves, only every n-th is tried.
        stride = 1 + move_count * graph.action_count // _MAX_REPLAYED_ACTIONS
        candidates = []
        for index in range(0, move_count, stride):
            candidate = split.copy()
            candidate[sources[index // len(targets)]] -= size
            candidate[targets[index % len(targets)]] += size
            candidates.append([round(count) if count == round(count) else count for count in candidate])
        if not candidates:
            return None
        durations = []
        for candidate in candidates:
            forward, backward = self._compute_work(candidate)
            durations.append(graph.durations(forward, backward))
        times = replay_schedule(graph, np.stack(durations, axis=-1)).makespan
        return candidates[int(np.argmin(times))], float(times.min())

    def notes(self) -> list[str]:
        """Return one sentence per layout or window setting that does not pay."""
        model = self.config.model
        parallel = self.config.parallel
        grid = self.layout.grid
        notes = []
        if model.window is not None and model.window >= model.sequence_length:
            notes.append(f"model.window={model.window} covers the whole sequence: all layers use full attention")
        elif model.window is not None:
            window_time = estimate_window_time(model.sequence_length, model.window)
            if window_time > MAX_WINDOW_TIME:
                notes.append(
                    f"model.window={model.window} at model.sequence_length={model.sequence_length} takes about "
                    f"{min(window_time, 1.0):.0%} of full attention's time, where cuDNN serves both: for speed alone "
                    "it does not pay; a window pays where the sequence is many times as long"
                )
        if self.layout.microbatches < grid.pipeline:
            notes.append(
                f"{self.layout.microbatches} micro-batches cannot fill {grid.pipeline} stages; raise "
                f"train.global_batch to {grid.pipeline * grid.replicas * self.config.train.micro_batch} or more"
            )
        counts = [chunk.layer_count for chunk in self.layout.layers]
        if len(set(counts)) > 1:
            notes.append(f"layers are split unevenly over chunks: {_describe_runs(counts)} (logits count as layers)")
        if parallel.layer_split is None and self.faster_split is not None:
            split, saved_share = self.faster_split
            alternative = self._with_settings(parallel={"layer_split": split})
            additional_gib = alternative.needed_gib - self.needed_gib
            if alternative.fits or not self.fits:
                notes.append(
                    f"--parallel.layer_split={str(split).replace(' ', '')} fills the bubble with work of the first "
                    f"stage: a step {saved_share:.1%} shorter for {max(0.0, additional_gib):.1f} GiB more on the "
                    "fullest rank"
                )
        if grid.tensor > parallel.gpus_per_host:
            notes.append(
                f"parallel.tensor={grid.tensor} reaches beyond a host of {parallel.gpus_per_host} GPUs: gathers and "
                "scatters of every layer cross the network"
            )
        if grid.tensor * grid.context > parallel.gpus_per_host and grid.context > 1:
            notes.append(
                f"parallel.tensor={grid.tensor} x parallel.context={grid.context} reaches beyond a host of "
                f"{parallel.gpus_per_host} GPUs: the exchange of every attention crosses the network"
            )
        if parallel.recompute == "full":
            context = self._find_context("none")
            if context is not None:
                notes.append(
                    f"--parallel.context={context} --parallel.recompute=none fits too, and computes no layer twice"
                )
        if parallel.offload_activations:
            notes.append(
                f"parallel.offload_activations=true keeps {self.offloaded_gib:.1f} GiB of layer inputs per rank in "
                "host memory"
            )
        if parallel.zero >= 2:
            notes.append(self._describe_sharding())
        kept_layers = self._count_keepable_layers()
        if kept_layers > parallel.zero3_keep_layers:
            alternative = self._with_settings(parallel={"zero3_keep_layers": kept_layers})
            notes.append(
                f"--parallel.zero3_keep_layers={kept_layers} fits too, and gathers {alternative.gathered_gib:.0f} GiB "
                "of parameters per rank and step"
            )
        if self.config.optimizer.offload:
            notes.append(self._describe_offload())
        return notes

    def _describe_offload(self) -> str:
        """Return what optimizer.offload needs in host memory and moves per step."""
        parallel = self.config.parallel
        grid = self.layout.grid
        parameters = max(count_stage_parameters(self.config.model, parallel, stage) for stage in range(grid.pipeline))
        shards = grid.shards if parallel.zero else 1
        gib = count_offloaded_state_bytes(parameters, shards, self.config.train.precision) / GIB
        return (
            f"optimizer.offload=true keeps {gib:.1f} GiB per rank in page-locked host memory and moves them to the GPU "
            "and back in each update; step times do not include this"
        )

    @property
    def offloaded_gib(self) -> float:
        """Host memory of the rank with most layer inputs, in GiB."""
        config = self.config
        train = config.train
        byte_counts = [
            estimate_offloaded_input_bytes(
                config.model,
                config.parallel,
                schedule=self.schedule,
                stage=stage,
                micro_batch=train.micro_batch,
                precision=train.precision,
            )
            for stage in range(self.layout.grid.pipeline)
        ]
        return max(byte_counts) / GIB

    @property
    def gathered_gib(self) -> float:
        """Parameters that the rank with most gathers receives per step, in GiB."""
        return max(self.traffic(stage).data_gather for stage in self.stages) / GIB

    def _count_keepable_layers(self) -> int:
        """Return the largest parallel.zero3_keep_layers that fits; 0 if the plan does not fit or cannot keep layers."""
        parallel = self.config.parallel
        has_slots_of_blocks = parallel.zero == 3 and not has_chunk_slots(parallel.virtual_stages)
        if not has_slots_of_blocks or self.layout.grid.shards == 1 or not self.fits:
            return 0
        layer_counts = []
        for stage in self.stages:
            layer_counts.append(sum(chunk.layer_count for chunk in self.layout.stage_layers(stage)))
        candidates = range(parallel.zero3_keep_layers, ceil(max(layer_counts)) + 1)
        fitting_count = bisect_left(
            candidates, True, key=lambda count: not self._fits_with(parallel={"zero3_keep_layers": count})
        )
        return candidates[fitting_count - 1] if fitting_count else 0

    def _describe_sharding(self) -> str:
        """Return what parallel.zero=2 or 3 costs and saves."""
        zero = self.config.parallel.zero
        if self.layout.grid.shards == 1:
            return f"parallel.zero={zero} shards nothing: there is one data-parallel rank"
        saved_gib = self._compute_zero_saving() / GIB
        if saved_gib > 0:
            text = f"saves {saved_gib:.1f} GiB"
        else:
            text = f"needs {-saved_gib:.1f} GiB more, not less (few and small blocks)"
        reduction_count = self.layout.microbatches
        cost = (
            f"parallel.zero={zero} reduces gradients {reduction_count} times per step where parallel.zero=1 reduces "
            "once, "
        )
        if zero == 3:
            cost += f"gathers {self.gathered_gib:.0f} GiB of parameters per rank and step, "
        return f"{cost}and {text}"

    def _compute_zero_saving(self) -> int:
        """Return the bytes that parallel.zero saves on the fullest rank, compared with parallel.zero=1."""
        # Without graphs, because it may depend on parallel.zero whether graphs fit.
        with_zero = self._with_settings(kernels={"graphs": "off"})
        with_zero_1 = self._with_settings(parallel={"zero": 1}, kernels={"graphs": "off"})
        return max(m.total for m in with_zero_1.memory) - max(m.total for m in with_zero.memory)

    def _with_settings(self, **sections: dict[str, Any]) -> LayoutCost:
        """Return the plan with other settings, given by section and key. Raises FitError if they do not fit."""
        changed_sections = {}
        for name, settings in sections.items():
            changed_sections[name] = getattr(self.config, name).model_copy(update=settings)
        config = self.config.model_copy(update=changed_sections)
        return replace(self, layout=lay_out_priced(config, self.layout.grid.world_size, priced_axes=_PLANNED_AXES))

    def _fits_with(self, **sections: dict[str, Any]) -> bool:
        """Return whether the plan fits with these settings; False also if the layout does not divide with them."""
        try:
            return self._with_settings(**sections).fits
        except FitError:
            return False

    def remedies(self) -> list[str]:
        """Return overrides that each make the plan fit, cheapest first."""
        parallel = self.config.parallel
        train = self.config.train
        # Candidates: (override on the command line, the same by section and key).
        candidates: list[tuple[str, dict[str, dict[str, Any]]]] = []
        if self.config.kernels.graphs == "on":
            candidates.append(("--kernels.graphs=auto", {"kernels": {"graphs": "auto"}}))
        if parallel.zero == 0:
            candidates.append(("--parallel.zero=1", {"parallel": {"zero": 1}}))
        if parallel.micro_batch_group_size is not None and parallel.pipeline > 1:
            candidates.append(
                (
                    f"--parallel.micro_batch_group_size={parallel.pipeline}",
                    {"parallel": {"micro_batch_group_size": parallel.pipeline}},
                )
            )
        if parallel.recompute == "none":
            halves = ("mlp",) if BLOCK_PARTS[self.config.model.block].can_split else ()
            for recompute in ("activation", "selective", *halves):
                candidates.append((f"--parallel.recompute={recompute}", {"parallel": {"recompute": recompute}}))
        if parallel.zero3_keep_layers:
            candidates.append(("--parallel.zero3_keep_layers=0", {"parallel": {"zero3_keep_layers": 0}}))
        if train.micro_batch > 1:
            candidates.append(("--train.micro_batch=1", {"train": {"micro_batch": 1}}))
        if self.layout.grid.shards > 1:
            if parallel.zero < 2 and not (parallel.pipeline == 1 and parallel.virtual_stages > 1):
                candidates.append(("--parallel.zero=2", {"parallel": {"zero": 2}}))
            if parallel.zero < 3 and train.lora is None:
                candidates.append(("--parallel.zero=3", {"parallel": {"zero": 3}}))
        if parallel.recompute != "full":
            candidates.append(("--parallel.recompute=full", {"parallel": {"recompute": "full"}}))
        elif not parallel.offload_activations:
            candidates.append(("--parallel.offload_activations=true", {"parallel": {"offload_activations": True}}))
        if self.config.optimizer.name == "adamw" and not self.config.optimizer.offload:
            candidates.append(("--optimizer.offload=true", {"optimizer": {"offload": True}}))
        remedies = [override for override, sections in candidates if self._fits_with(**sections)]
        context = self._find_context(parallel.recompute)
        if context is not None:
            remedies.append(f"--parallel.context={context}")
        return remedies

    def _find_context(self, recompute: str) -> int | None:
        """Return the smallest parallel.context with which the layout fits, at the cost of replicas; None if none fits.

        A context rank keeps enough tokens to fill a GPU. With micro-batches of several samples the answer is None,
        because a smaller micro-batch is the better remedy.
        """
        grid = self.layout.grid
        if self.config.train.micro_batch > 1:
            return None
        for factor in (2, 4, 8, 16):
            context = grid.context * factor
            if self.config.model.sequence_length // context < SHORTEST_SLICE:
                return None
            if grid.data % factor or grid.tensor * context > grid.ranks_per_host:
                return None
            if self._fits_with(parallel={"context": context, "data": None, "recompute": recompute}):
                return context
        return None

    def _count_trained(self) -> int:
        """Return the number of trained parameters: of the model, or of its adapters."""
        spec = AdapterSpec.from_config(self.config.train)
        if spec is None:
            return flops.count_parameters(self.config.model)
        return sum(count_adapter_elements(self.config.model, spec, layers) for layers in self.layout.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON."""
        model = self.config.model
        grid = self.layout.grid
        train = self.config.train
        flops_per_token = flops.count_training_flops(model, train.lora is not None)
        tokens = train.global_batch * model.sequence_length
        return {
            "gpus": grid.world_size,
            "hosts": grid.host_count,
            "layout": {
                "tensor": grid.tensor,
                "pipeline": grid.pipeline,
                "virtual_stages": self.config.parallel.virtual_stages,
                "context": grid.context,
                "data": grid.shards // grid.size("context"),
                "microbatches": self.layout.microbatches,
                "layers_by_chunk": [chunk.layer_count for chunk in self.layout.layers],
                "zero": self.config.parallel.zero,
                "recompute": self.config.parallel.recompute,
            },
            "parameters": flops.count_parameters(model),
            "trained_parameters": self._count_trained(),
            "parameters_by_stage": [
                count_stage_parameters(model, self.config.parallel, s) for s in range(grid.pipeline)
            ],
            "flops": {
                "convention": flops.CONVENTION,
                "per_token": flops_per_token,
                "per_step": flops_per_token * tokens,
                "per_step_and_gpu": flops_per_token * tokens / grid.world_size,
            },
            "tokens_per_step": tokens,
            "schedule": {
                "name": self.schedule.name,
                "bubble_ideal": compute_ideal_bubble(
                    grid.pipeline, self.schedule.virtual_stages, self.layout.microbatches
                ),
                "bubble_replayed": self.bubble,
                "idle": self.idle,
                "in_flight_by_stage": [self.schedule.count_in_flight(s) for s in range(grid.pipeline)],
            },
            "memory_by_stage": [{**m.bytes_by_kind(), "total": m.total} for m in self.memory],
            "device_gib": self.device_gib,
            "reserve_gib": RESERVE_GIB,
            "needed_gib": self.needed_gib,
            "fits": self.fits,
            "sent_by_rank_and_step": {str(s): asdict(self.traffic(s)) for s in self.stages},
            "notes": self.notes(),
        }


def make_plan(config: Config, gpus: int, device_gib: float) -> LayoutCost:
    """Return the plan of `config` on `gpus` devices of `device_gib` GiB. Raises FitError if sizes do not divide."""
    return LayoutCost(lay_out_priced(config, gpus, priced_axes=_PLANNED_AXES), device_gib)


def _describe_runs(counts: list[int | float]) -> str:
    """Return counts as text with repetitions, such as "3 x 3, 1 x 2" for 3 3 3 2."""
    return ", ".join(f"{len(list(run))} x {count}" for count, run in groupby(counts))
