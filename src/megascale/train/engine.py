"""The training engine of one rank: model chunks in flat buffers, the pipeline, the optimizer and the training step.

An exchange (parallel/exchange.py) copies data between the GPUs of one host, in place of NCCL's collectives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch.distributed import ReduceOp

from megascale.config.axes import AXES
from megascale.config.parts import LINEAR_PRECISIONS, OPTIMIZERS
from megascale.core.adapters import AdapterSpec, list_adapters, name_within_layer
from megascale.core.batch import NO_FIELDS, Batch, SampleFields, check_fields
from megascale.core.calls import NullCallLog
from megascale.core.capture_plan import find_boundaries, reads_complete_state
from megascale.core.expert_ranks import gathers_expert_tokens
from megascale.core.grid import Coordinate
from megascale.core.group_names import remove_attempt
from megascale.core.inventory import resolve_layers
from megascale.core.layer_spec import ExpertsSpec
from megascale.core.layers import ChunkLayers
from megascale.core.layout import Layout
from megascale.core.memory import gathers_float8
from megascale.core.spans import Recorder, SpanKind
from megascale.core.stopwatch import Stopwatch
from megascale.core.tensors import Piece
from megascale.errors import ConfigError
from megascale.model.context import EVALUATION
from megascale.model.transformer import Chunk
from megascale.ops import launch
from megascale.ops.amax import AmaxPool
from megascale.ops.dispatch import Kernels, hide_workspace_setting, prepare_determinism
from megascale.ops.gradient_sink import get_sink
from megascale.optim.optimizer import ShardedOptimizer
from megascale.optim.update_hold import UpdateHold
from megascale.parallel import rejoin
from megascale.parallel.buffers import TIED, Axes, FlatShard, ParamAndGradBuffer
from megascale.parallel.chunk_graphs import ChunkGraphs
from megascale.parallel.collectives import all_reduce
from megascale.parallel.context import slice_batch
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.embedding_rows import fits_row_exchange
from megascale.parallel.exchange import Exchange
from megascale.parallel.launch_times import CHOICE_NAME, CudaLaunchClock, GraphChoice, LaunchClock, MeasuredRunner
from megascale.parallel.offload import InputCopies
from megascale.parallel.parameters import get_spec, initialise, initialise_parameter, list_piece_views, materialise
from megascale.parallel.pipeline import EagerRunner, PipelineExecutor
from megascale.parallel.runtime import Runtime
from megascale.parallel.slot_sink import SlotSink
from megascale.rendezvous.groups import Groups
from megascale.train import engine_axes
from megascale.train.attention_choice import Choices, agree_on_kernels
from megascale.train.blank_batches import BlankBatches, ReadBatch, make_blank_batch
from megascale.train.chunk_forward import ChunkForward
from megascale.train.determinism_choice import Determinism, decide_determinism
from megascale.train.expert_balance import ExpertBalance
from megascale.train.graph_conditions import GraphConditions
from megascale.train.loss_weights import LossWeights
from megascale.train.module_checks import check_tensors
from megascale.train.step_result import HOLD_INDEX, StepResult, StepScalars

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
REDUCE_DTYPES = {"bfloat16": torch.bfloat16}  # other settings reduce gradients in the type of their buffers

P = ParamSpec("P")
R = TypeVar("R")


def choose_loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of losses for activations of `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def with_engine_kernels(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """Wrap a method of the engine so that operators take their kernels from `engine.runtime` while the method runs."""

    @wraps(method)
    def run(engine: Engine, *args: P.args, **kwargs: P.kwargs) -> R:
        with engine.runtime.kernels.as_current():
            return method(engine, *args, **kwargs)

    return run


class StepCheck(Protocol):
    """Interface of a check of some steps' results (train/replay_check.py)."""

    def begin_step(self, step: int) -> None:
        """Prepare for a step, before its first micro-batch."""

    def watch(self, runner: EagerRunner) -> EagerRunner:
        """Return a runner that observes the step's micro-batches, or `runner` itself."""

    def needs_eager_step(self) -> bool:
        """Return whether the present step must run without CUDA graphs, which would hide its results."""

    def end_step(self, step: int) -> None:
        """Compare the results when gradients are complete, before the update."""

    def restart(self) -> None:
        """Forget the results of earlier steps, and restore what the check has replaced in the engine."""


