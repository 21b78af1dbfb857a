"""One rank's share of the model: chunks in flat buffers, the pipeline, the optimizer, and a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core.layout import Layout
from megascale.core.rank_memory import GPU_CONTEXT, rank_memory
from megascale.core.spans import SpanKind
from megascale.core.traffic import gathers_float8
from megascale.errors import ConfigError
from megascale.model.context import EVALUATION, ForwardContext
from megascale.model.transformer import Chunk
from megascale.ops import launch, token_loss
from megascale.ops.dispatch import Kernels
from megascale.ops.known_amax import AmaxSlots
from megascale.optim.optimizer import ShardedOptimizer
from megascale.parallel.buffers import TIED, Axes, FlatChunk
from megascale.parallel.chunk_graphs import EAGER_STEPS, ChunkGraphs
from megascale.parallel.chunk_runner import EagerChunks
from megascale.parallel.collectives import all_reduce
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.parameters import initialise
from megascale.parallel.pipeline import PipelineExecutor
from megascale.parallel.runtime import Runtime
from megascale.rendezvous.groups import Groups
from megascale.train import engine_axes
from megascale.train.attention_choice import Choices, agree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

# Given the micro-batch number, tokens and targets, each int64 [sequence, micro_batch] on the device.
Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]

P = ParamSpec("P")
R = TypeVar("R")


def with_own_kernels(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """Run a method of the engine with its own kernels in force."""

    @wraps(method)
    def run(engine: Engine, *args: P.args, **kwargs: P.kwargs) -> R:
        with engine.runtime.kernels.in_force():
            return method(engine, *args, **kwargs)

    return run


@dataclass
class StepResult:
    """What a step gives, still on the device: reading it makes the host wait.

    Attributes:
        loss: mean over the global batch's tokens, the same on every rank.
        grad_norm: of the whole model, before clipping.
        stop: above 0 if any rank wants to stop after this step; the same on every rank.
        casts: float64 [3]: numbers clipped, flushed to zero and looked at by casts to float8, over all ranks; zeros
            where nothing was counted.
        read: float64: what `take_read` of `Engine.step` gave, summed over all ranks; empty without it.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    stop: torch.Tensor
    casts: torch.Tensor
    read: torch.Tensor


