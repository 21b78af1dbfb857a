"""The parts of one rank's engine, made from the layout: model chunks, data parallelism, optimizer, pipeline and graphs.

An exchange (parallel/exchange.py) copies data between the GPUs of one host, in place of NCCL's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from megascale.config.axes import AXES
from megascale.core.batch import NO_FIELDS, SampleFields, check_fields
from megascale.core.capture_plan import find_boundaries, reads_complete_state
from megascale.core.grid import Coordinate
from megascale.core.layout import Layout
from megascale.core.stopwatch import Stopwatch
from megascale.core.tensors import Piece
from megascale.errors import ConfigError
from megascale.ops.gradient_sink import get_sink
from megascale.optim.optimizer import ShardedOptimizer
from megascale.parallel.buffers import TIED, Axes
from megascale.parallel.chunk_graphs import ChunkGraphs
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.launch_times import CHOICE_NAME, CudaLaunchClock, GraphChoice, LaunchClock
from megascale.parallel.parameters import get_spec, initialise_parameter, list_piece_views
from megascale.parallel.pipeline import PipelineExecutor
from megascale.parallel.runtime import Runtime
from megascale.parallel.slot_sink import SlotSink
from megascale.rendezvous.groups import Groups
from megascale.train import engine_axes
from megascale.train.attention_choice import Choices
from megascale.train.blank_batches import describe_shares, make_blank_batches
from megascale.train.chunk_forward import ChunkForward
from megascale.train.embedding_reduction import choose_embedding_reduction, find_row_exchange_obstacle
from megascale.train.expert_balance import describe_experts, make_expert_balance
from megascale.train.graph_conditions import GraphConditions
from megascale.train.kernel_selection import KernelSelection
from megascale.train.loss_weights import LossWeights
from megascale.train.stage_model import StageModel
from megascale.train.step_check import StepCheck

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
REDUCE_DTYPES = {"bfloat16": torch.bfloat16}  # other settings reduce gradients in the type of their buffers

E = TypeVar("E", bound="EngineParts")
P = ParamSpec("P")
R = TypeVar("R")


def choose_loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of losses for activations of `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def with_engine_kernels(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Wrap a method of the engine so that operators take their kernels from `engine.runtime` while the method runs."""

    @wraps(method)
    def run(engine: E, *args: P.args, **kwargs: P.kwargs) -> R:
        with engine.runtime.kernels.as_current():
            return method(engine, *args, **kwargs)

    return run


