"""Where an operator puts a parameter's gradient, if not into autograd's hands.

A parameter of a training run has a sink: a view into a float32 (or wider) gradient buffer. An operator adds the
gradient there, says so, and hands autograd None. A parameter without a sink is autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def _unheard() -> None: ...


@dataclass(eq=False, slots=True)
class GradientSink:
    """One parameter's.

    Attributes:
        main: the gradient so far, of the parameter's shape; a micro-batch adds to it.
        ready: to be called when `main` has one more contribution.
        overwrite: `main` holds nothing yet: the next GEMM writes it and is not added to zeros, which saves making and
            reading them.
        by_gemm: whether a GEMM has made this gradient, and so could write it.
    """

    main_grad: Tensor
    ready: Callable[[], None] = _unheard
    overwrite: bool = False
    by_gemm: bool = False

    def take_overwrite(self) -> bool:
        """Whether the GEMM that asks writes `main`; the next one adds."""
        overwrite, self.overwrite, self.by_gemm = self.overwrite, False, True
        return overwrite


def attach(parameter: Tensor, sink: GradientSink) -> GradientSink:
    """Let operators put the parameter's gradient into `sink`."""
    parameter.gradient_sink = sink  # type: ignore[attr-defined]
    return sink


def detach(parameter: Tensor) -> None:
    """Give the parameter's gradient back to autograd."""
    del parameter.gradient_sink  # type: ignore[attr-defined]


def sink_of(parameter: Tensor) -> GradientSink | None:
    """The parameter's sink, None if it is autograd's."""
    return getattr(parameter, "gradient_sink", None)


def tracked(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    """The parameter, if autograd has to know that an operator of x reads it; None where its sink gets the gradient
    anyway, in the backward function that x's gradient is made in. Each parameter that autograd knows costs a node and
    a hook a micro-batch. An operator gets the parameter itself by another argument, which is no tensor.
    """
    return None if parameter is None or (x.requires_grad and sink_of(parameter) is not None) else parameter


def main_of(parameter: Tensor) -> Tensor | None:
    """Where the parameter's gradient is added, None if autograd has it."""
    sink = sink_of(parameter)
    return None if sink is None else sink.main_grad
