"""The seam of all linear layers: how their GEMMs are done, and when a weight's gradient is made.

Column-, row- and vocabulary-parallel layers (parallel/tensor.py, parallel/vocabulary.py) call nothing else. An
operand is a tuple of tensors of which the first is cut along the sequence and travels between tensor-parallel ranks, be
it in float8; scales that all ranks agree on are further tensors, those of rows lie within the first. What
`train.linear_precision` names is registered in LINEARS (and its name in config/parts.py): a subclass that does GEMMs
otherwise, or makes weight gradients later.
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


def register(name: str, made: Linears, about: str = "") -> None:
    """Let `train.linear_precision` be `name`; made(tensor axis) is called once a rank, before the first step."""
    LINEAR_PRECISIONS.register(name, LinearFacts(about))
    LINEARS.register(name, made)


def make_linears(name: str, axis: Axis) -> LinearPrecision:
    """What `train.linear_precision` names, for this rank; ConfigError with the names there are if it is none."""
    dispatch.note("linear layers", name if name != "default" else "GEMMs in the type of train.precision")
    return LINEARS[name](axis)
