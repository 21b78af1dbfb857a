"""The plan of a layout: its figures as JSON, notes on settings that do not pay, and remedies if it does not fit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from math import ceil
from typing import Any

from megascale.config import Config
from megascale.core import flops, part_inventories
from megascale.core.adapters import AdapterSpec, count_adapter_elements
from megascale.core.copy_choice import explain_collective_gathers, explain_collective_reductions
from megascale.core.memory import count_offloaded_state_bytes
from megascale.core.parameter_counts import count_stage_parameters
from megascale.core.part_inventories import BLOCK_PARTS
from megascale.core.schedule import compute_ideal_bubble
from megascale.core.unit_slots import has_chunk_slots
from megascale.simulate.planner.layout_figures import GIB, PLANNED_AXES, RESERVE_GIB, LayoutFigures, lay_out_priced
from megascale.simulate.planner.split_search import FasterSplit, find_faster_split

# cuDNN's attention with a window of w tokens reaches w / (w + WINDOW_OVERHEAD) of the FLOP rate of full attention.
# Measured on an H200 with cuDNN 9.19, forward and backward: a window of 1,024 of 8,192 tokens takes 0.36 of full
# attention's time, and a window of 512 of 2,048 tokens 0.98.
WINDOW_OVERHEAD = 600.0
MAX_WINDOW_TIME = 0.9  # share of full attention's time from which on a window gets a note
SHORTEST_SLICE = 4096  # tokens of a context rank; shorter slices are not proposed


def estimate_window_time(sequence: int, window: int) -> float:
    """Return the time of attention with a window, divided by the time of full attention, each by its fastest kernel."""
    return part_inventories.window_area_fraction(sequence, window) * (1 + WINDOW_OVERHEAD / window)


@dataclass(frozen=True)
class LayoutCost(LayoutFigures):
    """All figures of `megascale plan`."""

    @cached_property
    def faster_split(self) -> FasterSplit | None:
        """A split of layers with a shorter step; None if the search does not find one."""
        return find_faster_split(self)

    def notes(self) -> list[str]:
        """Return one sentence per setting that does not pay, has a hidden cost, or could be improved."""
        notes = self._note_window() + self._note_pipeline() + self._note_hosts()
        parallel = self.config.parallel
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
        kept_layers = self.count_keepable_layers()
        if kept_layers > parallel.zero3_keep_layers:
            alternative = self.with_settings(parallel={"zero3_keep_layers": kept_layers})
            notes.append(
                f"--parallel.zero3_keep_layers={kept_layers} fits too, and gathers {alternative.gathered_gib:.0f} GiB "
                "of parameters per rank and step"
            )
        if self.config.optimizer.offload:
            notes.append(self._describe_offload())
        return notes

    def _note_window(self) -> list[str]:
        """Return a note on a window that covers the sequence or takes almost as long as full attention."""
        model = self.config.model
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
        return notes

    def _note_pipeline(self) -> list[str]:
        """Return notes on too few micro-batches, an uneven split of the layers, and a faster split."""
        parallel = self.config.parallel
        grid = self.layout.grid
        notes = []
        microbatches = self.layout.microbatches
        if microbatches < grid.pipeline:
            notes.append(
                f"{microbatches} micro-batch{'' if microbatches == 1 else 'es'} cannot fill {grid.pipeline} stages; "
                f"raise train.global_batch to {grid.pipeline * grid.replicas * self.config.train.micro_batch} or more"
            )
        counts = [chunk.layer_count for chunk in self.layout.layers]
        if len(set(counts)) > 1:
            notes.append(f"layers are split unevenly over chunks: {_describe_runs(counts)} (logits count as layers)")
        if parallel.layer_split is None and self.faster_split is not None:
            split, saved_share = self.faster_split
            alternative = self.with_settings(parallel={"layer_split": split})
            additional_gib = alternative.needed_gib - self.needed_gib
            if alternative.fits or not self.fits:
                notes.append(
                    f"--parallel.layer_split={str(split).replace(' ', '')} fills the bubble with work of the first "
                    f"stage: a step {saved_share:.1%} shorter for {max(0.0, additional_gib):.1f} GiB more on the "
                    "fullest rank"
                )
        return notes

    def _note_hosts(self) -> list[str]:
        """Return notes on axes that reach beyond a host."""
        parallel = self.config.parallel
        grid = self.layout.grid
        notes = []
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
        return notes

    def _describe_offload(self) -> str:
        """Return a note on the host memory that optimizer.offload needs and on the bytes that it moves per step."""
        parallel = self.config.parallel
        grid = self.layout.grid
        parameters = max(count_stage_parameters(self.config.model, parallel, stage) for stage in range(grid.pipeline))
        shards = grid.shards if parallel.zero else 1
        gib = count_offloaded_state_bytes(parameters, shards, self.config.train.precision) / GIB
        return (
            f"optimizer.offload=true keeps {gib:.1f} GiB per rank in page-locked host memory and moves them to the GPU "
            "and back in each update; step times do not include this"
        )

    def count_keepable_layers(self) -> int:
        """Return the largest parallel.zero3_keep_layers that fits; 0 if the plan does not fit or cannot keep layers."""
        parallel = self.config.parallel
        has_slots_of_blocks = parallel.zero == 3 and not has_chunk_slots(parallel.virtual_stages)
        if not has_slots_of_blocks or self.layout.grid.shards == 1 or not self.fits:
            return 0
        layer_counts = []
        for stage in self.stages:
            layer_counts.append(sum(chunk.layer_count for chunk in self.layout.stage_layers(stage)))
        all_layers = ceil(max(layer_counts))
        # All layers may need less memory than all but one, because no layer then uses the two shared slots.
        if self.fits_with(parallel={"zero3_keep_layers": all_layers}):
            return all_layers
        candidates = range(parallel.zero3_keep_layers, all_layers)
        fitting_count = bisect_left(
            candidates, True, key=lambda count: not self.fits_with(parallel={"zero3_keep_layers": count})
        )
        return candidates[fitting_count - 1] if fitting_count else 0

    def _describe_sharding(self) -> str:
        """Return a note on the cost and the savings of parallel.zero=2 or 3, compared with parallel.zero=1."""
        zero = self.config.parallel.zero
        if self.layout.grid.shards == 1:
            return f"parallel.zero={zero} shards nothing: there is one data-parallel rank"
        saved_gib = self._compute_zero_saving() / GIB
        if saved_gib > 0:
            text = f"saves {saved_gib:.1f} GiB"
        else:
            text = f"needs {-saved_gib:.1f} GiB more, not less (few and small blocks)"
        reduction_count = self.layout.microbatches
        reductions = _name_engine(explain_collective_reductions(self.config, self.layout.grid))
        cost = (
            f"parallel.zero={zero} reduces gradients {reduction_count} times per step by {reductions} where "
            "parallel.zero=1 reduces once, "
        )
        if zero == 3:
            gathers = _name_engine(explain_collective_gathers(self.config, self.layout.grid))
            cost += f"gathers {self.gathered_gib:.0f} GiB of parameters per rank and step by {gathers}, "
        return f"{cost}and {text}"

    def _compute_zero_saving(self) -> int:
        """Return the bytes that parallel.zero saves on the fullest rank, compared with parallel.zero=1."""
        # Without graphs, because it may depend on parallel.zero whether graphs fit.
        with_zero = self.with_settings(kernels={"graphs": "off"})
        with_zero_1 = self.with_settings(parallel={"zero": 1}, kernels={"graphs": "off"})
        return max(m.total for m in with_zero_1.memory) - max(m.total for m in with_zero.memory)

    def remedies(self) -> list[str]:
        """Return overrides that each make the plan fit, cheapest first."""
        parallel = self.config.parallel
        train = self.config.train
        # Overrides on the command line, with the same settings by section and key.
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
        remedies = [override for override, sections in candidates if self.fits_with(**sections)]
        context = self._find_context(parallel.recompute)
        if context is not None:
            remedies.append(f"--parallel.context={context}")
        return remedies

    def _find_context(self, recompute: str) -> int | None:
        """Return the smallest larger parallel.context with which the layout fits; None if none does.

        The number of GPUs stays, so there are fewer replicas.

        A context rank keeps at least SHORTEST_SLICE tokens, which fill a GPU. With micro-batches of several samples the
        result is None, because a smaller micro-batch is the better remedy.
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
            if self.fits_with(parallel={"context": context, "data": None, "recompute": recompute}):
                return context
        return None

    def _count_trained_parameters(self) -> int:
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
            "trained_parameters": self._count_trained_parameters(),
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
            "host_memory_by_stage": [{**asdict(memory), "total": memory.total} for memory in self.host_memory],
            "device_gib": self.device_gib,
            "reserve_gib": RESERVE_GIB,
            "needed_gib": self.needed_gib,
            "fits": self.fits,
            "sent_by_rank_and_step": {str(s): asdict(self.traffic(s)) for s in self.stages},
            "notes": self.notes(),
        }


def make_plan(config: Config, gpus: int, device_gib: float) -> LayoutCost:
    """Return the plan of `config` on `gpus` devices of `device_gib` GiB. Raises FitError if sizes do not divide."""
    return LayoutCost(lay_out_priced(config, gpus, priced_axes=PLANNED_AXES), device_gib)


def _name_engine(reason: str) -> str:
    """Return what moves data, given why collectives do, "" if they do not."""
    if reason:
        return f"collectives ({reason})"
    return "copy engines"


def _describe_runs(counts: list[int | float]) -> str:
    """Return counts as text with repetitions, such as "3 x 3, 1 x 2" for 3 3 3 2."""
    return ", ".join(f"{len(list(run))} x {count}" for count, run in groupby(counts))
