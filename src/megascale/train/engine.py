"""The training engine of one rank: model chunks in flat buffers, the pipeline, the optimizer and the training step.

An exchange (parallel/exchange.py) copies data between the GPUs of one host, in place of NCCL's collectives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch.distributed import ReduceOp

from megascale.config.axes import AXES
from megascale.config.parts import LINEAR_PRECISIONS, OPTIMIZERS
from megascale.core.adapters import AdapterSpec, list_adapters, name_within_layer
from megascale.core.batch import NO_FIELDS, Batch, SampleFields, check_fields
from megascale.core.calls import NullCallLog
from megascale.core.expert_ranks import gathers_expert_tokens
from megascale.core.grid import Coordinate
from megascale.core.inventory import resolve_layers
from megascale.core.layer_spec import ExpertsSpec
from megascale.core.layout import Layout
from megascale.core.memory import gathers_float8
from megascale.core.rank_memory import GPU_CONTEXT
from megascale.core.spans import Recorder, SpanKind
from megascale.core.stopwatch import Stopwatch
from megascale.core.tensors import Piece
from megascale.errors import ConfigError
from megascale.model.context import EVALUATION, ForwardContext
from megascale.model.transformer import Chunk
from megascale.ops import launch, token_loss
from megascale.ops.amax import AmaxPool
from megascale.ops.dispatch import Kernels
from megascale.ops.gradient_sink import get_sink
from megascale.optim.optimizer import ShardedOptimizer
from megascale.parallel import rejoin
from megascale.parallel.buffers import TIED, Axes, FlatShard, ParamAndGradBuffer
from megascale.parallel.chunk_graphs import EAGER_STEPS, ChunkGraphs
from megascale.parallel.collectives import all_reduce
from megascale.parallel.context import slice_batch
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.exchange import Exchange
from megascale.parallel.offload import InputCopies
from megascale.parallel.parameters import get_spec, initialise, initialise_parameter, list_piece_views, materialise
from megascale.parallel.pipeline import EagerRunner, PipelineExecutor
from megascale.parallel.runtime import Runtime
from megascale.parallel.slot_sink import SlotSink
from megascale.rendezvous.groups import Groups
from megascale.train import engine_axes
from megascale.train.attention_choice import Choices, agree_on_kernels
from megascale.train.blank_batches import BlankBatches, make_blank_batch
from megascale.train.expert_balance import ExpertBalance, ExpertCounts
from megascale.train.loss_weights import LossWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
REDUCE_DTYPES = {"bfloat16": torch.bfloat16}  # other settings reduce gradients in the type of their buffers

# Micro-batch number -> the micro-batch on the device.
ReadBatch = Callable[[int], Batch[torch.Tensor]]

P = ParamSpec("P")
R = TypeVar("R")


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


@dataclass
class StepResult:
    """Results of a step. The tensors are on the device, and reading them makes the host wait for the step.

    Attributes:
        loss: mean over the global batch's tokens, weighted if they have weights; the same on every rank.
        grad_norm: norm of the whole model's gradient before clipping.
        stop_sum: sum of the stop requests of all ranks, above 0 if any rank wants to stop after this step; the same on
            every rank.
        cast_counts: float64 [3]: values that casts to float8 clipped, flushed to zero and processed, summed over all
            ranks; zeros if nothing was counted.
        read_checksum: float64: the numbers that `take_read_checksum` of `Engine.step` returned, summed over all ranks;
            empty without it.
        weight_sum: float64: sum of the loss weights of the global batch, None without weights. If the sum is 0, the
            loss is 0 and the step has changed nothing.
        expert_counts: routing of the global batch, None without experts.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    stop_sum: torch.Tensor
    cast_counts: torch.Tensor
    read_checksum: torch.Tensor
    weight_sum: torch.Tensor | None = None
    expert_counts: ExpertCounts | None = None


