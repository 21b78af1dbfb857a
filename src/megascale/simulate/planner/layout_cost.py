"""Memory, bubble, FLOPs and traffic of a layout before a GPU is rented, and notes on settings that do not pay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from megascale.config import Config, ModelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core import flops, inventory
from megascale.core.adapters import AdapterSpec, count_adapter_elements
from megascale.core.inventory import BLOCK_PARTS
from megascale.core.layout import Layout, lay_out
from megascale.core.memory import (
    MemoryEstimate,
    count_offloaded_bytes,
    count_stage_parameters,
    estimate_offloaded_bytes,
)
from megascale.core.replay import ActionGraph, Timeline, replay_schedule
from megascale.core.schedule import Schedule, ideal_bubble
from megascale.core.traffic import TrafficEstimate, check_priced_axes, estimate_stage_traffic
from megascale.errors import FitError

GIB = 2**30
# Memory of one device in GiB, as sold, matched against its name.
DEVICES = {"H200": 141.0, "B200": 180.0, "H100": 80.0, "H800": 80.0, "A100": 80.0, "A800": 80.0, "L40S": 48.0}
# Memory of the CUDA context, communicators and allocator slack beyond the counted tensors.
RESERVE_GIB = 4.0
# cuDNN's windowed attention works at w / (w + WINDOW_OVERHEAD) of its full attention's rate (H200, cuDNN 9.19, forward
# and backward: 0.36 of the time at 1,024 of 8,192 tokens, 0.98 at 512 of 2,048). Above WINDOW_PAYS it is not worth it.
WINDOW_OVERHEAD = 600.0
WINDOW_PAYS = 0.9
# Time per FLOP of the logits with their loss, and of float8 linear layers with their casts. Both are relative to a
# bfloat16 layer and come from the calibration of the simulator to H200s (gpt-13b).
LOGITS_TIME = 1.25
FLOAT8_TIME = 0.6
# Axes of a replica, and of copies of the state, whose memory and traffic the plan knows.
_PLANNED_AXES = ("tensor", "expert", "replicate")
SHORTEST_SLICE = 4096  # tokens of a context rank, below which no division is proposed
_REPLAYED = 4_000_000  # actions, over all splits tried at once
_WORTH = 0.005  # of a step: less is not worth a setting


def window_time(sequence: int, window: int) -> float:
    """Time of attention in a window of `window` tokens, as a share of full attention's; both by the fastest kernel."""
    return inventory.window_area_fraction(sequence, window) * (1 + WINDOW_OVERHEAD / window)


# Cached because a search for a better split asks for it with every move.
@lru_cache(maxsize=64)
def _half_work(model: ModelConfig, linear_time: float) -> np.ndarray:
    """Return the FLOPs of each half of a layer, those of linear layers times `linear_time`: [2 x layers]."""
    halves = []
    for layer in inventory.resolve_layers(model):
        count = flops.layer_flops(layer, model.sequence_length)
        halves += [linear_time * count.projections + count.attention, linear_time * count.mlp]
    return np.array(halves)


def lay_out_priced(config: Config, gpus: int, *, known: Collection[str] = ("tensor", "slice", "expert")) -> Layout:
    """Lay out `config` over `gpus` ranks. Raises FitError as `lay_out` and `check_priced_axes`.

    Args:
        known: axes of a replica, and of copies of the state, that the caller prices.
    """
    layout = lay_out(config, gpus)
    check_priced_axes(layout.grid, known)
    return layout


