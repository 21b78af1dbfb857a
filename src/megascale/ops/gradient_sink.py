"""Gradient sinks: float32 buffers to which operators add a parameter's gradient instead of returning it to autograd.

A parameter of a training run has a sink, a view of a float32 (or wider) gradient buffer. An operator adds the gradient
there, notifies the sink, and returns None to autograd. Autograd accumulates the gradients of all other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


def _ignore() -> None: ...


@dataclass(eq=False, slots=True)
class GradientSink:
    """The sink of one parameter.

    Attributes:
        main_grad: the accumulated gradient, of the parameter's shape; each micro-batch adds to it.
        ready: called after each addition to `main_grad`.
        overwrite: the next GEMM overwrites `main_grad` instead of adding, which saves zeroing and reading it.
        by_gemm: whether a GEMM has computed this gradient, and so could overwrite it.
        complete: called, if set, once a forward has written a micro-batch's whole gradient; `ready` follows later.
    """

    main_grad: Tensor
    ready: Callable[[], None] = _ignore
    overwrite: bool = False
    by_gemm: bool = False
    complete: Callable[[], None] | None = None


class SinkParameter(nn.Parameter):
    """A parameter whose gradient operators may add to a sink; None: autograd accumulates it."""

    gradient_sink: GradientSink | None = None


def attach(parameter: Tensor, sink: GradientSink) -> GradientSink:
    """Let operators add the parameter's gradient to `sink`; the parameter must be a `SinkParameter`."""
    assert isinstance(parameter, SinkParameter), type(parameter)
    parameter.gradient_sink = sink
    return sink


def detach(parameter: Tensor) -> None:
    """Remove the parameter's sink, so that autograd accumulates its gradient."""
    assert isinstance(parameter, SinkParameter), type(parameter)
    parameter.gradient_sink = None


def sink_of(parameter: Tensor) -> GradientSink | None:
    """Return the parameter's sink, or None without one."""
    # Not isinstance, which torch answers for parameters in Python: this runs for each operator of a micro-batch.
    return getattr(parameter, "gradient_sink", None)


def tracked(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    """Return the parameter if autograd must track it as an input of an operator on x, else None.

    With a sink, the backward that computes x's gradient handles the parameter's gradient too. Each tracked parameter
    costs a node and a hook per micro-batch. Operators get untracked parameters through a non-tensor argument.
    """
    if parameter is None or (x.requires_grad and getattr(parameter, "gradient_sink", None) is not None):
        return None
    return parameter


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """Return the buffer of the parameter's gradient, or None without a sink."""
    sink: GradientSink | None = getattr(parameter, "gradient_sink", None)
    return None if sink is None else sink.main_grad
