"""Base class of linear precisions: how the GEMMs of a linear layer run, and when a weight's gradient is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from megascale.core.adapters import AdapterSpec
from megascale.ops.expert_gemms import DEFAULT_EXPERT_GEMMS, ExpertGemms
from megascale.ops.gradient_sink import GradientSink
from megascale.ops.linear import Gemms, Operand
from megascale.parallel.collectives import SINGLE_RANK, Axis


class LinearPrecision(Gemms):
    """GEMMs in the type of train.precision. Subclasses override this for other types.

    Args:
        axis: the tensor-parallel axis, whose ranks agree on the scales of shared tensors. It also has the runtime.

    Attributes:
        collects_amax: whether operators collect the amax of their outputs (ops/amax.py).
        copies_weights: whether GEMMs read copies of weights, which are made once per step (`pin_weights`).
        adapters: low-rank adapters of the layers that use this precision; None if the layers themselves are trained.
    """

    collects_amax = False
    copies_weights = False
    adapters: AdapterSpec | None = None

    def __init__(self, axis: Axis = SINGLE_RANK) -> None:
        self.axis = axis

    @property
    def expert_gemms(self) -> ExpertGemms:
        """GEMMs of experts' rows in this precision."""
        return DEFAULT_EXPERT_GEMMS

    @property
    def logits(self) -> Gemms:
        """GEMMs of the vocabulary's matrix, which may be more precise than all others."""
        return self

    def check(self, matrices: Mapping[str, Tensor], tokens: int, device: torch.device) -> None:
        """Check before the first step that GEMMs with these weights are possible.

        Args:
            matrices: this rank's weights [O, I] by name.
            tokens: number of tokens of a micro-batch, in complete sequences.

        Raises ConfigError or FitError if they are not possible.
        """

    def check_experts(self, stacks: Mapping[str, Tensor], device: torch.device) -> None:
        """Check before the first step that `expert_gemms` can multiply by these stacks.

        Args:
            stacks: matrices of this rank's experts [experts, ..., I] by name.

        Raises ConfigError or FitError if that is not possible.
        """

    def invalidate_weights(self) -> None:
        """Drop values derived from weights, because an update or a checkpoint changes the weights."""

    def prepare_weights(self, weights: Iterable[Tensor]) -> None:
        """Derive values from these weights now: the next GEMMs run within a call of an exchange.

        Within the call, ranks cannot start another one to agree on scales.
        """

    def pin_weights(self, weights: Iterable[Tensor]) -> None:
        """Write values derived from these weights into the memory that CUDA graphs read, until the weights change."""

    def reserve_pinned_weights(self, weights: Iterable[Tensor]) -> None:
        """Let the next GEMMs read the memory that CUDA graphs read, before the weights have arrived.

        The results of these GEMMs are undefined. Call `invalidate_weights` after them.
        """

    def count_casts(self, on: bool) -> None:
        """Count casts to a narrower type from zero if `on`, else stop counting. Counting makes casts slower."""

    def get_cast_counts(self) -> Tensor | None:
        """Return how many values this rank clipped, flushed to zero and cast, float64 [3]; None if not counted."""
        return None

    def prepare_recomputed(self, x: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        """Return a recomputed input in the form that the weight's gradient reads, or that is gathered for it."""
        operand = self.prepare_input(x, weight, None, for_gather)
        return operand if operand.wgrad is None else operand.wgrad

    def prepare_gathered_gradient(self, dy: Operand) -> Operand:
        """Return gathered rows of a gradient in the form that `dgrad` reads. They were prepared with `for_gather`."""
        return dy

    def finish_gather(self, x: Operand) -> Operand:
        """Return a gathered operand in the form that `accumulate_wgrad` reads."""
        return x

    def wgrad(
        self, weight: Tensor, dy: Operand, x: Operand | Callable[[], Operand], after: object = None
    ) -> Tensor | None:
        """Compute the gradient of weight [O, I] from dy [..., O] and x [..., I].

        If the weight has a gradient sink, the gradient is added there, or is queued (weight_gradients.py).

        Args:
            x: the operand, or a function that waits for the operand and returns it.
            after: event after which the side stream (ops/side_stream.py) may compute the gradient.

        Returns:
            The gradient; None if the sink takes it or the weight is not trained.
        """
        if dy.wgrad is not None:
            dy = dy.wgrad
        sink: GradientSink | None = getattr(weight, "gradient_sink", None)
        if sink is not None:
            self.accumulate_gradient(sink, dy, x, after)
            return None
        if not weight.requires_grad:
            return None
        main_grad = weight.new_empty(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32))
        self.accumulate_wgrad(main_grad, dy, x if isinstance(x, tuple) else x(), overwrite=True)
        return main_grad.to(weight.dtype)

    def accumulate_gradient(
        self, sink: GradientSink, dy: Operand, x: Operand | Callable[[], Operand], after: object = None
    ) -> None:
        """Add a weight's gradient to its sink on the side stream, and notify the sink.

        While the runtime's queue is deferring, queue this work instead.
        """
        runtime = self.axis.runtime
        if runtime.weight_gradients.is_deferring:
            operand = x if isinstance(x, tuple) else x()
            runtime.weight_gradients.add(partial(self.accumulate_gradient, sink, dy, operand), dy, operand)
            return
        main_grad = sink.main_grad
        overwrite = sink.should_overwrite
        sink.should_overwrite = False  # the next GEMM adds to the gradient
        sink.is_gemm_gradient = True
        sink.can_be_rounded = self.can_round_wgrad
        work: Callable[[], None]
        if isinstance(x, tuple):
            work = partial(self.accumulate_wgrad, main_grad, dy, x, overwrite)
        else:
            work = lambda: self.accumulate_wgrad(main_grad, dy, x(), overwrite)
        runtime.stream.run(work, after)
        sink.ready()
