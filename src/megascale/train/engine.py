"""The training engine of one rank: a training step, and the loss of held-out batches.

`Engine.step` is forward and backward over all micro-batches, then the update. The parts that it runs are made in
engine_parts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.distributed import ReduceOp

from megascale.core.batch import Batch
from megascale.core.spans import SpanKind
from megascale.model.context import EVALUATION
from megascale.optim.update_hold import UpdateHold
from megascale.parallel.buffers import FlatShard
from megascale.parallel.collectives import all_reduce
from megascale.parallel.context import slice_batch
from megascale.parallel.exchange import Exchange
from megascale.parallel.launch_times import MeasuredRunner
from megascale.parallel.pipeline import EagerRunner
from megascale.train.blank_batches import ReadBatch
from megascale.train.engine_parts import EngineParts, with_engine_kernels
from megascale.train.step_result import HOLD_INDEX, StepResult, StepScalars


class Engine(EngineParts):
    """Runs the training steps of this rank on its parts."""

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

    def _run_micro_batches(self, count_casts: bool, eagerly: bool = False) -> torch.Tensor | None:
        """Run the pipeline's forwards and backwards. Return the sum of the losses on the last stage, else None."""
        self.mark_weights_changed()
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
        self.mark_weights_changed()  # frees float8 copies of the weights before the update needs memory
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

    # peers ------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the gathers that have begun. Call it before the groups are shut down."""
        self.data_parallel.finish_gathers()

    def check_peers(self) -> None:
        """Raise TrainingError if a peer of an exchange has died or hangs: the results of this step are then undefined.

        Call it after the step's results have been read from the device and before they are used.
        """
        for exchange in self.list_exchanges():
            exchange.check()

    def close(self, failed: bool = False) -> None:
        """Stop watching the peers of exchanges. Unless `failed`, the peers regard the end of this rank as planned."""
        for exchange in self.list_exchanges():
            exchange.close(failed)

    def count_exchange_bytes(self) -> int:
        """Return the bytes of exchanges between GPUs and of mapped slots, which torch's memory statistics omit."""
        return self.mapped_bytes + sum(exchange.memory_bytes for exchange in self.list_exchanges())

    def list_exchanges(self) -> list[Exchange]:
        """Return the exchanges between GPUs that are in use."""
        axes = (self.tensor_axis, self._context_axis, self._expert_axis)
        exchanges = [axis.exchange for axis in axes] + [self.gather_exchange, self.reduction_exchange]
        return [exchange for exchange in exchanges if exchange is not None]

    def hold_updates(self, hold: UpdateHold) -> None:
        """Let `hold` keep updates from changing the state, also once an exchange has ended waits for a lost peer."""
        self.optimizer.update_hold = hold
        for exchange in self.list_exchanges():
            exchange.call_on_failure(hold.request)

    def set_start_step(self, step: int) -> None:
        """Set the step whose state the optimizer has. Call it before the first step of a start."""
        self.begun_update = self.ended_update = step
        if self.optimizer.update_hold is not None:
            self.optimizer.update_hold.set_step(step)

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
        self.mark_weights_changed()

    def mark_weights_changed(self) -> None:
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