class EngineParts:
    """Model, buffers, pipeline and optimizer of this rank.

    Args:
        layout: the configuration laid out over the world.
        groups: this rank's communicators; None for a world of one.
        earlier_choices: attention kernels that earlier starts of the run chose (train/attention_choice.py). Those
            passed on rank 0 count. With earlier choices or groups, all ranks agree on kernels now. Otherwise each
            kernel is chosen when it is first needed.
        runtime: recorder, streams and kernels; default: a new one, which records nothing.
        fields: optional fields that all micro-batches carry. If replicas read different numbers of micro-batches, the
            engine adds loss weights.
        launch_clock: measures launches for kernels.graphs=auto; None: the clock of a CUDA device. A CPU has none, and
            without a clock auto is off.
        draws_weights: whether to draw initial weights. Otherwise they are 0, and the caller loads all of them.

    Attributes:
        data_rank: index of this rank's replica, which has samples of its own (`Grid.replica`).
        chunk_forward: runs the chunks for the micro-batches of a step.
        active: overlaps and kernels chosen at the start, by name, for the start-up lines.
        graphs: CUDA graphs of the chunks; None: this rank has none.
        graph_choice: decides with all ranks whether graphs are used (kernels.graphs=auto); None: no times decide it.
        graph_exclusion: why `exclude_graphs` has excluded graphs, "" if it has not.
        backward_in_own_thread: run backward in autograd's own thread. By default backward runs in the caller's thread.
            Autograd's thread would wait for the interpreter's lock before each backward function in Python, and would
            see only the default kernels (ops/dispatch.py).
        before_update_hooks: called with the step's number when gradients and weights are complete and the weights are
            still those that the step trained with.
        after_update_hooks: called with the step's number after the update.
        replay_check: replays micro-batches of other replicas (train/replay_check.py); None: off.
        build_seconds: seconds of the host by part of the construction.
        begun_update, ended_update: the newest steps whose update has begun and has ended. On a GPU an ended update
            may still be queued.
    """

    def __init__(
        self,
        layout: Layout,
        groups: Groups | None,
        device: torch.device,
        earlier_choices: Choices | None = None,
        runtime: Runtime | None = None,
        fields: SampleFields = NO_FIELDS,
        launch_clock: LaunchClock | None = None,
        draws_weights: bool = True,
    ) -> None:
        config, grid = layout.config, layout.grid
        check_fields(fields, config.model, "data.train", config.data.train)
        rank = groups.rank if groups is not None else 0
        self.config = config
        self.layout = layout
        self.device = device
        self.dtype = DTYPES[config.train.precision]
        self.data_rank = grid.replica(rank)
        self.tokens_per_step = layout.tokens_per_step
        # Along some axes every rank of the last stage has the complete loss, which must be counted once.
        axes_of_equal_loss = [name for name in AXES.stage if AXES[name].repeats_loss]
        self.counts_loss = grid.is_first(axes_of_equal_loss, rank)
        self.backward_in_own_thread = False
        self.before_update_hooks: list[Callable[[int], None]] = []
        self.after_update_hooks: list[Callable[[int], None]] = []
        self.replay_check: StepCheck | None = None
        self.active: dict[str, str] = {}
        self._blank_batches = make_blank_batches(layout, fields, self.data_rank, device)
        if self._blank_batches is not None:
            self.active["micro-batches"] = describe_shares(layout)
            fields = replace(fields, loss_weights=True)
        self.fields = fields
        self.begun_update = self.ended_update = 0
        self.runtime = runtime or Runtime()
        if launch_clock is None and device.type == "cuda":
            launch_clock = CudaLaunchClock()
        stopwatch = Stopwatch()
        self.build_seconds = stopwatch.timings
        self._make_parts(groups, rank, earlier_choices, stopwatch, draws_weights=draws_weights)
        self._choose_graphs(launch_clock)
        if grid.pipeline > 1 and device.type == "cuda":
            self.load_kernels()
        stopwatch.end_phase("pipeline")

    def _make_parts(
        self,
        groups: Groups | None,
        rank: int,
        earlier_choices: Choices | None,
        stopwatch: Stopwatch,
        *,
        draws_weights: bool,
    ) -> None:
        """Make kernels, axes, model, data parallelism, optimizer and pipeline, in this order.

        Args:
            groups, earlier_choices, draws_weights: as for the class.
        """
        layout, device = self.layout, self.device
        coordinate = layout.grid.coordinate(rank)
        self.kernel_selection = KernelSelection(
            layout, self.runtime, dtype=self.dtype, device=device, max_documents=self.fields.max_documents
        )
        self.active |= self.kernel_selection.select(earlier_choices, has_groups=groups is not None)
        stopwatch.end_phase("kernels")
        axes = self._make_axes(groups)
        stopwatch.end_phase("axes")
        gathers_in_float8, precision_line = engine_axes.choose_float8_gathers(layout)
        self.active |= precision_line
        self._make_model(coordinate.pipeline, axes, draws_weights=draws_weights)
        stopwatch.end_phase("model")
        self.data_parallel = self._make_data_parallel(axes, coordinate.pipeline, gathers_in_float8)
        if draws_weights:
            self.data_parallel.initialise_slots(partial(initialise_parameter, seed=self.config.train.seed))
        stopwatch.end_phase("data parallelism")
        self.optimizer = self._make_optimizer(axes, coordinate)
        stopwatch.end_phase("optimizer")
        self.experts = make_expert_balance(layout, self.chunks, rank=rank, device=device)
        if self.experts is not None:
            self.active |= describe_experts(layout)
        self.pipeline = self._make_pipeline(groups, coordinate.pipeline)
        self._loss_weights = self._make_loss_weights(groups, rank)
        self.chunk_forward = self._make_chunk_forward()

    def _choose_graphs(self, launch_clock: LaunchClock | None) -> None:
        """Make the CUDA graphs of the chunks, if they are in use, and choose what depends on them.

        Args:
            launch_clock: as for the class; None on a CPU without a clock.
        """
        self.graph_choice: GraphChoice | None = None
        self.graph_exclusion = ""
        self.graphs: ChunkGraphs | None = None
        self.graphs = self._make_graphs(launch_clock)
        # Ranks of all stages look for obstacles, so that all end with the same error.
        self.active |= choose_embedding_reduction(
            self.layout,
            self.data_parallel,
            obstacle=self._find_row_exchange_obstacle(),
            has_embedding=self.chunks[0].is_first,
        )
        if self._has_row_limit:
            self.chunk_forward.keeps_batches = True  # a step may be repeated

    @property
    def attention_choices(self) -> Choices:
        """Attention kernels by kind of device and shape, to be saved with the run."""
        return self.kernel_selection.attention

    def _make_axes(self, groups: Groups | None) -> Axes:
        """Return the axes that the buffers communicate over. Choose the overlaps of the model's axes, and record them.

        Set `tensor_axis`, `_context_axis`, `_expert_axis` and `world_axis`.
        """
        config = self.config
        model_axes = engine_axes.make_model_axes(self.runtime, groups)
        self.tensor_axis, tensor_lines = engine_axes.choose_tensor_overlap(
            model_axes["tensor"], config, self.dtype, self.device
        )
        model_axes["tensor"] = self.tensor_axis
        self._context_axis, context_lines = engine_axes.choose_context_exchange(
            model_axes["context"], config, self.dtype, self.device
        )
        model_axes["context"] = self._context_axis
        expert_axis_name = "slice" if config.parallel.experts_over == "context" else "expert"
        self._expert_axis, expert_lines = engine_axes.choose_expert_exchange(
            model_axes[expert_axis_name], config, self.dtype, self.device
        )
        model_axes[expert_axis_name] = self._expert_axis
        self.active |= tensor_lines | context_lines | expert_lines
        if self._context_axis.size > 1 and config.train.linear_precision in ("float8", "float8_rowwise_wgrad"):
            self.active["float8 scales"] = (
                "of each context rank's tokens, so losses depend on parallel.context; float8_rowwise excludes that"
            )
        self.active |= engine_axes.describe_overlaps(self.layout, self.device)
        self.world_axis = engine_axes.make_world(self.runtime, groups)
        return engine_axes.make_axes(self.runtime, groups, self.layout, model_axes)

    def _make_model(self, stage: int, axes: Axes, *, draws_weights: bool) -> None:
        """Make this stage's chunks of the model in their flat buffers, with initial values if `draws_weights`."""
        stage_model = StageModel(
            self.layout,
            stage,
            axes,
            runtime=self.runtime,
            dtype=self.dtype,
            device=self.device,
            draws_weights=draws_weights,
        )
        self.chunks = stage_model.chunks
        self.buffers = stage_model.buffers
        self.active |= stage_model.lines

    def _make_data_parallel(self, axes: Axes, stage: int, gathers_in_float8: bool) -> DataParallel:
        """Return what gathers parameters and reduces gradients. Set the engine's exchanges and `mapped_bytes`."""
        config = self.config
        chunk_slots = self.layout.chunk_slots(stage)
        gathers = engine_axes.choose_gathers(
            axes.data,
            self.layout,
            self.buffers,
            gathers_in_float8=gathers_in_float8,
            device=self.device,
            chunk_slots=chunk_slots,
        )
        self.gather_exchange = gathers.exchange
        self.mapped_bytes = 0 if gathers.mapped is None else gathers.mapped.nbytes
        reduce_dtype = REDUCE_DTYPES.get(config.parallel.reduce_dtype)
        reduction = engine_axes.choose_reductions(
            axes.reduce, self.layout, self.buffers, device=self.device, reduce_dtype=reduce_dtype
        )
        self.reduction_exchange = reduction.exchange
        self.active |= gathers.lines | reduction.lines
        return DataParallel(
            self.buffers,
            config.overlap.data,
            reduce_dtype=reduce_dtype,
            float8=gathers_in_float8,
            microbatches=self.layout.microbatches,
            chunk_slots=chunk_slots,
            gather_exchange=self.gather_exchange,
            copy_reduction=reduction.copy_reduction,
            persistent_blocks=config.parallel.zero3_keep_layers,
            mapped_slots=gathers.mapped,
        )

    def list_base_pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield the pieces of the parameters that are not trained, each with its view. Without adapters yield none."""
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                if not parameter.requires_grad:
                    yield from list_piece_views(get_spec(parameter), parameter.data)

    def _make_optimizer(self, axes: Axes, coordinate: Coordinate) -> ShardedOptimizer:
        """Return the optimizer of this rank's shards."""
        grid = self.layout.grid
        if self.config.optimizer.offload:
            self.active["optimizer state"] = "in page-locked host memory, moved through the device in each update"
        # The first stage adds a tied embedding to the gradient norm, so another stage must not add its copy.
        has_second_copy = self.chunks[-1].is_last and not self.chunks[0].is_first
        return ShardedOptimizer(
            self.config.optimizer,
            self.buffers,
            position=coordinate,
            # Without ZeRO the data-parallel ranks hold the same gradients, which count once.
            norm=self.world_axis,
            norm_weight=1.0 if self.config.parallel.zero else 1.0 / grid.shards,
            stage=axes.stage,
            duplicates=frozenset({TIED}) if has_second_copy else frozenset(),  # logical names that the norm leaves out
        )

    def _make_pipeline(self, groups: Groups | None, stage: int) -> PipelineExecutor:
        return PipelineExecutor(
            self.layout.schedule(),
            stage,
            streams=engine_axes.make_p2p_streams(groups),
            shape=self.layout.activation_shape,
            dtype=self.dtype,
            device=self.device,
            runtime=self.runtime,
        )

    def _make_loss_weights(self, groups: Groups | None, rank: int) -> LossWeights | None:
        """Return the normalisation of loss weights; None without weights, and on stages without a loss."""
        if not self.fields.loss_weights or not self.chunks[-1].is_last:
            return None
        axes_of_equal_samples = [name for name in AXES.stage if AXES[name].cuts_batch != "samples"]
        counts_samples = self.layout.grid.is_first(axes_of_equal_samples, rank)  # the weights of a sample count once
        stage = engine_axes.make_axis(self.runtime, groups, "stage")
        return LossWeights(stage, counts_samples, choose_loss_dtype(self.dtype), self.device)

    def _make_chunk_forward(self) -> ChunkForward:
        """Return what runs the chunks for the micro-batches of a step."""
        has_early_gradients = self._has_early_gradients()
        token_gradient = None
        if has_early_gradients and self._loss_weights is None:
            token_gradient = torch.full(
                (), 1 / self.tokens_per_step, dtype=choose_loss_dtype(self.dtype), device=self.device
            )
        return ChunkForward(
            self.layout,
            self.chunks,
            self.fields,
            first_sample=self.layout.shares.first(self.data_rank) * self.config.train.micro_batch,
            dtype=self.dtype,
            device=self.device,
            context_axis=self._context_axis,
            blank_batches=self._blank_batches,
            loss_weights=self._loss_weights,
            experts=self.experts,
            token_gradient=token_gradient,
            weighs_in_forward=has_early_gradients and self._loss_weights is not None,
        )

    def _has_early_gradients(self) -> bool:
        """Return whether the loss on this stage computes its gradients in forward, while the logits exist.

        The gradient of the output matrix then needs memory in forward. A gradient in a slot has memory in forward only
        if the chunk's backward follows at once.
        """
        if not self.chunks[-1].is_last:
            return False
        if not isinstance(get_sink(self.chunks[-1].output_weight), SlotSink):
            return True
        if not self.layout.schedule().runs_backward_at_once(self.pipeline.stage, len(self.chunks) - 1):
            return False
        return self.data_parallel.allow_early_gradients(self.chunks[-1].output_weight)

    def _make_graphs(self, launch_clock: LaunchClock | None) -> ChunkGraphs | None:
        """Return the CUDA graphs of the chunks, None if they are off or unavailable. Set `graph_choice`.

        On a CPU, kernels.graphs=on runs the same code without capturing, for tests, and so does auto with a
        `launch_clock`. Raises ConfigError if kernels.graphs=on and graphs are unavailable.
        """
        is_cuda, requested = self.device.type == "cuda", self.config.kernels.graphs
        if requested == "auto" and launch_clock is None:
            return None
        conditions = GraphConditions(
            self.layout,
            self.pipeline.stage,
            device=self.device,
            tensor_axis=self.tensor_axis,
            context_axis=self._context_axis,
            overlaps=self.active,
        )
        obstacle = conditions.find_obstacle()
        if obstacle and requested == "on":
            raise ConfigError(f"kernels.graphs=on is unavailable: {obstacle}; set --kernels.graphs=auto or off")
        # Each rank of the job takes part in the agreement, also if its own stage cannot be captured.
        shared_obstacle = conditions.find_shared_obstacle(self._find_row_exchange_obstacle)
        measures = requested == "auto" and not shared_obstacle
        graphs = None
        if not obstacle and not shared_obstacle:
            graphs = self._make_chunk_graphs()
        if measures:
            assert launch_clock is not None
            capture_axis = self.tensor_axis  # as in ChunkGraphs
            if self.buffers[0].zero >= 2:
                capture_axis = self.buffers[0].axes.stage
            self.graph_choice = GraphChoice(
                launch_clock,
                is_typical=self._can_measure if graphs is None else graphs.is_typical,
                world_axis=self.world_axis,
                device=self.device,
                kernels=self.runtime.kernels,
                find_missing_gib=conditions.find_missing_gib,
                capture_axis=capture_axis,
                obstacle=obstacle,
            )
        elif is_cuda and graphs is None:
            self.active[CHOICE_NAME] = f"off ({shared_obstacle or obstacle})"
        elif is_cuda:
            self.active[CHOICE_NAME] = "forward and backward of each chunk, from the third step on"
        return graphs

    def _can_measure(self, chunk: int, i: int) -> bool:
        """Return whether micro-batch `i` of the chunk is typical of a rank that has no graphs."""
        return reads_complete_state(find_boundaries(self.pipeline.actions)[chunk], i)

    def exclude_graphs(self, reason: str) -> None:
        """Launch each operator in all steps, also of later attempts. Call it before the first step, on all ranks."""
        self.graph_exclusion = reason
        self.graphs = None
        self.graph_choice = None
        self.runtime.kernels.record_choice(CHOICE_NAME, f"off ({reason})")

    def _make_chunk_graphs(self) -> ChunkGraphs:
        pipeline = self.pipeline
        return ChunkGraphs(
            self.buffers,
            pipeline.actions,
            compute=self.chunk_forward.run_captured,
            runtime=self.runtime,
            shape=pipeline.shape,
            device=self.device,
            data_parallel=self.data_parallel,
            make_inputs=self.chunk_forward.make_blank_graph_inputs,
        )

    def _find_row_exchange_obstacle(self) -> str:
        """Return why the embedding's gradient cannot be reduced by rows, "" if it can.

        Call it after `_make_graphs`, or before to leave graphs out.
        """
        return find_row_exchange_obstacle(
            self.layout,
            self.buffers[0],
            itemsize=self.dtype.itemsize,
            has_graphs=self.graphs is not None,
            is_deterministic=self.runtime.kernels.deterministic,
        )

    @property
    def _has_row_limit(self) -> bool:
        """True if captured micro-batches of any rank limit the rows for experts, so that a step may be repeated.

        All ranks return the same, also those whose own stage cannot be captured: they take part in the agreement.
        """
        may_capture = self.graphs is not None or self.graph_choice is not None
        has_graphs = may_capture and not self._has_declined_graphs
        return self.experts is not None and has_graphs and self.tensor_axis.size > 1

    @property
    def _has_declined_graphs(self) -> bool:
        """True if the ranks have decided to launch each operator."""
        choice = self.graph_choice
        return choice is not None and choice.decision is not None and not choice.decision.uses_graphs

    # settings that may change between steps ---------------------------------------------------------------------

    def use_graphs(self, on: bool) -> None:
        """Let the next steps replay CUDA graphs of the chunks if `on`, else launch each operator."""
        if self.graphs is not None:
            self.graphs.set_enabled(on)

    def run_gemms_on_side_stream(self, on: bool) -> None:
        """Let the next steps run independent GEMMs on two streams if `on`, else one after another."""
        if self.graphs is not None:
            self.graphs.clear()
        self.runtime.use_side_stream(on, self.device)
        if self.tensor_axis.exchange is not None:
            self.tensor_axis.exchange.on_side_stream = on

    def set_recompute(self, mode: str) -> None:
        """Let backward of the next steps recompute the activations that parallel.recompute=`mode` names."""
        if self.graphs is not None:
            self.graphs.clear()
        for chunk in self.chunks:
            chunk.recompute = mode
            for block in chunk.blocks:
                block.recompute = mode  # type: ignore[assignment]

    @with_engine_kernels
    def load_kernels(self) -> None:
        """Run every chunk once, forward and backward, without communication, and discard the results.

        All kernels are thus loaded before the first transfer, which avoids a deadlock: CUDA loads a kernel when it is
        first used, and loading waits for all work on the device. That work may include a receive whose sender is
        loading a kernel too and waits for a transfer of its own.
        """
        self.runtime.calls.set_action(b"kernels")
        batch = self.chunk_forward.make_blank_batch()
        assert batch.tokens is not None
        tokens = batch.tokens
        for chunk_index, chunk in enumerate(self.chunks):
            x = tokens
            if not chunk.is_first:
                x = self.chunk_forward.make_blank_activation().requires_grad_()
            y = self.chunk_forward.run_blank(chunk_index, x, batch)
            self.data_parallel.begin_backward(chunk_index)
            torch.autograd.backward(y, None if chunk.is_last else torch.zeros_like(y))
            self.data_parallel.end_backward(chunk_index)
        self.data_parallel.finish_reductions()
        self.data_parallel.finish_tied()
