"""Forward of a rank's chunks for the micro-batches of a step: reads the micro-batch, and weighs the loss.

The first chunk of the model reads tokens, the last one targets and loss weights. If samples have positions or document
boundaries, all chunks read those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from megascale.core.batch import Batch, SampleFields
from megascale.core.layout import Layout
from megascale.model.context import ForwardContext
from megascale.model.transformer import Chunk
from megascale.ops import token_loss
from megascale.parallel.collectives import Axis
from megascale.parallel.context import slice_batch
from megascale.train.blank_batches import BlankBatches, ReadBatch, make_blank_batch
from megascale.train.expert_balance import ExpertBalance
from megascale.train.loss_weights import LossWeights


class ChunkForward:
    """Runs chunks for the micro-batches of a step.

    Args:
        chunks: this rank's chunks.
        first_sample: index in the global batch of the first sample of this rank's first micro-batch.
        dtype: type of activations.
        context_axis: ranks that divide the tokens of a sample.
        blank_batches: completes the micro-batches of a replica that reads fewer than others; None: all read as many.
        loss_weights: normalises loss weights; None without weights, and on stages without a loss.
        experts: balance of experts; None without experts.
        token_gradient: gradient of each token's loss, 0-d, if the loss computes its gradients in forward and samples
            have no weights; else None.
        weighs_in_forward: whether the loss computes its gradients in forward, and samples have weights.

    Attributes:
        keeps_batches: whether a micro-batch stays in memory until the step's end, because it is read several times.
    """

    def __init__(
        self,
        layout: Layout,
        chunks: Sequence[Chunk],
        fields: SampleFields,
        *,
        first_sample: int,
        dtype: torch.dtype,
        device: torch.device,
        context_axis: Axis,
        blank_batches: BlankBatches | None,
        loss_weights: LossWeights | None,
        experts: ExpertBalance | None,
        token_gradient: torch.Tensor | None,
        weighs_in_forward: bool,
    ) -> None:
        config = layout.config
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self.keeps_batches = len(chunks) > 1
        self._chunks = chunks
        self._fields = fields
        self._context_axis = context_axis
        self._blank_batches = blank_batches
        self._loss_weights = loss_weights
        self._experts = experts
        self._token_gradient = token_gradient
        self._weighs_in_forward = weighs_in_forward
        self._token_loss = token_loss.TOKEN_LOSSES[config.train.loss]
        self._tokens_per_step = layout.tokens_per_step
        self._micro_batch = config.train.micro_batch
        self._row_factor = config.kernels.expert_rows
        self._seed = config.train.seed
        # Dropout masks of a micro-batch depend on the step and on the micro-batch's first sample in the global batch.
        self._dropout_key = self._seed
        self._first_sample = first_sample
        self._read_batch: ReadBatch | None = None
        self._batches: dict[int, Batch[torch.Tensor]] = {}  # the micro-batches that were read, by number
        self._read_fields = [self._list_read_fields(chunk) for chunk in chunks]

    def begin_step(self, read_batch: ReadBatch, step: int, sum_weights: Callable[[], float] | None) -> None:
        """Set the micro-batches of a step, and start to sum their loss weights over the ranks.

        Args:
            sum_weights: returns the sum of the loss weights of these micro-batches, if they carry weights.
        """
        blanks = self._blank_batches
        if blanks is not None:
            read_batch = blanks.append_blanks(read_batch)
        if self._context_axis.size > 1:
            self._read_batch = lambda i: slice_batch(read_batch(i), self._context_axis)
        else:
            self._read_batch = read_batch
        self._dropout_key = self._seed + step
        if self._loss_weights is None:
            return
        if blanks is not None:
            local_sum = blanks.sum_weights(sum_weights)
        else:
            assert sum_weights is not None, "micro-batches carry loss weights"
            local_sum = sum_weights()
        self._loss_weights.begin_step(local_sum)

    def end_step(self) -> None:
        """Forget the step's micro-batches."""
        self._batches.clear()
        self._read_batch = None

    def read_first_micro_batch(self) -> Batch[torch.Tensor]:
        """Return the step's first micro-batch before the step runs; an empty one if this rank reads none of it."""
        reads = any(chunk.is_first or chunk.is_last for chunk in self._chunks) or self._fields.concerns_blocks
        if not reads:
            return Batch()
        if 0 not in self._batches:
            assert self._read_batch is not None
            self._batches[0] = self._read_batch(0)
        return self._batches[0]

    @contextmanager
    def replace_micro_batch(self, batch: Batch[torch.Tensor], first_sample: int) -> Iterator[None]:
        """Let the enclosed forwards of micro-batch 0 use `batch`, whose first sample has this index."""
        saved = self._first_sample, self._batches
        self._first_sample, self._batches = first_sample, {0: batch}
        try:
            yield
        finally:
            self._first_sample, self._batches = saved

    def run(self, chunk: int, i: int, x: torch.Tensor | None) -> torch.Tensor:
        """Run micro-batch `i` through `chunk`; x: the previous chunk's output, None for the model's first chunk."""
        if self._experts is not None and self._blank_batches is not None:
            self._experts.set_blank(i >= self._blank_batches.read_count)
        sample_start = self._first_sample + i * self._micro_batch
        context = ForwardContext(self._dropout_key, sample_start, self._token_gradient, token_loss=self._token_loss)
        return self._run_chunk(chunk, *self._take_inputs(chunk, i, x), context)

    def run_blank(self, chunk: int, x: torch.Tensor, batch: Batch[torch.Tensor]) -> torch.Tensor:
        """Run a micro-batch that belongs to no step through `chunk`."""
        context = ForwardContext(0, 0, self._token_gradient, token_loss=self._token_loss)
        return self._run_chunk(chunk, x, batch, context)

    def make_blank_batch(self) -> Batch[torch.Tensor]:
        """Return a micro-batch of zeros as this rank reads it."""
        sequence_length = self._layout.config.model.sequence_length
        return make_blank_batch(
            self._fields,
            length=sequence_length // self._context_axis.size,
            width=self._micro_batch,
            sequence_length=sequence_length,
            device=self._device,
        )

    def make_blank_activation(self) -> torch.Tensor:
        """Return an input of zeros for a chunk that is not the model's first one."""
        return torch.zeros(self._layout.activation_shape, dtype=self._dtype, device=self._device)

    def make_blank_graph_inputs(self, chunk: int) -> tuple[torch.Tensor, ...]:
        """Return tensors that a captured chunk can read, of a micro-batch that belongs to no step."""
        batch = self.make_blank_batch()
        if self._chunks[chunk].is_first:
            assert batch.tokens is not None
            x = batch.tokens
        else:
            x = self.make_blank_activation()
        return self.list_graph_inputs(chunk, x, batch)

    def take_graph_inputs(self, chunk: int, i: int, x: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a captured chunk reads: its input, and fields of micro-batch `i`."""
        x, batch = self._take_inputs(chunk, i, x)
        return self.list_graph_inputs(chunk, x, batch)

    def list_graph_inputs(
        self, chunk: int, x: torch.Tensor, batch: Batch[torch.Tensor] | None
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a captured chunk reads: its input x, and fields of the micro-batch."""
        inputs = [x]
        for name in self._read_fields[chunk]:
            inputs.append(getattr(batch, name))
        return tuple(inputs)

    def run_captured(self, chunk: int, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run a chunk in the way that a CUDA graph captures: the same for every micro-batch and step, no dropout.

        Args:
            inputs: as `take_graph_inputs` returns them.
        """
        context = ForwardContext(token_grad=self._token_gradient, token_loss=self._token_loss)
        x, *fields = inputs
        batch = Batch(**dict(zip(self._read_fields[chunk], fields, strict=True)))
        if self._experts is None:
            return self._run_chunk(chunk, x, batch, context)
        with self._experts.limit_rows(self._row_factor):
            return self._run_chunk(chunk, x, batch, context)

    def _take_inputs(
        self, chunk: int, i: int, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, Batch[torch.Tensor] | None]:
        """Return a chunk's input (`x`, or the tokens if x is None), and micro-batch `i` if the chunk reads its fields.

        A micro-batch is read when a forward first needs it. Without `keeps_batches` the previous one is dropped then.
        """
        is_last = self._chunks[chunk].is_last
        if x is not None and not is_last and not self._fields.concerns_blocks:
            return x, None
        if i not in self._batches:
            assert self._read_batch is not None
            if not self.keeps_batches:
                self._batches.clear()
            self._batches[i] = self._read_batch(i)
        batch = self._batches[i]
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
        module = self._chunks[chunk]
        if not module.is_last:
            return module(x, batch, context)
        if self._loss_weights is None:
            losses = module(x, batch, context)
            return (losses * (1 / self._tokens_per_step)).sum()
        assert batch is not None
        assert batch.loss_weights is not None
        weights_SB = self._loss_weights.normalise(batch.loss_weights)
        if self._weighs_in_forward:
            context = replace(context, token_grad=weights_SB)
        return (module(x, batch, context) * weights_SB).sum()

    def _list_read_fields(self, chunk: Chunk) -> list[str]:
        """Return the fields of a micro-batch that `chunk` reads, other than its tokens."""
        names = []
        if chunk.is_last:
            names.append("targets")
            if self._fields.loss_weights:
                names.append("loss_weights")
        if self._fields.positions:
            names.append("positions")
        if self._fields.max_documents:
            names.append("document_boundaries")
        return names