class Engine:
    """Model, buffers, pipeline and optimizer of this rank.

    Args:
        layout: the configuration laid out over the world.
        groups: this rank's communicators; None for a world of one.
        device: device that the rank computes on.
        earlier_choices: attention kernels that earlier starts of the run chose (train/attention_choice.py); rank 0's
            are used. With earlier choices or groups, all ranks agree on kernels now. Otherwise each kernel is chosen
            when it is first needed.
        runtime: recorder, streams and kernels; default: a new one, which records nothing.
        fields: optional fields that all micro-batches carry. If replicas read different numbers of micro-batches, the
            engine adds loss weights.

    Attributes:
        attention_choices: attention kernels by kind of device and shape, to be saved with the run.
        active: overlaps and kernels chosen at the start, by name, for the start-up lines.
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
        model_axes = engine_axes.make_model_axes(self.runtime, groups)
        self.tensor_axis, tensor_lines = engine_axes.choose_tensor_overlap(
            model_axes["tensor"], config, self.dtype, device
        )
        model_axes["tensor"] = self.tensor_axis
        self._context_axis, context_lines = engine_axes.choose_context_exchange(
            model_axes["context"], config, self.dtype, device
        )
        model_axes["context"] = self._context_axis
        expert_axis_name = "slice" if config.parallel.experts_over == "context" else "expert"
        self._expert_axis, expert_lines = engine_axes.choose_expert_exchange(
            model_axes[expert_axis_name], config, self.dtype, device
        )
        model_axes[expert_axis_name] = self._expert_axis
        self.active |= tensor_lines | context_lines | expert_lines
        if self._context_axis.size > 1 and config.train.linear_precision == "float8":
            self.active["float8 scales"] = (
                "of each context rank's tokens, so losses depend on parallel.context; float8_rowwise excludes that"
            )
        self.active |= engine_axes.describe_overlaps(layout, device)
        self.world_axis = engine_axes.make_world(self.runtime, groups)
        axes = engine_axes.make_axes(self.runtime, groups, layout, model_axes)
        stopwatch.end_phase("axes")

        gathers_in_float8 = self._choose_float8_gathers()
        self.chunks: list[Chunk] = []
        self.buffers: list[ParamAndGradBuffer] = []
        self._make_chunks(coordinate.pipeline, axes)
        stopwatch.end_phase("model")
        self.gather_exchange, gather_line = engine_axes.choose_gathers(
            axes.data, config, self.buffers, gathers_in_float8=gathers_in_float8, device=device
        )
        copy_reduction, self.reduction_exchange, reduction_line = engine_axes.choose_reductions(
            axes.reduce, config, self.buffers, device
        )
        self.active |= gather_line | reduction_line
        reduce_dtype = REDUCE_DTYPES.get(config.parallel.reduce_dtype)
        self.data_parallel = DataParallel(
            self.buffers,
            config.overlap.data,
            reduce_dtype=reduce_dtype,
            float8=gathers_in_float8,
            microbatches=layout.microbatches,
            chunk_slots=layout.chunk_slots(coordinate.pipeline),
            gather_exchange=self.gather_exchange,
            copy_reduction=copy_reduction,
        )
        self.data_parallel.initialise_slots(partial(initialise_parameter, seed=config.train.seed))
        stopwatch.end_phase("data parallelism")
        self.optimizer = self._make_optimizer(axes, coordinate)
        stopwatch.end_phase("optimizer")
        self.experts = self._make_expert_balance(rank)
        self.pipeline = self._make_pipeline(groups, coordinate.pipeline)
        self._loss_weights: LossWeights | None = None
        if fields.loss_weights and self.chunks[-1].is_last:
            axes_of_equal_samples = [name for name in AXES.stage if AXES[name].cuts_batch != "samples"]
            counts_samples = grid.is_first(axes_of_equal_samples, rank)  # the weights of a sample count once
            stage = engine_axes.make_axis(self.runtime, groups, "stage")
            self._loss_weights = LossWeights(stage, counts_samples, self._loss_dtype, device)
        self._token_gradient = self._make_token_gradient()
        self._token_loss = token_loss.TOKEN_LOSSES[config.train.loss]
        # Dropout masks of a micro-batch depend on the step and on the micro-batch's first sample in the global batch.
        self._first_sample = layout.shares.first(self.data_rank) * config.train.micro_batch
        self._dropout_key = config.train.seed
        self._read_batch: ReadBatch | None = None
        self._micro_batches: dict[int, Batch[torch.Tensor]] = {}
        self._read_fields = [self._list_read_fields(chunk) for chunk in range(len(self.chunks))]
        self.graphs = self._make_graphs()
        if grid.pipeline > 1 and device.type == "cuda":
            self.load_kernels()
        stopwatch.end_phase("pipeline")

    def _make_blank_batches(self, fields: SampleFields, replica: int) -> BlankBatches | None:
        """Return the blank micro-batches that complete this replica's steps.

        Return None if all replicas read equally many micro-batches.
        """
        layout = self.layout
        if layout.shares.is_even:
            return None
        model, width = self.config.model, self.config.train.micro_batch
        length = model.sequence_length
        weighted = replace(fields, loss_weights=True)
        blank = make_blank_batch(weighted, length, width, sequence_length=length, device=self.device)
        counts = ", ".join(str(layout.shares.count(index)) for index in range(layout.grid.replicas))
        self.active["micro-batches"] = f"{counts} on the replicas, filled up to {layout.microbatches} with blank ones"
        return BlankBatches(layout.shares.count(replica), fields.loss_weights, blank)

    def _choose_kernels(self, groups: Groups | None, earlier_choices: Choices | None) -> None:
        """Set the runtime's kernels, streams and, if ranks have to agree, attention kernels; record the choices."""
        config, runtime = self.config, self.runtime
        runtime.attention.backend = config.kernels.attention
        reads_expert_blocks = config.kernels.expert_rows_gemm == "auto"
        runtime.kernels = Kernels(config.kernels.mode, config.kernels.deterministic, reads_expert_blocks)
        gemm_streams = runtime.use_side_stream(config.gemms_on_side_stream, self.device)
        self.attention_choices = earlier_choices or {}
        if groups is not None or earlier_choices is not None:
            grid = self.layout.grid
            with runtime.kernels.as_current():
                self.attention_choices, descriptions = agree_on_kernels(
                    config,
                    grid.tensor,
                    self.dtype,
                    self.device,
                    earlier_choices,
                    runtime.attention,
                    self.fields.max_documents,
                    grid.context,
                )
            self.active |= descriptions
        if self.device.type == "cuda" or config.overlap.gemms == "on":
            if config.overlap.gemms == "auto":
                source = " (overlap.gemms=auto)"
            else:
                source = ""
            self.active["independent GEMMs"] = gemm_streams + source
        if self.device.type == "cuda":
            self.active["kernel launches"] = launch.describe()
            if config.kernels.deterministic:
                self.active["deterministic"] = "a repeated step gives the same bits"

    def _choose_float8_gathers(self) -> bool:
        """Return whether data-parallel ranks gather the matrices of linear layers as float8; record the choice."""
        config, data_size = self.config, self.layout.grid.shards
        if self.adapters is not None:
            return False  # the matrices are not trained, and so never gathered
        gathers_in_float8 = gathers_float8(config.parallel, config.train.linear_precision, data_size)
        if LINEAR_PRECISIONS[config.train.linear_precision].gathered_weight_bytes is None:
            return gathers_in_float8
        requested, precision = config.parallel.gather_precision, config.train.precision
        if gathers_in_float8:
            description = f"float8: matrices of linear layers; {precision}: all other parameters"
        elif data_size > 1 and config.parallel.zero:
            description = f"{precision} (parallel.gather_precision={requested})"
        elif requested == "float8":
            description = "nothing is gathered: there is one data-parallel rank"
        else:
            return gathers_in_float8
        self.active["parameters gathered in"] = description
        return gathers_in_float8

    def _make_chunks(self, stage: int, axes: Axes) -> None:
        """Make this stage's chunks of the model in their flat buffers, with initial values."""
        config, grid, schedule = self.config, self.layout.grid, self.layout.schedule()
        linear_precision = config.train.linear_precision
        # A precision that can gather float8 gives matrices buckets of their own even if it does not gather float8. The
        # shards, and therefore the bits of sums over shards, do not depend on that choice.
        has_own_buckets = LINEAR_PRECISIONS[linear_precision].gathered_weight_bytes is not None and grid.shards > 1
        for chunk_index, layers in enumerate(self.layout.stage_layers(stage)):
            global_chunk = schedule.global_chunk(stage, chunk_index)
            is_last = global_chunk == schedule.chunks - 1
            # If one stage has both ends of the model, the first chunk's buffers hold the embedding and its gradient.
            has_both_ends = is_last and chunk_index > 0 and schedule.chunk_map.first_stage == stage
            shares_embedding = config.model.tied_embeddings and has_both_ends
            with self.runtime.kernels.as_current():
                chunk = Chunk(
                    config.model,
                    layers,
                    is_first=global_chunk == 0,
                    is_last=is_last,
                    axis=self.tensor_axis,
                    axes=axes.model,
                    dtype=self.dtype,
                    recompute=config.parallel.recompute,
                    linear_precision=linear_precision,
                    embedding=self.chunks[0].token_embedding if shares_embedding else None,
                    adapters=self.adapters,
                )
            if self.adapters is not None:
                self._allocate_frozen(chunk)
            buffer = ParamAndGradBuffer(
                chunk,
                self.device,
                axes,
                config.parallel.zero,
                self.layout.bucket_elements,
                float8_gather=has_own_buckets,
            )
            self.chunks.append(chunk)
            self.buffers.append(buffer)
            if buffer.zero < 3:
                initialise(chunk, config.train.seed)
            else:
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
        if any(chunk.linears.collects_amax for chunk in self.chunks):
            self.runtime.kernels.amaxes = AmaxPool()

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
        for matrix, *factors in list_adapters(self.config.model, self.adapters):
            if matrix.name in frozen_names and not {factor.name for factor in factors} <= trained_names:
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
            duplicates=frozenset({TIED}) if has_second_copy else frozenset(),
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
            self.tokens_per_step,
            self.device,
            counts_tokens=grid.is_first(axes_of_equal_tokens, rank),
            ranks=grid.tensor * grid.expert,
        )
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
        return balance

    def _make_pipeline(self, groups: Groups | None, stage: int) -> PipelineExecutor:
        layout, streams = self.layout, engine_axes.make_p2p_streams(groups)
        return PipelineExecutor(
            layout.schedule(), stage, streams, layout.activation_shape, self.dtype, self.device, self.runtime
        )

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def _computes_gradients_with_loss(self) -> bool:
        """True if the loss computes its gradients in forward, while the logits exist.

        The weight of each token's loss is known by then. The output matrix's gradient needs memory in forward.
        """
        return not self.chunks[-1].is_last or self._has_memory_for_early_gradients

    @cached_property
    def _has_memory_for_early_gradients(self) -> bool:
        """True if the gradient of the output matrix has memory in the last chunk's forward.

        A gradient in a slot has memory in forward only if the chunk's backward follows at once.
        """
        if not isinstance(get_sink(self.chunks[-1].output_weight), SlotSink):
            return True
        if not self.layout.schedule().runs_backward_at_once(self.pipeline.stage, len(self.chunks) - 1):
            return False
        return self.data_parallel.allow_early_gradients(self.chunks[-1].output_weight)

    def _make_token_gradient(self) -> torch.Tensor | None:
        """Return the gradient of each token's loss, 0-d.

        Return None if tokens have weights, or if the loss does not compute its gradients in forward.
        """
        if not self._computes_gradients_with_loss or self._loss_weights is not None:
            return None
        return torch.full((), 1 / self.tokens_per_step, dtype=self._loss_dtype, device=self.device)

    def _make_graphs(self) -> ChunkGraphs | None:
        """Return the CUDA graphs of the chunks, None if they are off or unavailable.

        On a CPU, kernels.graphs=on runs the same code without capturing, for tests. Raises ConfigError if
        kernels.graphs=on and graphs are unavailable.
        """
        is_cuda, requested = self.device.type == "cuda", self.config.kernels.graphs
        reason = self._find_graph_obstacle()
        if not is_cuda and requested == "auto":
            return None
        if reason and requested == "on":
            raise ConfigError(f"kernels.graphs=on is unavailable: {reason}; set --kernels.graphs=auto or off")
        if reason:
            if is_cuda:
                self.active["CUDA graphs"] = f"off ({reason})"
            return None
        if is_cuda:
            self.active["CUDA graphs"] = f"forward and backward of each chunk, from step {EAGER_STEPS + 1} on"
        pipeline = self.pipeline
        return ChunkGraphs(
            self.buffers,
            pipeline.actions,
            compute=self._run_captured_chunk,
            runtime=self.runtime,
            shape=pipeline.shape,
            device=self.device,
            data_parallel=self.data_parallel,
        )

    def _find_graph_obstacle(self) -> str:
        """Return why chunks cannot be captured, "" if they can. Ranks of a stage with equal GPUs return the same."""
        memory_limit = None
        if self.device.type == "cuda":
            memory_limit = torch.cuda.get_device_properties(self.device).total_memory - GPU_CONTEXT
        _, reason = self.layout.stage_memory(self.pipeline.stage, memory_limit)
        if (
            not reason
            and self.device.type == "cuda"
            and self.tensor_axis.size > 1
            and self.tensor_axis.exchange is None
        ):
            overlap = self.active["tensor overlap"]
            reason = f"only the fused exchange of tensor parallelism is captured, and tensor overlap is {overlap}"
        if (
            not reason
            and self.device.type == "cuda"
            and self._context_axis.size > 1
            and self._context_axis.exchange is None
        ):
            reason = (
                f"only copies between context ranks are captured, and the exchange is {self.active['context exchange']}"
            )
        return reason

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
        sequence_length = self.config.model.sequence_length
        length = sequence_length // self._context_axis.size
        batch = make_blank_batch(
            self.fields, length, self.config.train.micro_batch, sequence_length=sequence_length, device=self.device
        )
        assert batch.tokens is not None
        tokens = batch.tokens
        context = ForwardContext(0, 0, self._token_gradient, token_loss=self._token_loss)
        for chunk_index, chunk in enumerate(self.chunks):
            x = tokens
            if not chunk.is_first:
                x = torch.zeros(self.pipeline.shape, dtype=chunk.dtype, device=self.device, requires_grad=True)
            y = self._run_chunk(chunk_index, x, batch, context)
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
            learning_rate: learning rate of this step.
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
        blanks = self._blank_batches
        if blanks is not None:
            read_batch = blanks.append_blanks(read_batch)
        if self._context_axis.size > 1:
            self._read_batch = lambda i: slice_batch(read_batch(i), self._context_axis)
        else:
            self._read_batch = read_batch
        if self._loss_weights is not None:
            if blanks is not None:
                local_sum = blanks.sum_weights(sum_weights)
            else:
                assert sum_weights is not None, "micro-batches carry loss weights"
                local_sum = sum_weights()
            self._loss_weights.begin_step(local_sum)
        self._dropout_key = self.config.train.seed + step
        if self.replay_check is not None:
            self.replay_check.begin_step(step)
        loss = self._run_micro_batches(count_casts)
        if self._must_repeat_micro_batches():
            # The captured micro-batches left tokens out. An eager run overwrites their gradients, after the reductions
            # that have begun.
            self.data_parallel.finish_reductions()
            self.data_parallel.finish_tied()
            loss = self._run_micro_batches(count_casts, eagerly=True)
        self._micro_batches.clear()
        self._read_batch = None
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
        # Take the sums from the end, in the reverse order of `_collect_scalars`.
        weight_sum = None
        if self.fields.loss_weights:
            weight_sum = sums[-1]
            sums = sums[:-1]
        expert_counts = None
        if self.experts is not None:
            is_skipped = ~torch.isfinite(grad_norm)
            if weight_sum is not None:
                is_skipped |= weight_sum == 0
            expert_counts = self.experts.update(sums[-self.experts.size :], is_skipped)
            sums = sums[: -self.experts.size]
        for hook in self.after_update_hooks:
            hook(step)
        self.ended_update = step
        if blanks is not None and not blanks.has_weights:
            weight_sum = None  # the data has no weights: blank micro-batches needed some
        return StepResult(
            loss=sums[0],
            grad_norm=grad_norm,
            stop_sum=sums[1],
            cast_counts=sums[2:5],
            read_checksum=sums[5:],
            weight_sum=weight_sum,
            expert_counts=expert_counts,
        )

    @property
    def _has_row_limit(self) -> bool:
        """True if captured micro-batches have a limited number of rows for experts, so that a step may be repeated."""
        return self.experts is not None and self.graphs is not None and self.tensor_axis.size > 1

    def _must_repeat_micro_batches(self) -> bool:
        """Return whether a captured micro-batch on any rank had too few rows for its experts' tokens.

        Store the result in `experts.is_repeated`. With a row limit, wait for the micro-batches.
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
        if self.graphs is None:
            runner = EagerRunner(self._forward, self.runtime.weight_gradients)
        else:
            runs_eagerly = eagerly or count_casts or self.backward_in_own_thread
            if self.replay_check is not None and self.replay_check.needs_eager_step():
                runs_eagerly = True
            runner = self.graphs.begin_step(self._forward, self._take_graph_inputs, eagerly=runs_eagerly)
        if self.replay_check is not None:
            runner = self.replay_check.watch(runner)
        with torch.autograd.set_multithreading_enabled(self.backward_in_own_thread):
            loss = self.pipeline.run(runner, self.data_parallel)
        if self.graphs is not None:
            self.graphs.end_step()
        return loss

    def read_first_micro_batch(self) -> Batch[torch.Tensor]:
        """Return the step's first micro-batch before the step runs; an empty one if this rank reads none of it."""
        reads = any(chunk.is_first or chunk.is_last for chunk in self.chunks) or self.fields.concerns_blocks
        if not reads:
            return Batch()
        if 0 not in self._micro_batches:
            assert self._read_batch is not None
            self._micro_batches[0] = self._read_batch(0)
        return self._micro_batches[0]

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
        saved = self._first_sample, self._micro_batches
        self._first_sample, self._micro_batches = first_sample, {0: batch}
        self._mark_weights_changed()
        self.data_parallel.begin_step()
        if self.experts is not None:
            self.experts.begin_step()
        runner = watch(EagerRunner(self._forward, self.runtime.weight_gradients))
        try:
            with torch.autograd.set_multithreading_enabled(False), self.data_parallel.discard_gradients():
                self.pipeline.run_microbatch(runner, self.data_parallel)
        finally:
            self._first_sample, self._micro_batches = saved

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

    def _forward(self, chunk: int, i: int, x: torch.Tensor | None) -> torch.Tensor:
        """Run micro-batch `i` through `chunk`; x: the previous chunk's output, None for the model's first chunk."""
        if self.experts is not None and self._blank_batches is not None:
            self.experts.set_blank(i >= self._blank_batches.read_count)
        sample_start = self._first_sample + i * self.config.train.micro_batch
        context = ForwardContext(self._dropout_key, sample_start, self._token_gradient, token_loss=self._token_loss)
        return self._run_chunk(chunk, *self._take_inputs(chunk, i, x), context)

    def _take_inputs(
        self, chunk: int, i: int, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, Batch[torch.Tensor] | None]:
        """Return a chunk's input (`x`, or the tokens if x is None), and micro-batch `i` if the chunk reads its fields.

        A micro-batch is read once. With several chunks, or if the step may be repeated, it stays until the step's end.
        """
        is_last = self.chunks[chunk].is_last
        if x is not None and not is_last and not self.fields.concerns_blocks:
            return x, None
        if i not in self._micro_batches:
            assert self._read_batch is not None
            if len(self.chunks) == 1 and not self._has_row_limit:
                self._micro_batches.clear()
            self._micro_batches[i] = self._read_batch(i)
        batch = self._micro_batches[i]
        if x is None:
            assert batch.tokens is not None
            x = batch.tokens
        if is_last and self._loss_weights is not None:
            self._loss_weights.finish_sum()
        return x, batch

    def _run_chunk(
        self, chunk: int, x: torch.Tensor, batch: Batch[torch.Tensor] | None, context: ForwardContext
    ) -> torch.Tensor:
        """Return the chunk's activation; for the model's last chunk, what the micro-batch adds to the step's loss."""
        module = self.chunks[chunk]
        if not module.is_last:
            return module(x, batch, context)
        if self._loss_weights is None:
            losses = module(x, batch, context)
            return (losses * (1 / self.tokens_per_step)).sum()
        assert batch is not None
        assert batch.loss_weights is not None
        weights_SB = self._loss_weights.normalise(batch.loss_weights)
        if self._computes_gradients_with_loss:
            context = replace(context, token_grad=weights_SB)
        return (module(x, batch, context) * weights_SB).sum()

    def _list_read_fields(self, chunk: int) -> list[str]:
        """Return the fields of a micro-batch that `chunk` reads, other than its tokens."""
        names = []
        if self.chunks[chunk].is_last:
            names.append("targets")
            if self.fields.loss_weights:
                names.append("loss_weights")
        if self.fields.positions:
            names.append("positions")
        if self.fields.max_documents:
            names.append("document_boundaries")
        return names

    def _take_graph_inputs(self, chunk: int, i: int, x: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a captured chunk reads: its input and `_read_fields` of the micro-batch."""
        x, batch = self._take_inputs(chunk, i, x)
        inputs = [x]
        for name in self._read_fields[chunk]:
            inputs.append(getattr(batch, name))
        return tuple(inputs)

    def _run_captured_chunk(self, chunk: int, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run a chunk in the way that a CUDA graph captures: the same for every micro-batch and step, no dropout."""
        context = ForwardContext(token_grad=self._token_gradient, token_loss=self._token_loss)
        x, *fields = inputs
        batch = Batch(**dict(zip(self._read_fields[chunk], fields, strict=True)))
        if self.experts is None:
            return self._run_chunk(chunk, x, batch, context)
        with self.experts.limit_rows(self.config.kernels.expert_rows):
            return self._run_chunk(chunk, x, batch, context)

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
    ) -> torch.Tensor:
        """Return the scalars that the all-reduce of the gradient norm sums over all ranks, float64.

        Their order is: loss, stop request, three counts of casts, read checksum, routing (with experts only), sum of
        loss weights (if samples carry weights). `fill_` writes values of the host: a copy from the host's memory would
        wait for the whole step before the optimizer is launched.
        """
        count = 5 + len(read_checksum)
        if self.experts is not None:
            count += self.experts.size
        if self.fields.loss_weights:
            count += 1
        scalars = torch.zeros(count, dtype=torch.float64, device=self.device)
        scalars[1].fill_(stop_request)
        if loss is not None and self.counts_loss:
            scalars[0] += loss
        if self._loss_weights is not None:
            scalars[-1].fill_(self._loss_weights.counted_sum)
        for chunk in self.chunks:
            counts = chunk.linears.get_cast_counts()
            if counts is not None:
                scalars[2:5] += counts
        for index, value in enumerate(read_checksum, 5):
            if value:  # ranks between the first and the last stage have read nothing
                scalars[index].fill_(value)
        if self.experts is not None:
            first = 5 + len(read_checksum)
            self.experts.add_counts(scalars[first : first + self.experts.size])
        return scalars

    def _update(
        self, learning_rate: float, step: int, scalars: torch.Tensor, has_next_step: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update the weights. Return the gradient norm and `scalars` summed over all ranks."""
        self._mark_weights_changed()  # frees casts of the weights before the update needs memory
        self.data_parallel.invalidate_gathered()
        on_updated: Callable[[FlatShard], None] = lambda shard: None
        if has_next_step:
            # The next step's schedule begins with a gather. Each of its buckets is sent as soon as it is updated.
            on_updated = self.data_parallel.gather_under_update(self.pipeline.first_gather)
        recorder = self.runtime.recorder
        recorder.begin_action(SpanKind.OPTIMIZER)
        grad_norm, sums = self.optimizer.step(
            learning_rate, step, scalars, on_updated, self.data_parallel.finish_tied, self.fields.loss_weights
        )
        self.data_parallel.end_update()
        recorder.end_action()
        assert sums is not None
        return grad_norm, sums

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
        """Stop watching the peers of exchanges. Peers take this rank's end as planned unless `failed`."""
        for exchange in self._list_exchanges():
            exchange.close(failed)

    def _list_exchanges(self) -> list[Exchange]:
        """Return the exchanges between GPUs that are in use."""
        axes = (self.tensor_axis, self._context_axis, self._expert_axis)
        exchanges = [axis.exchange for axis in axes] + [self.gather_exchange, self.reduction_exchange]
        return [exchange for exchange in exchanges if exchange is not None]

    def find_rejoin_obstacle(self) -> str:
        """Return why this engine cannot continue with new groups (`rejoin`), "" if it can."""
        has_exchange = any(axis.exchange is not None for axis in rejoin.list_axes(self.runtime))
        if has_exchange or self.gather_exchange is not None or self.reduction_exchange is not None:
            return "its peers' memory is mapped for the exchange between GPUs"
        if self.optimizer.rule.has_collective_init:
            return f"optimizer.name={self.config.optimizer.name} exchanges its layout when it is made"
        if self.config.optimizer.offload:
            return "optimizer.offload=true may still copy state of the failed update"
        return self.runtime.rejoin_obstacle

    def find_state_obstacle(self) -> str:
        """Return why another engine cannot take over the weights and the optimizer state, "" if it can."""
        if self.config.optimizer.offload:
            return "optimizer.offload=true may still copy state of the failed update"
        has_copies = any(state.master is not state.shard.params for state in self.optimizer.states)
        if self._list_exchanges() and not has_copies:
            return "its weights are in memory that is mapped for the exchange between GPUs"
        return self.runtime.rejoin_obstacle

    def leave_groups(self) -> None:
        """Drop the failed step and the groups; weights and optimizer state stay. `rejoin` sets new groups.

        Captured graphs are dropped too, since they hold communicators. Raises RuntimeError if the GPU has failed.
        """
        self.runtime.weight_gradients.clear()
        self.data_parallel.drop_communication()
        if self.graphs is not None:
            self.graphs.restart()
            gc.collect()  # NCCL keeps a communicator, and its abort waits, until no graph holds it
        self._micro_batches.clear()
        self._read_batch = None
        self.before_update_hooks.clear()
        self.after_update_hooks.clear()
        if self.replay_check is not None:
            self.replay_check.restart()
            self.replay_check = None
        self.runtime.calls = NullCallLog()
        self.runtime.recorder = Recorder()
        rejoin.drop_groups(self.runtime, self.pipeline.streams)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def set_start_step(self, step: int) -> None:
        """Set the step whose state the optimizer has. Call it before the first step of a start."""
        self.begun_update = self.ended_update = step
        if self.optimizer.update_hold is not None:
            self.optimizer.update_hold.set_step(step)

    def find_complete_step(self) -> int:
        """Return the step whose state the optimizer has after its groups were aborted.

        Return -1 if an update ended in the middle, or may have: on a GPU, an optimizer with collectives of its own may
        have continued with wrong values after the abort. Call it after `leave_groups`.
        """
        assert self.optimizer.update_hold is not None
        step = self.optimizer.update_hold.read_step()
        is_partial = self.begun_update != self.ended_update and step == self.begun_update
        is_uncertain = self.device.type == "cuda" and OPTIMIZERS[self.config.optimizer.name].communicates
        return -1 if is_partial or is_uncertain else step

    def rejoin(self, groups: Groups, earlier_choices: Choices) -> None:
        """Continue with the groups of the next attempt. Collective, like the construction of an engine."""
        groups_by_name: dict[str, Any] = {group.group_name: group for group in groups.by_kind.values()}
        groups_by_name |= {channel.group.group_name: channel.group for channel in groups.p2p.values()}
        groups_by_name["world"] = groups.world
        rejoin.adopt_groups(self.runtime, self.pipeline.streams, groups_by_name)
        with self.runtime.kernels.as_current():
            self.attention_choices, _ = agree_on_kernels(
                self.config,
                self.layout.grid.tensor,
                self.dtype,
                self.device,
                earlier_choices or self.attention_choices,
                self.runtime.attention,
                self.fields.max_documents,
                self.layout.grid.context,
            )

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

        outputs = self.pipeline.run_forward(1, forward)
        weights_SB = batch.loss_weights
        totals = torch.zeros(1 if weights_SB is None else 2, dtype=torch.float64, device=self.device)
        if outputs and self.counts_loss:
            if weights_SB is None:
                totals[0] += outputs[0].sum(dtype=torch.float64)
            else:
                totals[0] += (outputs[0].double() * weights_SB).sum()
                totals[1] += weights_SB.sum(dtype=torch.float64)
        return all_reduce(totals, self.world_axis).wait()