@dataclass(frozen=True)
class LayoutCost:
    """All figures of `megascale plan`. Sizes are in bytes; times are relative to the work of the stage."""

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
        """The step replayed with free transfers: work of a chunk by its FLOPs and what one of their kind takes."""
        graph = ActionGraph.compile(self.schedule)
        forward, backward = self.work
        return replay_schedule(graph, graph.durations(forward, backward))

    @cached_property
    def work(self) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward work of each chunk [stages, virtual], in forwards of the mean layer."""
        return self._work([chunk.layer_count for chunk in self.layout.layers])

    def _work(self, split: Sequence[int | float]) -> tuple[np.ndarray, np.ndarray]:
        model = self.config.model
        if LINEAR_PRECISIONS[self.config.train.linear_precision].float8_gemms == "none":
            linear = 1.0
        else:
            linear = FLOAT8_TIME
        work = _half_work(model, linear)
        unit = work.sum() / model.layers
        stops = np.cumsum([round(2 * count) for count in split])
        body = np.diff(np.concatenate([[0.0], work.cumsum()])[[0, *stops]]) / unit
        forward = body.copy()
        forward[-1] += LOGITS_TIME * flops.flops_per_token(model).logits / unit
        backward = 2 * forward + (body if self.config.parallel.recompute == "full" else 0)
        positions = self.layout.chunk_map.positions
        return forward[positions], backward[positions]

    @property
    def stages(self) -> list[int]:
        """First, middle and last stage."""
        p = self.layout.grid.pipeline
        return sorted({0, p // 2, p - 1})

    @cached_property
    def memory(self) -> list[MemoryEstimate]:
        """Memory of a rank of each stage."""
        limit = (self.device_gib - RESERVE_GIB) * GIB
        return [self.layout.stage_memory(stage, limit)[0] for stage in range(self.layout.grid.pipeline)]

    def traffic(self, stage: int) -> TrafficEstimate:
        """Bytes that a rank of `stage` sends in a step."""
        config = self.config
        grid = self.layout.grid
        train = self.config.train
        kinds = train.precision, train.linear_precision
        return estimate_stage_traffic(
            config.model,
            config.parallel,
            grid,
            self.schedule,
            stage,
            train.micro_batch,
            *kinds,
            adapters=AdapterSpec.from_config(train),
            expert_exchange=config.overlap.expert,
        )

    @property
    def needed_gib(self) -> float:
        """Memory of the fullest rank with the reserve, in GiB."""
        return max(m.total for m in self.memory) / GIB + RESERVE_GIB

    @property
    def fits(self) -> bool:
        """Return whether every rank fits its device."""
        return self.needed_gib <= self.device_gib

    @property
    def bubble(self) -> float:
        """Idle over busy time of the busiest stage, from the replay."""
        return float(self.timeline.bubble)

    @property
    def idle(self) -> float:
        """Mean share of the step in which a stage computes nothing: bubble and uneven stages together."""
        return float(1 - self.timeline.busy.mean() / self.timeline.makespan)

    @cached_property
    def faster_split(self) -> tuple[list[int | float], float] | None:
        """Layers of each chunk that make the step shorter, and by what share; None if no move of layers does.

        The default split evens out the stages' work. But the first stage begins first and ends last, while the others
        wait for its first results: with some more work on it the bubble is filled. The search moves one layer at a time
        off the busiest stage and replays the schedule, and then half a layer where blocks divide. A better split may
        exist.
        """
        stages, counts = self.layout.grid.pipeline, [chunk.layer_count for chunk in self.layout.layers]
        if stages == 1:
            return None
        first = best = float(self.timeline.makespan)
        for size in (1, 0.5) if BLOCK_PARTS[self.config.model.block].can_split else (1,):
            for _ in range(stages):
                move = self._best_move(counts, size)
                if move is None or move[1] > best * (1 - 1e-3):
                    break
                counts, best = move
        if best < first * (1 - _WORTH):
            return (counts, 1 - best / first)
        return None

    def _best_move(self, counts: list[int | float], size: float) -> tuple[list[int | float], float] | None:
        """The split that a move of `size` layers off the busiest stage makes fastest, and its step; None: no move."""
        stages, graph = self.layout.grid.pipeline, self.timeline.graph
        forward, backward = self._work(counts)
        busiest = int(np.argmax((forward + backward).sum(axis=1)))
        sources = [c for c in range(busiest, len(counts), stages) if counts[c] > size]
        targets = [c for c in reversed(range(len(counts))) if c % stages != busiest]  # later: fewer in flight
        number = len(sources) * len(targets)
        moves = []
        for position in range(0, number, 1 + number * graph.action_count // _REPLAYED):
            move = counts.copy()
            move[sources[position // len(targets)]] -= size
            move[targets[position % len(targets)]] += size
            moves.append([round(n) if n == round(n) else n for n in move])
        if not moves:
            return None
        times = replay_schedule(graph, np.stack([graph.durations(*self._work(m)) for m in moves], axis=-1)).makespan
        return moves[int(np.argmin(times))], float(times.min())

    def notes(self) -> list[str]:
        """Return one sentence per layout or window setting that does not pay."""
        model = self.config.model
        parallel = self.config.parallel
        grid = self.layout.grid
        notes = []
        if model.window is not None and model.window >= model.sequence_length:
            notes.append(f"model.window={model.window} covers the whole sequence: all layers use full attention")
        elif model.window is not None and (share := window_time(model.sequence_length, model.window)) > WINDOW_PAYS:
            notes.append(
                f"model.window={model.window} at model.sequence_length={model.sequence_length} takes about "
                f"{min(share, 1.0):.0%} of full attention's time, where cuDNN serves both: for speed alone it does not "
                "pay; a window pays where the sequence is many times as long"
            )
        if self.layout.microbatches < grid.pipeline:
            notes.append(
                f"{self.layout.microbatches} micro-batches cannot fill {grid.pipeline} stages; raise "
                f"train.global_batch to {grid.pipeline * grid.replicas * self.config.train.micro_batch} or more"
            )
        counts = [chunk.layer_count for chunk in self.layout.layers]
        if len(set(counts)) > 1:
            notes.append(f"layers are split unevenly over chunks: {_runs(counts)} (logits weigh in layers)")
        if parallel.layer_split is None and self.faster_split is not None:
            split, gain = self.faster_split
            alternative = self._changed(parallel={"layer_split": split})
            more = alternative.needed_gib - self.needed_gib
            if alternative.fits or not self.fits:
                notes.append(
                    f"--parallel.layer_split={str(split).replace(' ', '')} fills the bubble with work of the first "
                    f"stage: a step {gain:.1%} shorter for {max(0.0, more):.1f} GiB more on the fullest rank"
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
        if self.config.optimizer.offload:
            notes.append(self._describe_offload())
        return notes

    def _describe_offload(self) -> str:
        """Return what optimizer.offload needs in host memory and moves per step."""
        parallel, grid = self.config.parallel, self.layout.grid
        parameters = max(count_stage_parameters(self.config.model, parallel, stage) for stage in range(grid.pipeline))
        shards = grid.shards if parallel.zero else 1
        gib = count_offloaded_bytes(parameters, shards, self.config.train.precision) / GIB
        return (
            f"optimizer.offload=true keeps {gib:.1f} GiB per rank in page-locked host memory and moves them to the GPU "
            "and back in each update; step times do not include this"
        )

    @property
    def offloaded_gib(self) -> float:
        """Host memory of the rank with most layer inputs, in GiB."""
        config, train = self.config, self.config.train
        arguments = config.model, config.parallel, self.schedule
        stages = range(self.layout.grid.pipeline)
        sizes = [estimate_offloaded_bytes(*arguments, stage, train.micro_batch, train.precision) for stage in stages]
        return max(sizes) / GIB

    def _describe_sharding(self) -> str:
        """Return what parallel.zero=2 or 3 costs and saves."""
        zero = self.config.parallel.zero
        if self.layout.grid.shards == 1:
            return f"parallel.zero={zero} shards nothing: there is one data-parallel rank"
        saved = self._zero_saving() / GIB
        if saved > 0:
            text = f"saves {saved:.1f} GiB"
        else:
            text = f"needs {-saved:.1f} GiB more, not less (few and small blocks)"
        count = self.layout.microbatches
        cost = f"parallel.zero={zero} reduces gradients {count} times per step where parallel.zero=1 reduces once, "
        if zero == 3:
            gathered = max(self.traffic(stage).data_gather for stage in self.stages) / GIB
            cost += f"gathers {gathered:.0f} GiB of parameters per rank and step, "
        return f"{cost}and {text}"

    def _zero_saving(self) -> int:
        eager = {"graphs": "off"}  # whether graphs fit may depend on parallel.zero
        alternative = self._changed(parallel={"zero": 1}, kernels=eager)
        return max(m.total for m in alternative.memory) - max(m.total for m in self._changed(kernels=eager).memory)

    def _changed(self, **sections: dict[str, Any]) -> LayoutCost:
        config = self.config.model_copy(
            update={name: getattr(self.config, name).model_copy(update=keys) for name, keys in sections.items()}
        )
        return replace(self, layout=lay_out_priced(config, self.layout.grid.world_size, known=_PLANNED_AXES))

    def _fits_with(self, **sections: dict[str, Any]) -> bool:
        """Return whether the plan fits with these settings; False also if they are refused with the other ones."""
        try:
            return self._changed(**sections).fits
        except FitError:
            return False

    def remedies(self) -> list[str]:
        """Return overrides that each make the plan fit, cheapest first."""
        parallel, train = self.config.parallel, self.config.train
        tries: list[tuple[str, dict[str, dict[str, Any]]]] = []
        if self.config.kernels.graphs == "on":
            tries.append(("--kernels.graphs=auto", {"kernels": {"graphs": "auto"}}))
        if parallel.zero == 0:
            tries.append(("--parallel.zero=1", {"parallel": {"zero": 1}}))
        if parallel.micro_batch_group_size is not None and parallel.pipeline > 1:
            tries.append(
                (
                    f"--parallel.micro_batch_group_size={parallel.pipeline}",
                    {"parallel": {"micro_batch_group_size": parallel.pipeline}},
                )
            )
        if parallel.recompute == "none":
            halves = ("mlp",) if BLOCK_PARTS[self.config.model.block].can_split else ()
            for less in ("activation", "selective", *halves):
                tries.append((f"--parallel.recompute={less}", {"parallel": {"recompute": less}}))
        if train.micro_batch > 1:
            tries.append(("--train.micro_batch=1", {"train": {"micro_batch": 1}}))
        if self.layout.grid.shards > 1:
            if parallel.zero < 2 and not (parallel.pipeline == 1 and parallel.virtual_stages > 1):
                tries.append(("--parallel.zero=2", {"parallel": {"zero": 2}}))
            if parallel.zero < 3 and train.lora is None:
                tries.append(("--parallel.zero=3", {"parallel": {"zero": 3}}))
        if parallel.recompute != "full":
            tries.append(("--parallel.recompute=full", {"parallel": {"recompute": "full"}}))
        elif not parallel.offload_activations:
            tries.append(("--parallel.offload_activations=true", {"parallel": {"offload_activations": True}}))
        if self.config.optimizer.name == "adamw" and not self.config.optimizer.offload:
            tries.append(("--optimizer.offload=true", {"optimizer": {"offload": True}}))
        remedies = [text for text, change in tries if self._fits_with(**change)]
        context = self._find_context(parallel.recompute)
        if context is not None:
            remedies.append(f"--parallel.context={context}")
        return remedies

    def _find_context(self, recompute: str) -> int | None:
        """Return the fewest context ranks, taken from the replicas, with which the layout fits; None if none do.

        Slices keep enough tokens to fill a GPU, and a larger micro-batch is lowered first.
        """
        grid, length = self.layout.grid, self.config.model.sequence_length
        if self.config.train.micro_batch > 1:
            return None
        for context in (2, 4, 8, 16):
            if length // (grid.context * context) < SHORTEST_SLICE:
                return None
            if grid.data % context or grid.tensor * grid.context * context > grid.ranks_per_host:
                return None
            total = grid.context * context
            if self._fits_with(parallel={"context": total, "data": None, "recompute": recompute}):
                return total
        return None

    def _count_trained(self) -> int:
        """Return the number of trained parameters: of the model, or of its adapters."""
        spec = AdapterSpec.from_config(self.config.train)
        if spec is None:
            return flops.count_parameters(self.config.model)
        return sum(count_adapter_elements(self.config.model, spec, layers) for layers in self.layout.layers)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data for JSON."""
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
                "bubble_ideal": ideal_bubble(grid.pipeline, self.schedule.virtual_stages, self.layout.microbatches),
                "bubble_replayed": self.bubble,
                "idle": self.idle,
                "in_flight_by_stage": [self.schedule.count_in_flight(s) for s in range(grid.pipeline)],
            },
            "memory_by_stage": [{**m.kinds(), "total": m.total} for m in self.memory],
            "device_gib": self.device_gib,
            "reserve_gib": RESERVE_GIB,
            "needed_gib": self.needed_gib,
            "fits": self.fits,
            "sent_by_rank_and_step": {str(s): asdict(self.traffic(s)) for s in self.stages},
            "notes": self.notes(),
        }


def make_plan(config: Config, gpus: int, device_gib: float) -> LayoutCost:
    """Plan `config` on `gpus` devices of `device_gib` GiB. FitError if the layout does not divide."""
    return LayoutCost(lay_out_priced(config, gpus, known=_PLANNED_AXES), device_gib)


def _runs(counts: list[int | float]) -> str:
    """3 3 3 2 as "3 x 3, 1 x 2"."""
    out: list[list[int | float]] = []
    for n in counts:
        if out and out[-1][1] == n:
            out[-1][0] += 1
        else:
            out.append([1, n])
    return ", ".join(f"{times} x {n}" for times, n in out)