class Engine:
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
        attention_choices: attention kernels by kind of device and shape, to be saved with the run.
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
        stopwatch = Stopwatch()
        self.build_seconds = stopwatch.timings
        check_fields(fields, config.model, "data.train", config.data.train)
        rank = groups.rank if groups is not None else 0
        coordinate = grid.coordinate(rank)
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
        self._blank_batches = self._make_blank_batches(fields, grid.replica(rank))
        if self._blank_batches is not None:
            fields = replace(fields, loss_weights=True)
        self.fields = fields
        self.begun_update = self.ended_update = 0

        self.adapters = AdapterSpec.from_config(config.train)
        self.runtime = runtime or Runtime()
        self._choose_kernels(groups, earlier_choices)
        stopwatch.end_phase("kernels")
        axes = self._make_axes(groups)
        stopwatch.end_phase("axes")
        gathers_in_float8 = self._choose_float8_gathers()
        self.chunks: list[Chunk] = []
        self.buffers: list[ParamAndGradBuffer] = []
        self._make_chunks(coordinate.pipeline, axes, draws_weights=draws_weights)
        stopwatch.end_phase("model")
        self.data_parallel = self._make_data_parallel(axes, coordinate.pipeline, gathers_in_float8)
        if draws_weights:
            self.data_parallel.initialise_slots(partial(initialise_parameter, seed=config.train.seed))
        stopwatch.end_phase("data parallelism")
        self.optimizer = self._make_optimizer(axes, coordinate)
        stopwatch.end_phase("optimizer")
        self.experts = self._make_expert_balance(rank)
        self.pipeline = self._make_pipeline(groups, coordinate.pipeline)
        self._loss_weights = self._make_loss_weights(groups, rank)
        self.chunk_forward = self._make_chunk_forward()
        if launch_clock is None and device.type == "cuda":
            launch_clock = CudaLaunchClock()
        self.graph_choice: GraphChoice | None = None
        self.graph_exclusion = ""
        self.graphs: ChunkGraphs | None = None
        self.graphs = self._make_graphs(launch_clock)
        self._choose_embedding_reduction()
        if self._has_row_limit:
            self.chunk_forward.keeps_batches = True  # a step may be repeated
        if grid.pipeline > 1 and device.type == "cuda":
            self.load_kernels()
        stopwatch.end_phase("pipeline")

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

    def _make_data_parallel(self, axes: Axes, stage: int, gathers_in_float8: bool) -> DataParallel:
        """Return what gathers parameters and reduces gradients. Set `gather_exchange` and `reduction_exchange`."""
        config = self.config
        self.gather_exchange, gather_line = engine_axes.choose_gathers(
            axes.data, self.layout, self.buffers, gathers_in_float8=gathers_in_float8, device=self.device
        )
        reduce_dtype = REDUCE_DTYPES.get(config.parallel.reduce_dtype)
        reduction = engine_axes.choose_reductions(
            axes.reduce, self.layout, self.buffers, device=self.device, reduce_dtype=reduce_dtype
        )
        self.reduction_exchange = reduction.exchange
        self.active |= gather_line | reduction.lines
        return DataParallel(
            self.buffers,
            config.overlap.data,
            reduce_dtype=reduce_dtype,
            float8=gathers_in_float8,
            microbatches=self.layout.microbatches,
            chunk_slots=self.layout.chunk_slots(stage),
            gather_exchange=self.gather_exchange,
            copy_reduction=reduction.copy_reduction,
            persistent_blocks=config.parallel.zero3_keep_layers,
        )

    def _make_blank_batches(self, fields: SampleFields, replica: int) -> BlankBatches | None:
        """Return the blank micro-batches that complete this replica's steps.

        Return None if all replicas read equally many micro-batches.
        """
        layout = self.layout
        if layout.shares.is_even:
            return None
        # A blank micro-batch is as long as those that the feed returns, before the engine cuts it for context ranks.
        sequence_length = self.config.model.sequence_length
        blank = make_blank_batch(
            replace(fields, loss_weights=True),
            length=sequence_length,
            width=self.config.train.micro_batch,
            sequence_length=sequence_length,
            device=self.device,
        )
        counts = ", ".join(str(layout.shares.count(index)) for index in range(layout.grid.replicas))
        self.active["micro-batches"] = f"{counts} on the replicas, filled up to {layout.microbatches} with blank ones"
        return BlankBatches(layout.shares.count(replica), has_weights=fields.loss_weights, blank=blank)

    def _choose_kernels(self, groups: Groups | None, earlier_choices: Choices | None) -> None:
        """Set the runtime's kernels, streams and, if ranks have to agree, attention kernels; record the choices."""
        config, runtime = self.config, self.runtime
        runtime.attention.backend = config.kernels.attention
        runtime.kernels = Kernels(
            config.kernels.mode,
            deterministic=config.requested_determinism is True,
            reads_expert_blocks=config.kernels.expert_rows_gemm == "auto",
        )
        gemm_streams_text = runtime.use_side_stream(config.gemms_on_side_stream, self.device)
        determinism = self._decide_determinism(earlier_choices)
        self.attention_choices = determinism.choices
        if groups is not None or earlier_choices is not None or determinism.measured:
            descriptions = self._agree_on_kernels(determinism)
            self.active |= descriptions
        if self.device.type == "cuda" or config.overlap.gemms == "on":
            if config.overlap.gemms == "auto":
                source = " (overlap.gemms=auto)"
            else:
                source = ""
            self.active["independent GEMMs"] = gemm_streams_text + source
        if self.device.type == "cuda":
            self.active["kernel launches"] = launch.describe()
        if determinism.description:
            self.active["deterministic"] = determinism.description
        workspace = hide_workspace_setting(self.device)
        if workspace:
            self.active["cuBLAS workspace"] = workspace

    def _decide_determinism(self, earlier_choices: Choices | None) -> Determinism:
        """Decide whether steps must repeat bit for bit, and set it in the runtime's kernels."""
        runtime, grid = self.runtime, self.layout.grid
        with runtime.kernels.as_current():
            determinism = decide_determinism(
                self.config,
                tensor=grid.tensor,
                dtype=self.dtype,
                device=self.device,
                earlier_choices=earlier_choices,
                chooser=runtime.attention,
                documents=self.fields.max_documents,
                context=grid.context,
            )
        if determinism.is_on:
            prepare_determinism()  # a decision that is kept with the run was not prepared when it was read
        runtime.kernels.deterministic = determinism.is_on
        return determinism

    def _agree_on_kernels(self, determinism: Determinism) -> dict[str, str]:
        """Set the attention kernels on which all ranks agree, and return lines about other kinds of devices."""
        runtime, grid = self.runtime, self.layout.grid
        with runtime.kernels.as_current():
            self.attention_choices, descriptions = agree_on_kernels(
                self.config,
                grid.tensor,
                self.dtype,
                self.device,
                determinism.choices,
                runtime.attention,
                self.fields.max_documents,
                grid.context,
                known=determinism.measured,
            )
        return descriptions

    def _choose_float8_gathers(self) -> bool:
        """Return whether data-parallel ranks gather the matrices of linear layers as float8; record the choice."""
        config, data_size = self.config, self.layout.grid.shards
        if self.adapters is not None:
            return False  # the matrices are not trained, and so never gathered
        gathers_in_float8 = gathers_float8(config.model, config.parallel, config.train.linear_precision, data_size)
        can_gather_float8 = LINEAR_PRECISIONS[config.train.linear_precision].gathered_weight_bytes is not None
        if not can_gather_float8:
            return gathers_in_float8  # without a choice there is nothing to record
        requested, precision = config.parallel.gather_precision, config.train.precision
        if gathers_in_float8:
            self.active["parameters gathered in"] = (
                f"float8: matrices of linear layers; {precision}: all other parameters"
            )
        elif data_size > 1 and config.parallel.zero:
            self.active["parameters gathered in"] = f"{precision} (parallel.gather_precision={requested})"
        elif requested == "float8":
            self.active["parameters gathered in"] = "nothing is gathered: there is one data-parallel rank"
        return gathers_in_float8

    def _make_chunks(self, stage: int, axes: Axes, *, draws_weights: bool) -> None:
        """Make this stage's chunks of the model in their flat buffers, with initial values if `draws_weights`."""
        config, grid = self.config, self.layout.grid
        # A precision that can gather float8 gives matrices buckets of their own even if it does not gather float8. The
        # shards, and therefore the bits of sums over shards, do not depend on that choice.
        can_gather_float8 = LINEAR_PRECISIONS[config.train.linear_precision].gathered_weight_bytes is not None
        for chunk_index, layers in enumerate(self.layout.stage_layers(stage)):
            chunk = self._make_chunk(stage, chunk_index, layers, axes)
            check_tensors(chunk, layers, config.model, trains_all=self.adapters is None)
            if self.adapters is not None:
                self._allocate_frozen(chunk)
            buffer = ParamAndGradBuffer(
                chunk,
                self.device,
                axes=axes,
                zero=config.parallel.zero,
                bucket_elements=self.layout.bucket_elements,
                float8_gather=can_gather_float8 and grid.shards > 1,
                table_part=self.layout.find_table_part(stage),
            )
            self.chunks.append(chunk)
            self.buffers.append(buffer)
            if draws_weights and buffer.zero < 3:
                initialise(chunk, config.train.seed)
            elif draws_weights:
                buffer.initialise_resident(config.train.seed)
        if config.parallel.offload_activations:
            input_copies = InputCopies(self.device)
            for chunk in self.chunks:
                chunk.input_copies = input_copies
            self.active["offload"] = (
                "layer inputs are in host memory; on the device are the last one of each chunk and two being copied"
            )
        if self.adapters is not None:
            targets = ", ".join(sorted(self.adapters.targets)) or "all matrices of the layers"
            self.active["adapters"] = f"rank {self.adapters.rank} on {targets}; the model itself is not trained"
        token_count = config.model.sequence_length // grid.context * config.train.micro_batch
        for chunk in self.chunks:
            with self.runtime.kernels.as_current():
                chunk.linears.check(chunk.collect_linear_weights(), token_count, self.device)
                chunk.linears.check_experts(chunk.collect_expert_stacks(), self.device)
        if any(chunk.linears.collects_amax for chunk in self.chunks):
            self.runtime.kernels.amaxes = AmaxPool()

    def _make_chunk(self, stage: int, chunk_index: int, layers: ChunkLayers, axes: Axes) -> Chunk:
        """Return the chunk with index `chunk_index` of this stage, on the meta device."""
        config, schedule = self.config, self.layout.schedule()
        global_chunk = schedule.global_chunk(stage, chunk_index)
        is_last = global_chunk == schedule.chunks - 1
        # If one stage has both ends of the model, the first chunk's buffers hold the embedding and its gradient.
        has_both_ends = is_last and chunk_index > 0 and schedule.chunk_map.first_stage == stage
        embedding = None
        if config.model.tied_embeddings and has_both_ends:
            embedding = self.chunks[0].token_embedding
        with self.runtime.kernels.as_current():
            return Chunk(
                config.model,
                layers,
                is_first=global_chunk == 0,
                is_last=is_last,
                axis=self.tensor_axis,
                axes=axes.model,
                dtype=self.dtype,
                recompute=config.parallel.recompute,
                linear_precision=config.train.linear_precision,
                embedding=embedding,
                adapters=self.adapters,
            )

    def _allocate_frozen(self, chunk: Chunk) -> None:
        """Allocate the parameters that are not trained: weights only, complete on every data-parallel rank.

        Raises ConfigError if the module of an adapted matrix has made no adapters.
        """
        frozen = [parameter for parameter in chunk.parameters() if not parameter.requires_grad]
        materialise(chunk, {p: torch.zeros(p.shape, dtype=p.dtype, device=self.device) for p in frozen})
        trained_names: set[str] = set()
        frozen_names: set[str] = set()
        for parameter in chunk.parameters():
            names = trained_names if parameter.requires_grad else frozen_names
            names.update(piece.name for piece in get_spec(parameter).pieces)
        assert self.adapters is not None
        for matrix, a, b in list_adapters(self.config.model, self.adapters):
            if matrix.name in frozen_names and not {a.name, b.name} <= trained_names:
                raise ConfigError(
                    f"train.lora.targets includes {name_within_layer(matrix)}, whose module has no adapters; leave it "
                    "out of train.lora.targets"
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

    def _make_expert_balance(self, rank: int) -> ExpertBalance | None:
        """Return the balance of experts, None for a model without experts."""
        grid, model = self.layout.grid, self.config.model
        if not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in resolve_layers(model)):
            return None
        axes_of_equal_tokens = [name for name in AXES.stage if AXES[name].cuts_batch == "nothing"]
        balance = ExpertBalance(
            model,
            self.chunks,
            tokens_per_step=self.tokens_per_step,
            device=self.device,
            counts_tokens=grid.is_first(axes_of_equal_tokens, rank),
            ranks=grid.tensor * grid.expert,
        )
        self._describe_experts()
        return balance

    def _describe_experts(self) -> None:
        """Record in `active` which ranks divide the experts, and what experts change in other parts."""
        grid, model = self.layout.grid, self.config.model
        ranks = f"{grid.tensor} tensor-parallel ranks"
        if grid.expert > 1:
            communication = "an all-to-all"
            if gathers_expert_tokens(model.expert_settings, grid.tensor, grid.expert, self.config.overlap.expert):
                communication = "gathers"
            if grid.size("slice") > 1:
                tokens, key = "slices of each sample", "parallel.context"
            else:
                tokens, key = "samples", "parallel.expert"
            ranks += f" x {grid.expert} ranks with different {tokens}, whose tokens come by {communication}"
            if self.config.parallel.zero >= 2:
                self.active["sharding of other matrices"] = (
                    f"optimizer state only, over {grid.shards} ranks: their gradients are summed over the ranks of "
                    f"{key} at the end of a step"
                )
        self.active["experts"] = f"{model.expert_settings.number} on {ranks}, dropless"
        if self.config.parallel.recompute in ("norms", "selective"):
            self.active["recomputed norms"] = "not those before experts, which keep their input"
        settings = model.expert_settings
        if settings.top_k == 1 and settings.number > 1 and settings.normalize == "selected":
            # A model may be imported like this, so it is no error.
            self.active["router"] = (
                "gets no gradient of the loss: with model.experts.top_k=1 and normalize=selected all weights are 1; "
                "normalize=none keeps the scores"
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
                can_replay=self._can_measure if graphs is None else graphs.can_replay,
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
            make_inputs=self._make_blank_graph_inputs,
        )

    def _choose_embedding_reduction(self) -> None:
        """Reduce the token embedding's gradient by rows where overlap.embedding asks for it and nothing prevents it.

        Raises ConfigError if overlap.embedding=rows is unavailable.
        """
        requested = self.config.overlap.embedding
        if requested == "dense":
            return
        # Ranks of all stages look for obstacles, so that all end with the same error.
        obstacle = self._find_row_exchange_obstacle()
        has_embedding = self.chunks[0].is_first
        if not obstacle and has_embedding and not self.data_parallel.reduce_embedding_by_rows():
            obstacle = "its rows have no bucket of their own, or the data-parallel ranks do not divide them"
        if not obstacle and has_embedding:
            self.active["embedding gradient"] = "reduced by the rows that a step uses"
        elif obstacle and requested == "rows":
            raise ConfigError(f"overlap.embedding=rows is unavailable: {obstacle}; set --overlap.embedding=auto")

    def _find_row_exchange_obstacle(self) -> str:
        """Return why the embedding's gradient cannot be reduced by rows, "" if it can.

        Call it after `_make_graphs`, or before to leave graphs out.
        """
        config, buffer = self.config, self.buffers[0]
        ranks = buffer.axes.reduce.size
        if buffer.zero != 1 or ranks == 1:
            return "it needs parallel.zero=1 and several data-parallel ranks"
        if self.tensor_axis.size > 1 or config.model.tied_embeddings:
            return "tensor parallelism divides the embedding, or the output matrix is tied to it"
        if self.graphs is not None:
            return "CUDA graphs write the dense gradient"
        if self.runtime.kernels.deterministic and config.resilience.replay_interval != 0:
            return "replays (resilience.replay_interval) compare the dense gradient"
        if not self.layout.shares.is_even:
            return "replicas read different numbers of micro-batches"
        if config.overlap.embedding == "auto":
            microbatch_tokens = config.train.micro_batch * config.model.sequence_length // self._context_axis.size
            if not fits_row_exchange(
                tokens=self.layout.microbatches * microbatch_tokens * ranks,
                hidden=config.model.hidden,
                vocabulary=config.model.vocab,
                itemsize=self.dtype.itemsize,
                grad_itemsize=buffer.grad_dtype.itemsize,
            ):
                return "a step's rows have more than half of the dense gradient's bytes"
        return ""

    def _make_blank_graph_inputs(self, chunk_index: int) -> tuple[torch.Tensor, ...]:
        """Return tensors that a captured chunk can read, of a micro-batch that belongs to no step."""
        batch = self._make_blank_batch()
        if self.chunks[chunk_index].is_first:
            assert batch.tokens is not None
            x = batch.tokens
        else:
            x = self._make_blank_activation()
        return self.chunk_forward.list_graph_inputs(chunk_index, x, batch)

    def _make_blank_batch(self) -> Batch[torch.Tensor]:
        """Return a micro-batch of zeros as this rank reads it."""
        sequence_length = self.config.model.sequence_length
        return make_blank_batch(
            self.fields,
            length=sequence_length // self._context_axis.size,
            width=self.config.train.micro_batch,
            sequence_length=sequence_length,
            device=self.device,
        )

    def _make_blank_activation(self) -> torch.Tensor:
        """Return an input of zeros for a chunk that is not the model's first one."""
        return torch.zeros(self.pipeline.shape, dtype=self.dtype, device=self.device)

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
        batch = self._make_blank_batch()
        assert batch.tokens is not None
        tokens = batch.tokens
        for chunk_index, chunk in enumerate(self.chunks):
            x = tokens
            if not chunk.is_first:
                x = self._make_blank_activation().requires_grad_()
            y = self.chunk_forward.run_blank(chunk_index, x, batch)
            self.data_parallel.begin_backward(chunk_index)
            torch.autograd.backward(y, None if chunk.is_last else torch.zeros_like(y))
            self.data_parallel.end_backward(chunk_index)
        self.data_parallel.finish_reductions()
        self.data_parallel.finish_tied()

    # a training step --------------------------------------------------------------------------------------------

    @with_engine_kernels
    def start_gather(self) -> None:
        """Begin the schedule's first gather. Call it before the batch is read, so that both overlap."""
        recorder, chunk = self.runtime.recorder, self.pipeline.first_gather
        recorder.begin_action(SpanKind.GATHER_PARAMS, chunk)
        self.data_parallel.start_gather(chunk)
        recorder.end_action()

    @with_engine_kernels
    def step(
        self,
        read_batch: ReadBatch,
        step: int,
        learning_rate: float,
        stop_request: float = 0.0,
        before_update: Callable[[], None] = lambda: None,
        has_next_step: bool = False,
        count_casts: bool = False,
        take_read_checksum: Callable[[], Sequence[float]] = tuple,
        sum_weights: Callable[[], float] | None = None,
    ) -> StepResult:
        """Run forward and backward over all micro-batches, then the update.

        Args:
            read_batch: returns one of this rank's micro-batches; called only where its fields are needed.
            step: number of this optimizer step, from 1; dropout masks depend on it.
            stop_request: above 0 if this rank wants to stop; summed over all ranks.
            before_update: called once gradients exist and the state is about to change.
            has_next_step: begin the next step's first gather during the update. If no step follows after all, call
                `synchronize`.
            count_casts: count the values that casts to float8 clip and flush.
            take_read_checksum: returns the numbers of the checksum of the samples that this rank has read in this
                step, equally many on each rank.
            sum_weights: returns the sum of the loss weights of this rank's micro-batches, if they carry weights;
                called on the last stage before the first forward.
        """
        self.chunk_forward.begin_step(read_batch, step, sum_weights)
        if self.replay_check is not None:
            self.replay_check.begin_step(step)
        loss = self._run_micro_batches(count_casts)
        if self._must_repeat_micro_batches():
            # The captured micro-batches left tokens out. An eager run overwrites their gradients, after the reductions
            # that have begun.
            self.data_parallel.finish_reductions()
            self.data_parallel.finish_tied()
            loss = self._run_micro_batches(count_casts, eagerly=True)
        self.chunk_forward.end_step()
        self._finish_gradients(step)
        if self.replay_check is not None:
            self.replay_check.end_step(step)
        scalars = self._collect_scalars(loss, stop_request, take_read_checksum())
        recorder = self.runtime.recorder
        recorder.begin_action(SpanKind.CHECKPOINT_STALL)
        before_update()
        recorder.end_action()
        self.begun_update = step
        grad_norm, sums = self._update(learning_rate, step, scalars, has_next_step)
        result = self._make_result(grad_norm, sums)
        for hook in self.after_update_hooks:
            hook(step)
        self.ended_update = step
        return result

    def _make_result(self, grad_norm: torch.Tensor, sums: StepScalars) -> StepResult:
        """Update the experts' biases with the step's counts, and return the step's results."""
        expert_counts = None
        if self.experts is not None:
            is_skipped = ~torch.isfinite(grad_norm)
            if sums.weight_sum is not None:
                is_skipped |= sums.weight_sum == 0
            expert_counts = self.experts.update(sums.expert_counts, is_skipped)
        weight_sum = sums.weight_sum
        if self._blank_batches is not None and not self._blank_batches.has_weights:
            weight_sum = None  # the data has no weights: blank micro-batches needed some
        return StepResult(
            loss=sums.loss,
            grad_norm=grad_norm,
            stop_sum=sums.stop_request,
            hold_sum=sums.hold_request,
            cast_counts=sums.cast_counts,
            read_checksum=sums.read_checksum,
            weight_sum=weight_sum,
            expert_counts=expert_counts,
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

    def _must_repeat_micro_batches(self) -> bool:
        """Return whether a captured micro-batch on any rank had too few rows for its experts' tokens.

        The result is the same on all ranks, and `experts.is_repeated` keeps it. With a row limit the host waits for the
        micro-batches.
        """
        if self.experts is None:
            return False
        self.experts.is_repeated = False
        if self._has_row_limit:
            exceeded = self.experts.has_exceeded_rows.float()
            self.experts.is_repeated = bool(all_reduce(exceeded, self.world_axis, ReduceOp.MAX).wait().item())
        return self.experts.is_repeated

    def _run_micro_batches(self, count_casts: bool, eagerly: bool = False) -> torch.Tensor | None:
        """Run the pipeline's forwards and backwards. Return the sum of the losses on the last stage, else None."""
        self._mark_weights_changed()
        for chunk in self.chunks:
            chunk.linears.count_casts(count_casts)
        self.data_parallel.begin_step()
        if self.experts is not None:
            self.experts.begin_step()
        runner = self._make_runner(eagerly or count_casts)
        if self.replay_check is not None:
            runner = self.replay_check.watch(runner)
        with torch.autograd.set_multithreading_enabled(self.backward_in_own_thread):
            loss = self.pipeline.run(runner, self.data_parallel)
        if self.graphs is not None:
            self.graphs.end_step()
        return loss

    def _make_runner(self, eagerly: bool) -> EagerRunner:
        """Return the runner of the step's micro-batches, which replays graphs unless `eagerly`."""
        run = self.chunk_forward.run
        read_inputs = self.chunk_forward.take_graph_inputs
        weight_gradients = self.runtime.weight_gradients
        choice = self.graph_choice
        if choice is not None:
            choice.begin_step()
            eagerly = eagerly or not choice.uses_graphs
        runner = EagerRunner(run, weight_gradients)
        if self.graphs is not None:
            eagerly = eagerly or self.backward_in_own_thread
            if self.replay_check is not None and self.replay_check.needs_eager_step():
                eagerly = True
            runner = self.graphs.begin_step(run, read_inputs, eagerly=eagerly)
        if choice is not None and choice.is_measuring:
            runner = MeasuredRunner(run, weight_gradients, choice=choice, read_inputs=read_inputs)
        return runner

    @with_engine_kernels
    def run_replay(
        self, batch: Batch[torch.Tensor], first_sample: int, watch: Callable[[EagerRunner], EagerRunner]
    ) -> None:
        """Run forward and backward of another replica's first micro-batch with the step's weights.

        A replay overwrites the step's gradients. Call it before the step or within `keep_results`.

        Args:
            batch: the micro-batch, with the fields that this rank reads.
            first_sample: index of its first sample in the global batch.
            watch: wraps the runner of the micro-batch.
        """
        self._mark_weights_changed()
        self.data_parallel.begin_step()
        if self.experts is not None:
            self.experts.begin_step()
        runner = watch(EagerRunner(self.chunk_forward.run, self.runtime.weight_gradients))
        with (
            self.chunk_forward.replace_micro_batch(batch, first_sample),
            torch.autograd.set_multithreading_enabled(False),
            self.data_parallel.discard_gradients(),
        ):
            self.pipeline.run_microbatch(runner, self.data_parallel)

    @contextmanager
    def keep_results(self) -> Iterator[None]:
        """Enclose replays: copy the step's gradients and expert counts to host memory before, and back after."""
        results = [shard.grads for buffer in self.buffers for shard in buffer.shards]
        if self.experts is not None:
            results += self.experts.list_counts()
        copies = [tensor.to("cpu", copy=True) for tensor in results]
        yield
        for tensor, copy in zip(results, copies, strict=True):
            tensor.copy_(copy)

    def _finish_gradients(self, step: int) -> None:
        """Wait for the reductions of gradients, then call the hooks that look at them."""
        recorder, calls = self.runtime.recorder, self.runtime.calls
        calls.set_action(b"reduce")
        recorder.begin_action(SpanKind.FINISH_REDUCTIONS)
        self.data_parallel.finish_reductions()
        recorder.end_action()
        calls.set_action(b"optimizer")
        if self.before_update_hooks:
            self.data_parallel.finish_tied()
        for hook in tuple(self.before_update_hooks):
            hook(step)

    def _collect_scalars(
        self, loss: torch.Tensor | None, stop_request: float, read_checksum: Sequence[float]
    ) -> StepScalars:
        """Return this rank's addends to the scalars of the step.

        `fill_` writes values of the host: a copy from the host's memory would wait for the whole step before the
        optimizer is launched.
        """
        scalars = StepScalars.make_zeros(
            len(read_checksum),
            expert_length=self.experts.size if self.experts is not None else 0,
            has_weight_sum=self.fields.loss_weights,
            device=self.device,
        )
        scalars.stop_request.fill_(stop_request)
        if self.optimizer.update_hold is not None:
            self.optimizer.update_hold.write_request(scalars.hold_request)
        if loss is not None and self.counts_loss:
            scalars.loss.add_(loss)
        if self._loss_weights is not None:
            assert scalars.weight_sum is not None
            scalars.weight_sum.fill_(self._loss_weights.counted_sum)
        for chunk in self.chunks:
            counts = chunk.linears.get_cast_counts()
            if counts is not None:
                scalars.cast_counts.add_(counts)
        for index, value in enumerate(read_checksum):
            if value:  # ranks between the first and the last stage have read nothing
                scalars.read_checksum[index].fill_(value)
        if self.experts is not None:
            self.experts.add_counts(scalars.expert_counts)
        return scalars

    def _update(
        self, learning_rate: float, step: int, scalars: StepScalars, has_next_step: bool
    ) -> tuple[torch.Tensor, StepScalars]:
        """Update the weights. Return the gradient norm and `scalars` summed over all ranks."""
        self._mark_weights_changed()  # frees float8 copies of the weights before the update needs memory
        self.data_parallel.invalidate_gathered()
        on_updated: Callable[[FlatShard], None] = lambda shard: None
        if has_next_step:
            # The next step's schedule begins with a gather. Each of its buckets is sent as soon as it is updated.
            on_updated = self.data_parallel.gather_under_update(self.pipeline.first_gather)
        recorder = self.runtime.recorder
        recorder.begin_action(SpanKind.OPTIMIZER)
        grad_norm, summed_vector = self.optimizer.step(
            learning_rate,
            step,
            piggybacked_scalars=scalars.vector,
            on_shard_updated=on_updated,
            finish_tied=self.data_parallel.finish_tied,
            skips_if_last_scalar_zero=scalars.has_weight_sum,
            hold_index=HOLD_INDEX,
        )
        self.data_parallel.end_update()
        recorder.end_action()
        assert summed_vector is not None
        return grad_norm, replace(scalars, vector=summed_vector)

    def synchronize(self) -> None:
        """Wait for the gathers that have begun. Call it before the groups are shut down."""
        self.data_parallel.finish_gathers()

    def check_peers(self) -> None:
        """Raise TrainingError if a peer of an exchange has died or hangs: the results of this step are then undefined.

        Call it after the step's results have been read from the device and before they are used.
        """
        for exchange in self._list_exchanges():
            exchange.check()

    def close(self, failed: bool = False) -> None:
        """Stop watching the peers of exchanges. Unless `failed`, the peers regard the end of this rank as planned."""
        for exchange in self._list_exchanges():
            exchange.close(failed)

    def _list_exchanges(self) -> list[Exchange]:
        """Return the exchanges between GPUs that are in use."""
        axes = (self.tensor_axis, self._context_axis, self._expert_axis)
        exchanges = [axis.exchange for axis in axes] + [self.gather_exchange, self.reduction_exchange]
        return [exchange for exchange in exchanges if exchange is not None]

    def count_exchange_bytes(self) -> int:
        """Return the bytes of the exchanges between GPUs, which torch's memory statistics do not count."""
        return sum(exchange.memory_bytes for exchange in self._list_exchanges())

    def find_rejoin_obstacle(self) -> str:
        """Return why this engine cannot continue with new groups (`rejoin`), "" if it can."""
        has_exchange = any(axis.exchange is not None for axis in rejoin.list_axes(self.runtime))
        if has_exchange or self.gather_exchange is not None or self.reduction_exchange is not None:
            return "its peers' memory is mapped for the exchange between GPUs"
        if self.optimizer.rule.has_collective_init:
            return f"optimizer.name={self.config.optimizer.name} exchanges its layout when it is made"
        if self.config.optimizer.offload:
            return "optimizer.offload=true may still copy state of the failed update"
        return self.runtime.state_obstacle or self.runtime.rejoin_obstacle

    def find_state_obstacle(self) -> str:
        """Return why another engine cannot take over the weights and the optimizer state, "" if it can.

        Exchanges hold activations and gradients, which are not part of the state. Only gathers by copies read weights
        where they are, in memory of the exchange that peers have mapped.
        """
        if self.config.optimizer.offload:
            return "optimizer.offload=true may still copy state of the failed update"
        has_copies = any(state.master is not state.shard.params for state in self.optimizer.states)
        if self.gather_exchange is not None and not has_copies:
            return "its weights are in memory that is mapped for the exchange between GPUs"
        return self.runtime.state_obstacle

    def hold_updates(self, hold: UpdateHold) -> None:
        """Let `hold` keep updates from changing the state, also once an exchange has ended waits for a lost peer."""
        self.optimizer.update_hold = hold
        for exchange in self._list_exchanges():
            exchange.call_on_failure(hold.request)

    def leave_groups(self, has_abort: bool = True, end_phase: Callable[[str], None] = lambda phase: None) -> None:
        """Drop the failed step and the groups; weights and optimizer state stay. `rejoin` sets new groups.

        Captured graphs are dropped too, since they hold communicators. Raises RuntimeError if the GPU has failed.

        Args:
            has_abort: whether the communicators are aborted next.
            end_phase: called with the name of each part that has ended.
        """
        self.runtime.weight_gradients.clear()
        self.data_parallel.drop_communication()
        if self.graph_choice is not None:
            self.graph_choice.restart()
        if self.graphs is not None:
            self.graphs.restart()
            end_phase("graphs")
            if has_abort:
                gc.collect()  # NCCL keeps a communicator, and its abort waits, until no graph holds it
                end_phase("garbage")
        self.chunk_forward.end_step()
        self.before_update_hooks.clear()
        self.after_update_hooks.clear()
        if self.replay_check is not None:
            self.replay_check.restart()
            self.replay_check = None
        self.runtime.calls = NullCallLog()
        self.runtime.recorder = Recorder()
        rejoin.drop_groups(self.runtime, self.pipeline.streams)
        end_phase("engine")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            end_phase("device")

    def set_start_step(self, step: int) -> None:
        """Set the step whose state the optimizer has. Call it before the first step of a start."""
        self.begun_update = self.ended_update = step
        if self.optimizer.update_hold is not None:
            self.optimizer.update_hold.set_step(step)

    def find_complete_step(self) -> int:
        """Return the step whose state the optimizer has after its groups were aborted.

        Return -1 if an update ended in the middle, or may have. Call it after `leave_groups`.
        """
        assert self.optimizer.update_hold is not None
        step = self.optimizer.update_hold.read_step()
        # The device counts an update at its beginning, so a counted update need not have ended on the host.
        is_partial = self.begun_update != self.ended_update and step == self.begun_update
        # On a GPU, an optimizer with collectives of its own may have continued with wrong values after the abort.
        is_uncertain = self.device.type == "cuda" and OPTIMIZERS[self.config.optimizer.name].communicates
        return -1 if is_partial or is_uncertain else step

    def rejoin(self, groups: Groups, earlier_choices: Choices) -> None:
        """Continue with the groups of the next attempt. Collective, like the construction of an engine."""
        members = [*groups.by_kind.values(), *(channel.group for channel in groups.p2p.values())]
        groups_by_name: dict[str, Any] = {remove_attempt(group.group_name): group for group in members}
        groups_by_name["world"] = groups.world
        rejoin.adopt_groups(self.runtime, self.pipeline.streams, groups_by_name)
        self._agree_on_kernels(self._decide_determinism(earlier_choices or self.attention_choices))

    # weights and evaluation -------------------------------------------------------------------------------------

    def logical_tensors(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """Yield a checkpoint's tensors: master weights, optimizer state and the biases of routers.

        Yields:
            (name, shape of the logical tensor, offsets of a box of it, view of this box on this rank).
        """
        yield from self.optimizer.logical_tensors()
        if self.experts is not None:
            yield from self.experts.logical_tensors()

    @torch.no_grad()
    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Enclose code that fills the master weights (loading a checkpoint), then copy them to the weights in use.

        All gathers end before the body begins. In float32 and float64, master weights and weights in use share memory,
        and a gather that ended later would let gloo write this rank's old shard again.
        """
        self.data_parallel.invalidate_gathered()
        yield
        self.optimizer.copy_to_params()
        self._mark_weights_changed()

    def _mark_weights_changed(self) -> None:
        """Drop what linear layers have derived from the weights, such as float8 copies."""
        for chunk in self.chunks:
            chunk.linears.invalidate_weights()

    def gather_parameters(self) -> None:
        """Make all parameters complete on this rank. Call it before reading them outside a training step."""
        self.data_parallel.gather_full_parameters()

    @torch.no_grad()
    @with_engine_kernels
    def sum_losses(self, batch: Batch[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all targets' losses over all ranks, float64 [1].

        With loss weights return the weighted sum of losses and the sum of weights, float64 [2]. Collective: every rank
        calls it equally often, with the same shapes and fields.

        Args:
            batch: this data-parallel rank's samples.
        """
        if self._context_axis.size > 1:
            batch = slice_batch(batch, self._context_axis)

        def forward(chunk: int, i: int, x: torch.Tensor | None) -> torch.Tensor:
            x = batch.tokens if x is None else x
            return self.chunks[chunk](x, batch, EVALUATION)

        outputs = self.pipeline.run_forward(1, forward)  # the losses on the last stage, else an empty list
        weights_SB = batch.loss_weights
        totals = torch.zeros(1 if weights_SB is None else 2, dtype=torch.float64, device=self.device)
        if outputs and self.counts_loss:
            losses_SB = outputs[0]
            if weights_SB is None:
                totals[0] += losses_SB.sum(dtype=torch.float64)
            else:
                totals[0] += (losses_SB.double() * weights_SB).sum()
                totals[1] += weights_SB.sum(dtype=torch.float64)
        return all_reduce(totals, self.world_axis).wait()
