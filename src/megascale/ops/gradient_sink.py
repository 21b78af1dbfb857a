"""Gradient sinks: float32 buffers to which operators add a parameter's gradient instead of returning it to autograd.

In a training run a parameter has a sink, which holds a view of a float32 (or wider) gradient buffer. An operator adds
the parameter's gradient to the buffer, calls `GradientSink.ready`, and returns None to autograd. Autograd accumulates
the gradients of parameters without a sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn


def _ignore() -> None: ...


@dataclass(eq=False, slots=True)
class GradientSink:
    """The sink of one parameter.

    Attributes:
        main_grad: accumulated gradient with the parameter's shape, to which each micro-batch adds.
        ready: called after each addition to `main_grad`.
        should_overwrite: whether the next GEMM overwrites `main_grad` instead of adding to it, which saves zeroing it.
        is_gemm_gradient: whether a GEMM computes this gradient. Only a GEMM can overwrite `main_grad`.
        can_be_rounded: whether this GEMM can also overwrite memory of 16 bits (`Gemms.can_round_wgrad`).
        complete: called when a forward (ops/cross_entropy.py) has added a micro-batch's complete gradient. The backward
            calls `ready` later. None: not called.
        keep_rows: called with a micro-batch's tokens and the gradients of their rows, instead of an addition to the
            gradient of an embedding (parallel/embedding_rows.py). None: the backward adds them to `main_grad`.
        is_divided: whether the gradient exists for some rows at a time. It is then written by `write_rows` only.
    """

    main_grad: Tensor
    ready: Callable[[], None] = _ignore
    should_overwrite: bool = False
    is_gemm_gradient: bool = False
    can_be_rounded: bool = False
    complete: Callable[[], None] | None = None
    keep_rows: Callable[[Tensor, Tensor], None] | None = None
    is_divided: ClassVar[bool] = False

    def write_rows(self, is_overwritten: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, their gradients) for all rows of a matrix. The caller adds to each before it takes the next one.

        With `is_overwritten` the caller overwrites the gradients of a divided matrix, which then need no zeros. A
        gradient may be written several times per micro-batch, and all writes are summed.
        """
        yield slice(None), self.main_grad


class SinkParameter(nn.Parameter):
    """A parameter that may have a gradient sink. Without a sink (None) autograd accumulates its gradient."""

    gradient_sink: GradientSink | None = None


def attach(parameter: Tensor, sink: GradientSink) -> GradientSink:
    """Let operators add the parameter's gradient to `sink`. The parameter must be a `SinkParameter`."""
    _require_sink_parameter(parameter).gradient_sink = sink
    return sink


def detach(parameter: Tensor) -> None:
    """Remove the parameter's sink, so that autograd accumulates its gradient."""
    _require_sink_parameter(parameter).gradient_sink = None


def _require_sink_parameter(parameter: Tensor) -> SinkParameter:
    """Return the parameter. Raises TypeError if it cannot have a gradient sink."""
    if not isinstance(parameter, SinkParameter):
        raise TypeError(f"a gradient sink belongs to a SinkParameter, not to a {type(parameter).__name__}")
    return parameter


def get_sink(parameter: Tensor) -> GradientSink | None:
    """Return the parameter's sink, or None without one."""
    # isinstance would be slower, because torch implements it in Python for parameters.
    return getattr(parameter, "gradient_sink", None)


def get_tracked(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    """Return the parameter if autograd must track it as an input of an operator on x, else None.

    A parameter with a sink need not be tracked if x requires a gradient, because the backward for x also adds the
    parameter's gradient to the sink. This saves a node and a hook of autograd per micro-batch. The operator receives
    the parameter in an argument that is not a tensor.
    """
    if parameter is None or (x.requires_grad and getattr(parameter, "gradient_sink", None) is not None):
        return None
    return parameter


def get_main_grad(parameter: Tensor) -> Tensor | None:
    """Return the `main_grad` of the parameter's sink, or None without a sink or with a divided gradient."""
    sink: GradientSink | None = getattr(parameter, "gradient_sink", None)
    if sink is None or sink.is_divided:
        return None
    return sink.main_grad
