"""Registry of linear precisions: the values of `train.linear_precision`.

Column-, row- and vocabulary-parallel layers (parallel/tensor.py) run all their GEMMs through a `LinearPrecision`. An
`Operand` (ops/linear.py) contains a matrix and its scales: either one scale, which all ranks agree on, or one scale per
row, which is sent with the row to other tensor-parallel ranks. A subclass runs GEMMs in another type; `register` adds
it under a name. Names and descriptions of the built-in ones are in config/parts.py.
"""

from __future__ import annotations

from collections.abc import Callable

from megascale.config.parts import LINEAR_PRECISIONS, LinearFacts
from megascale.config.registry import Registry
from megascale.ops import dispatch
from megascale.parallel.collectives import Axis
from megascale.parallel.float8 import RowWiseFloat8, RowWiseFloat8Wgrad, TensorWiseFloat8
from megascale.parallel.linear_precision import LinearPrecision

MakeLinearPrecision = Callable[[Axis], LinearPrecision]
LINEARS: Registry[MakeLinearPrecision] = Registry(
    LINEAR_PRECISIONS.key,
    {
        "default": LinearPrecision,
        "float8": TensorWiseFloat8,
        "float8_rowwise": RowWiseFloat8,
        "float8_rowwise_wgrad": RowWiseFloat8Wgrad,
    },
)
DEFAULT_PRECISION = LinearPrecision()


def register(name: str, factory: MakeLinearPrecision, description: str = "") -> None:
    """Register a linear precision, so that `train.linear_precision` can be `name`.

    Args:
        factory: returns the linear precision of a rank for its tensor axis; called once per rank before training.
        description: text for the configuration reference.
    """
    LINEAR_PRECISIONS.register(name, LinearFacts(description))
    LINEARS.register(name, factory)


def make_linears(name: str, axis: Axis) -> LinearPrecision:
    """Return this rank's linear precision `name`. Raises ConfigError with the registered names if it is unknown."""
    dispatch.record_choice("linear layers", name if name != "default" else "GEMMs in the type of train.precision")
    return LINEARS[name](axis)
