"""Registry of linear precisions: the values of `train.linear_precision`.

Column-, row- and vocabulary-parallel layers (parallel/tensor.py) run all their GEMMs through a `LinearPrecision`. An
`Operand` (ops/linear.py) holds a matrix and its scales: one that all ranks agree on, or scales of each row, which
travel with the rows between tensor-parallel ranks. A registered part is a subclass that runs GEMMs in another type.
Its name is in config/parts.py.
"""

from __future__ import annotations

from collections.abc import Callable

from megascale.config.parts import LINEAR_PRECISIONS, LinearFacts
from megascale.config.registry import Registry
from megascale.ops import dispatch
from megascale.parallel.collectives import Axis
from megascale.parallel.float8 import RowWiseFloat8, TensorWiseFloat8
from megascale.parallel.linear_precision import LinearPrecision

Linears = Callable[[Axis], LinearPrecision]
LINEARS: Registry[Linears] = Registry(
    LINEAR_PRECISIONS.key,
    {"default": LinearPrecision, "float8": TensorWiseFloat8, "float8_rowwise": RowWiseFloat8},
)
DEFAULT_PRECISION = LinearPrecision()


def register(name: str, factory: Linears, description: str = "") -> None:
    """Register `name` for `train.linear_precision`; factory(tensor axis) is called once per rank before training."""
    LINEAR_PRECISIONS.register(name, LinearFacts(description))
    LINEARS.register(name, factory)


def make_linears(name: str, axis: Axis) -> LinearPrecision:
    """Return this rank's linear precision `name`. Raises ConfigError with the registered names if it is unknown."""
    dispatch.record_choice("linear layers", name if name != "default" else "GEMMs in the type of train.precision")
    return LINEARS[name](axis)
