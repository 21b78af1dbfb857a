"""The seam of all linear layers: how their GEMMs are done, and when a weight's gradient is made.

Column-, row- and vocabulary-parallel layers (parallel/tensor.py, parallel/vocabulary.py) call nothing else. An
operand is a tuple of tensors of which the first is cut along the sequence and travels between tensor-parallel ranks, be
it in float8; scales that all ranks agree on are further tensors, those of rows lie within the first. What
`train.linear_precision` names is registered in LINEARS (and its name in config/parts.py): a subclass that does GEMMs
otherwise, or makes weight gradients later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megascale.config.parts import LINEAR_PRECISIONS, PartFacts
from megascale.config.registry import Registry
from megascale.ops import dispatch
from megascale.ops.gradient_sink import GradientSink, sink_of
from megascale.ops.linear import ComputeType, Gemms, Operand
from megascale.parallel.collectives import ALONE, Axis


class LinearPrecision(ComputeType):
    """GEMMs in the compute type, each weight's gradient made in its layer's backward. Others override what differs.

    Args:
        axis: the tensor-parallel axis: ranks that share a tensor must agree on its scale. It carries the runtime.
    """

    def __init__(self, axis: Axis = ALONE) -> None:
        self.axis = axis

    @property
    def logits(self) -> Gemms:
        """The GEMMs of the vocabulary's matrix, which may be more precise than all others."""
        return self

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
        main, overwrite = sink.main, sink.take_overwrite()
        work: Callable[[], None]
        if isinstance(x, tuple):
            work = partial(self.accumulate, main, dy, x, overwrite)
        else:
            work = lambda: self.accumulate(main, dy, x(), overwrite)
        self.axis.runtime.stream.run(work, after)
        sink.ready()


def _accumulation_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


Linears = Callable[[Axis], LinearPrecision]
LINEARS: Registry[Linears] = Registry(LINEAR_PRECISIONS.key, {"default": LinearPrecision})
PLAIN = LinearPrecision()


def register(name: str, made: Linears, about: str = "") -> None:
    """Let `train.linear_precision` be `name`; made(tensor axis) is called once a rank, before the first step."""
    LINEAR_PRECISIONS.register(name, PartFacts(about))
    LINEARS.register(name, made)


def make_linears(name: str, axis: Axis) -> LinearPrecision:
    """What `train.linear_precision` names, for this rank; ConfigError with the names there are if it is none."""
    made = LINEARS[name](axis)
    dispatch.note("linear layers", name if name != "default" else "GEMMs in the type of train.precision")
    return made
