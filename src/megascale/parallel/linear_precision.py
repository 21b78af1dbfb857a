"""How the GEMMs of a linear layer are done, and when a weight's gradient is made: what implementations start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from megascale.ops.gradient_sink import GradientSink, sink_of
from megascale.ops.linear import ComputeType, Gemms, Operand
from megascale.parallel.collectives import ALONE, Axis


class LinearPrecision(ComputeType):
    """GEMMs in the compute type, each weight's gradient made in its layer's backward. Others override what differs.

    Args:
        axis: the tensor-parallel axis: ranks that share a tensor must agree on its scale. It carries the runtime.

    Attributes:
        wants_amaxes: whether operators are to collect the largest magnitude of what they make (ops/known_amax.py).
    """

    wants_amaxes = False

    def __init__(self, axis: Axis = ALONE) -> None:
        self.axis = axis

    @property
    def logits(self) -> Gemms:
        """The GEMMs of the vocabulary's matrix, which may be more precise than all others."""
        return self

    def check(self, matrices: Mapping[str, Tensor], tokens: int, device: torch.device) -> None:
        """Before the first step: raises ConfigError or FitError where these weights [O, I] cannot be computed with.

        matrices: this rank's, by name. tokens: of a micro-batch, whole sequences.
        """

    def invalidate_weights(self) -> None:
        """What was made of weights is stale: an update, a checkpoint."""

    def prepare(self, weights: Iterable[Tensor]) -> None:
        """GEMMs with these weights follow from within an exchange, where ranks cannot agree on anything: what is made
        of the weights is made now."""

    def place_weights(self, weights: Iterable[Tensor]) -> None:
        """What is made of these weights, as they are since `weights_changed`, lies where it has always lain from now on
        until they change: CUDA graphs read it there."""

    def count_casts(self, on: bool) -> None:
        """Whether casts to a narrower type are counted from now on, from zero; it costs a share of their time."""

    def cast_counts(self) -> Tensor | None:
        """Since then: float64 [3] of this rank: numbers clipped, flushed to zero, looked at; None if not counted."""
        return None

    def gathered(self, x: Operand) -> Operand:
        """An operand whose first tensor has been gathered, as `accumulate` reads it."""
        return x

    def keep(self, x: Operand) -> Operand:
        """What backward needs of forward's operand: it is gathered once more, where tensor parallelism cut it."""
        return x

    def wgrad(
        self, weight: Tensor, dy: Operand, x: Operand | Callable[[], Operand], after: object = None
    ) -> Tensor | None:
        """dy [..., O], x [..., I] -> the gradient of weight [O, I], or None where its sink takes it.

        There it is added, or written where the sink holds nothing yet, on the side stream (ops/side_stream.py) from the
        event `after` on. x may be a function that waits. A layer whose weight gradient is made later calls
        `accumulate_gradient` later.
        """
        sink = sink_of(weight)
        if sink is None:
            wide = weight.new_empty(weight.shape, dtype=_accumulation_dtype(weight))
            self.accumulate(wide, dy, x if isinstance(x, tuple) else x(), True)
            return wide.to(weight.dtype)
        self.accumulate_gradient(sink, dy, x, after)
        return None

    def accumulate_gradient(
        self, sink: GradientSink, dy: Operand, x: Operand | Callable[[], Operand], after: object = None
    ) -> None:
        """Put a weight's gradient into its sink, and say so."""
        main, overwrite = sink.main_grad, sink.take_overwrite()
        work: Callable[[], None]
        if isinstance(x, tuple):
            work = partial(self.accumulate, main, dy, x, overwrite)
        else:
            work = lambda: self.accumulate(main, dy, x(), overwrite)
        self.axis.runtime.stream.run(work, after)
        sink.ready()


def _accumulation_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