class Engine:
    """Model, buffers, pipeline and optimizer of this rank.

    Args:
        layout: the configuration laid over the world.
        groups: this rank's communicators; None for a world of one.
        device: where it computes.
        kept: attention kernels that the run has chosen before (see train/attention_choice.py); rank 0's count. With
            it, or with groups, ranks agree on kernels now; without, each is chosen when it is first needed.
        runtime: what it runs with; default: its own, which records nothing.

    Attributes:
        attention: the kernels by kind of device and shape, to be kept.
    """

    def __init__(
        self,
        layout: Layout,
        groups: Groups | None,
        device: torch.device,
        kept: Choices | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.config, self.layout, self.device = layout.config, layout, device
        config, grid, rank = layout.config, layout.grid, groups.rank if groups is not None else 0
        self.runtime = runtime = runtime or Runtime()
        runtime.attention.backend = config.kernels.attention
        runtime.kernels = Kernels(config.kernels.mode, config.kernels.deterministic)
        gemms = runtime.use_side_stream(config.gemms_on_side_stream, device)
        at = grid.coordinate(rank)
        self.data_rank = at.data
        self.tokens = config.train.global_batch * config.model.sequence_length  # in a step
        # Autograd's own thread would wait for the interpreter's lock before each backward function in Python, and it
        # knows no kernels but the default ones (ops/dispatch.py).
        self.backward_apart = False
        # Called with the step's number: before, gradients and weights are whole, those as training reads them.
        self.before_update: list[Callable[[int], None]] = []
        self.after_update: list[Callable[[int], None]] = []
        self.active: dict[str, str] = {}  # what was chosen at start, for the start-up print
        self.attention = kept or {}
        if groups is not None or kept is not None:
            dtype = DTYPES[config.train.precision]
            with runtime.kernels.in_force():
                self.attention, others = agree(config, grid.tensor, dtype, device, kept, runtime.attention)
            self.active |= others
        if device.type == "cuda" or config.overlap.gemms == "on":
            auto = " (overlap.gemms=auto)" if config.overlap.gemms == "auto" else ""
            self.active["independent GEMMs"] = gemms + auto
        if device.type == "cuda":
            self.active["kernel launches"] = launch.describe()
            if config.kernels.deterministic:
                self.active["deterministic"] = "a step that is done again comes to the same bits"
        tensor = engine_axes.make_axis(runtime, groups, "tensor", grid.tensor, at.tensor)
        self.tensor, said = engine_axes.overlapped(tensor, config, DTYPES[config.train.precision], device)
        self.active |= said | engine_axes.other_overlaps(layout, device)
        self.world = engine_axes.make_axis(runtime, groups, "world", grid.world_size, rank)
        stage, stages = at.pipeline, grid.pipeline
        self.first, self.last = stage == 0, stage == stages - 1
        axes = engine_axes.make_axes(runtime, groups, layout, rank, self.tensor)
        float8 = self._gather_precision()
        dtype = DTYPES[config.train.precision]
        reduce_dtype = torch.bfloat16 if config.parallel.reduce_dtype == "bfloat16" else None
        self.chunks: list[Chunk] = []
        self.flats: list[FlatChunk] = []
        self._make_chunks(stage, axes)
        self.data_parallel = DataParallel(self.flats, config.overlap.data, reduce_dtype, float8)
        self.optimizer = ShardedOptimizer(
            config.optimizer,
            self.flats,
            tensor=self.tensor,
            # Without ZeRO the data-parallel ranks hold the same gradients, which count once.
            norm=self.world,
            norm_weight=1.0 / grid.data if config.parallel.zero == 0 else 1.0,
            stage=axes.stage,
            duplicates=frozenset({TIED} if stages > 1 and self.last else ()),
        )
        train = config.train
        shape = (config.model.sequence_length // grid.tensor, train.micro_batch, config.model.hidden)
        self.pipeline = PipelineExecutor(
            layout.schedule(), stage, engine_axes.make_p2p_streams(groups), shape, dtype, device, runtime
        )
        self._token_gradient = self._make_token_grad()
        self._token_loss = token_loss.KINDS[config.train.loss]
        self.graphs = self._chunk_graphs(shape)
        if stages > 1 and device.type == "cuda":
            self.load_kernels()

    def _make_chunks(self, stage: int, axes: Axes) -> None:
        """This stage's chunks of the model in their flat buffers, with first values."""
        config, grid, schedule = self.config, self.layout.grid, self.layout.schedule()
        for number, layers in enumerate(self.layout.chunks_of(stage)):
            place = schedule.global_chunk(stage, number)
            last = place == schedule.chunks - 1
            # On a single stage the embedding is there once: the first chunk's buffers have it and its gradient.
            lent = config.model.tied_embeddings and grid.pipeline == 1 and number > 0 and last
            with self.runtime.kernels.in_force():
                chunk = Chunk(
                    config.model,
                    layers,
                    first=place == 0,
                    last=last,
                    axis=self.tensor,
                    dtype=DTYPES[config.train.precision],
                    recompute=config.parallel.recompute,
                    linear_precision=config.train.linear_precision,
                    embedding=self.chunks[0].token_embedding if lent else None,
                )
            bucket = config.parallel.bucket_elements if grid.data > 1 else None
            # Apart also where they are gathered in their own type: sums over shards are then the same to the bit.
            apart = LINEAR_PRECISIONS[config.train.linear_precision].gathered is not None and grid.data > 1
            self.chunks.append(chunk)
            self.flats.append(FlatChunk(chunk, self.device, axes, config.parallel.zero, bucket, apart))
            initialise(chunk, config.train.seed)
        for chunk in self.chunks:
            tokens = config.model.sequence_length * config.train.micro_batch
            with self.runtime.kernels.in_force():
                chunk.linears.check(chunk.matrices(), tokens, self.device)
        if any(chunk.linears.wants_amaxes for chunk in self.chunks):
            self.runtime.kernels.amaxes = AmaxSlots()

    def _gather_precision(self) -> bool:
        """Whether data-parallel ranks gather the matrices of linear layers as float8; said at start."""
        config, data = self.config, self.layout.grid.data
        float8 = gathers_float8(config.parallel, config.train.linear_precision, data)
        wanted, rest = config.parallel.gather_precision, config.train.precision
        if LINEAR_PRECISIONS[config.train.linear_precision].gathered is None:
            return float8
        if float8:
            self.active["parameters gathered in"] = f"float8: linear layers' matrices; {rest}: all else"
        elif data > 1 and config.parallel.zero:
            self.active["parameters gathered in"] = f"{rest} (parallel.gather_precision={wanted})"
        elif wanted == "float8":
            self.active["parameters gathered in"] = "nothing is gathered: one data-parallel rank"
        return float8

    def _chunk_graphs(self, shape: tuple[int, ...]) -> ChunkGraphs | None:
        """CUDA graphs of the chunks where they can be had; ConfigError if they are asked for and cannot."""
        why = self._why_no_graphs()
        if not why and self.device.type == "cuda" and self.tensor.size > 1 and self.tensor.exchange is None:
            said = self.active["tensor overlap"]
            why = f"of tensor parallelism the fused exchange alone is captured, and tensor overlap is {said}"
        if self.device.type != "cuda" and self.config.kernels.graphs == "auto":
            return None
        if why and self.config.kernels.graphs == "on":
            raise ConfigError(f"kernels.graphs=on cannot be had: {why}; set --kernels.graphs=auto or off")
        if why:
            self.active |= {"CUDA graphs": f"off ({why})"} if self.device.type == "cuda" else {}
            return None
        if self.device.type == "cuda":
            self.active["CUDA graphs"] = f"of each chunk's forward and backward, from step {EAGER_STEPS + 1} on"
        actions = self.pipeline.actions
        return ChunkGraphs(self.flats, actions, self._compute_fixed, self.runtime, shape, self.device)

    def _why_no_graphs(self) -> str:
        """By the configuration and the device's memory; the same on all ranks of a stage with equal GPUs."""
        layout, stage, most = self.layout, self.pipeline.stage, None
        if self.device.type == "cuda":
            most = torch.cuda.get_device_properties(self.device).total_memory - GPU_CONTEXT
        return rank_memory(self.config, layout.grid, layout.schedule(), stage, most)[1]

    def use_graphs(self, on: bool) -> None:
        """From the next step on, replay CUDA graphs of the chunks, or launch each operator."""
        if self.graphs is not None:
            self.graphs.set_enabled(on)

    def run_gemms_on_side_stream(self, on: bool) -> None:
        """From the next step on, run independent GEMMs on two streams, or one after another."""
        if self.graphs is not None:
            self.graphs.clear()
        self.runtime.use_side_stream(on, self.device)
        if self.tensor.exchange is not None:
            self.tensor.exchange.on_side_stream = on

    def recompute(self, what: str) -> None:
        """From the next step on, let backward recompute what parallel.recompute=`what` names."""
        if self.graphs is not None:
            self.graphs.clear()
        for chunk in self.chunks:
            chunk.recompute = what
            for block in chunk.blocks:
                block.recompute = what  # type: ignore[assignment]

    @with_own_kernels
    def load_kernels(self) -> None:
        """Run every chunk once by itself, forward and backward, and forget what came of it.

        CUDA loads a kernel when it is first used, and loading waits for all that runs on the device: for a receive as
        well, whose sender may at that moment load a kernel itself and wait for a transfer of its own. So all are loaded
        before the first transfer.
        """
        self.runtime.calls.at(b"kernels")
        model, train = self.config.model, self.config.train
        tokens = torch.zeros(model.sequence_length, train.micro_batch, dtype=torch.int64, device=self.device)
        where = ForwardContext(0, 0, self._token_gradient, token_loss=self._token_loss)
        for number, chunk in enumerate(self.chunks):
            x = tokens
            if not chunk.first:
                x = torch.zeros(self.pipeline.shape, dtype=chunk.dtype, device=self.device, requires_grad=True)
            y = chunk(x, tokens if chunk.last else None, where)
            if chunk.last:
                y = (y * (1 / self.tokens)).sum()
            if self.data_parallel.pool is not None:
                self.data_parallel.arm(number)  # a buffer of the pool is reduced before its next use
            self.data_parallel.begin_backward(number)
            torch.autograd.backward(y, None if chunk.last else torch.zeros_like(y))
            self.data_parallel.end_backward(number)
        self.data_parallel.finish_reductions()
        self.data_parallel.finish_tied()

    def _make_token_grad(self) -> torch.Tensor | None:
        """The gradient of each token's loss, known before it: every token counts the same, so the loss can make its
        gradients while its logits are there. None under ZeRO-2, where gradients have no place before backward."""
        if self.flats[-1].zero == 2:
            return None
        wide = torch.float64 if self.config.train.precision == "float64" else torch.float32
        return torch.full((), 1 / self.tokens, dtype=wide, device=self.device)

    # training ---------------------------------------------------------------------------------------------------

    @with_own_kernels
    def start_gather(self) -> None:
        """Begin the schedule's first gather: called before the batch is read, so that both go on together."""
        self.runtime.recorder.begin_action(SpanKind.GATHER_PARAMS, self.pipeline.first_gather)
        self.data_parallel.start_gather(self.pipeline.first_gather)
        self.runtime.recorder.end_action()

    @with_own_kernels
    def step(
        self,
        batches: Batches,
        step: int,
        learning_rate: float,
        stop: bool = False,
        before_update: Callable[[], None] = lambda: None,
        more: bool = False,
        count_casts: bool = False,
        take_read: Callable[[], Sequence[float]] | None = None,
    ) -> StepResult:
        """Forward and backward over all micro-batches, then the update.

        Args:
            batches: gives this rank's micro-batches; asked for only where tokens or targets are needed.
            step: number of this optimizer step, from 1; dropout masks depend on it.
            learning_rate: of this step.
            stop: whether this rank wants to stop; told to all.
            before_update: called once gradients are there and the state is about to change.
            more: whether another step follows: what it needs first is sent for while the rest is updated. If then
                none follows after all, `synchronize` must be called.
            count_casts: whether casts to float8 count what they clip and flush.
            take_read: gives the checksum of the samples that this rank has read in this step, as many numbers on each.
        """
        train = self.config.train
        first_sample = self.data_rank * (train.global_batch // self.layout.grid.data)
        read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            if i not in read:
                if len(self.chunks) == 1:
                    read.clear()
                read[i] = batches(i)
            return read[i]

        def inputs(chunk: int, i: int, x: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
            x = batch(i)[0] if x is None else x
            return (x, batch(i)[1]) if self.chunks[chunk].last else (x,)

        def forward(chunk: int, i: int, x: torch.Tensor | None) -> torch.Tensor:
            first = first_sample + i * train.micro_batch
            where = ForwardContext(train.seed + step, first, self._token_gradient, token_loss=self._token_loss)
            return self._compute(chunk, inputs(chunk, i, x), where)

        self._weights_changed()
        for chunk in self.chunks:
            chunk.linears.count_casts(count_casts)
        self.data_parallel.begin_step()
        chunks = EagerChunks(forward)
        if self.graphs is not None:
            chunks = self.graphs.begin_step(forward, inputs, eagerly=count_casts or self.backward_apart)
        with torch.autograd.set_multithreading_enabled(self.backward_apart):
            loss = self.pipeline.run(chunks, self.data_parallel)
        if self.graphs is not None:
            self.graphs.end_step()
        recorder = self.runtime.recorder
        self.runtime.calls.at(b"reduce")
        recorder.begin_action(SpanKind.FINISH_REDUCTIONS)
        self.data_parallel.finish_reductions()
        recorder.end_action()
        self.runtime.calls.at(b"optimizer")
        if self.before_update:
            self.data_parallel.finish_tied()
        for look in tuple(self.before_update):
            look(step)
        # Only the last stage knows the loss, and each of its tensor-parallel ranks knows all of it.
        # Filled there: a copy from the host's memory would wait for the whole step before the optimizer is launched.
        read_checksum = take_read() if take_read is not None else ()
        piggybacked_scalars = torch.zeros(5 + len(read_checksum), dtype=torch.float64, device=self.device)
        piggybacked_scalars[1].fill_(float(stop))
        if loss is not None and self.tensor.rank == 0:
            piggybacked_scalars[0] += loss
        for chunk in self.chunks:
            if (counted := chunk.linears.cast_counts()) is not None:
                piggybacked_scalars[2:5] += counted
        for index, number in enumerate(read_checksum, 5):
            if number:  # ranks between the first and the last stage have read nothing
                piggybacked_scalars[index].fill_(number)
        recorder.begin_action(SpanKind.CHECKPOINT_STALL)
        before_update()
        recorder.end_action()
        self._weights_changed()  # what was made of them need not be there beside what the update needs
        self.data_parallel.parameters_change()
        # The next step's list begins with a gather: it is armed now, and its buckets leave as they are updated.
        updated = self.data_parallel.gather_under_update(self.pipeline.first_gather) if more else lambda shard: None
        recorder.begin_action(SpanKind.OPTIMIZER)
        norm, summed = self.optimizer.step(
            learning_rate, step, piggybacked_scalars, updated, self.data_parallel.finish_tied
        )
        self.data_parallel.end_update()
        recorder.end_action()
        assert summed is not None
        for look in self.after_update:
            look(step)
        return StepResult(summed[0], norm, summed[1], summed[2:5], summed[5:])

    def _compute(self, chunk: int, inputs: tuple[torch.Tensor, ...], where: ForwardContext) -> torch.Tensor:
        module = self.chunks[chunk]
        y: torch.Tensor = module(inputs[0], inputs[1] if module.last else None, where)
        return (y * (1 / self.tokens)).sum() if module.last else y

    def _compute_fixed(self, chunk: int, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """As every micro-batch is computed where there is no dropout."""
        return self._compute(
            chunk, inputs, ForwardContext(token_grad=self._token_gradient, token_loss=self._token_loss)
        )

    def synchronize(self) -> None:
        """Leave nothing under way: before the groups are shut down."""
        self.data_parallel.finish_gathers()

    # everything else --------------------------------------------------------------------------------------------

    @torch.no_grad()
    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Around whatever fills the master weights (a checkpoint, say); afterwards the weights in use are theirs.

        A gather under way would end while they are filled, and where master weights and weights in use are one memory
        (float64, float32) gloo writes this rank's own part once more: the old one. So none is when the body begins.
        """
        self.data_parallel.parameters_change()
        yield
        self.optimizer.copy_to_params()
        self._weights_changed()

    def _weights_changed(self) -> None:
        for chunk in self.chunks:
            chunk.linears.invalidate_weights()

    def gather_parameters(self) -> None:
        """Make all parameters whole on this rank, before anything but a training step uses them."""
        self.data_parallel.gather_full_parameters()

    @torch.no_grad()
    @with_own_kernels
    def sum_losses(self, inputs_SB: torch.Tensor, targets_SB: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of all tokens, a float64 scalar on every rank of this pipeline's world.

        inputs_SB, targets_SB: this data-parallel rank's [s, b]; targets of -100 count nothing. Collective: every
        rank must call it as often, with the same shapes.
        """

        def forward(chunk: int, i: int, x: torch.Tensor | None) -> torch.Tensor:
            module = self.chunks[chunk]
            return module(inputs_SB if x is None else x, targets_SB if module.last else None, EVALUATION)

        outputs = self.pipeline.run_forward(1, forward)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if outputs and self.tensor.rank == 0:
            total += outputs[0].sum(dtype=torch.float64)
        return all_reduce(total, self.world).wait()
