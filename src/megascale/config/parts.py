"""The parts that settings name, of a model and of what a run tells, with the facts about them that need no torch.

What runs stands under the same name in a registry beside the code: ops/activation.py, model/norm.py,
model/attention.py, model/mlp.py, model/block.py, parallel/linear.py, observe/metrics.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megascale.config.registry import Registry


@dataclass(frozen=True)
class ActivationFacts:
    """gated: whether it takes two input projections, [gate | up], and gives one."""

    gated: bool = False


@dataclass(frozen=True)
class NormFacts:
    """bias: whether it has one beside its weight, and takes the mean away."""

    bias: bool


@dataclass(frozen=True)
class PartFacts:
    """about: one line for people."""

    about: str


@dataclass(frozen=True)
class SinkFacts:
    """about: one line for people; address: what stands behind its name, as in NAME=ADDRESS; "" if nothing need."""

    about: str
    address: str = ""


@dataclass(frozen=True)
class LinearFacts:
    """What `train.linear_precision` means for memory and speed.

    Attributes:
        about: one line for people.
        kept: bytes an element of the copy of a GEMM's input that backward keeps; None: the input itself.
        copies: bytes an element of what is made of weights once a step.
        float8: which GEMMs of a layer are in float8.
        gathered: bytes an element that data-parallel ranks can send of weights instead of those; None: they cannot.
    """

    about: str
    kept: int | None = None
    copies: int = 0
    float8: Literal["none", "all", "all but weight gradients"] = "none"
    gathered: int | None = None


MODEL = "megascale.model"  # where a module may stand that registers a part of its name (registry.py)


class SpanSinks(Registry[SinkFacts]):
    """The span sinks, given as NAME or NAME=ADDRESS."""

    def check_given(self, given: str) -> str:
        """`given`, if it is the name of a sink with the address that it needs; as a validator of the setting."""
        name, _, address = given.partition("=")
        facts = self[self.validate_name(name)]
        if facts.address and not address:
            raise ValueError(f"{self.key}={given!r} needs an address: {name}={facts.address}")
        if "@" in address:
            raise ValueError(
                f"{self.key}: the address of {name} holds a user or password, which would lie in the run folder; "
                "give them in the environment (docs/observe.md)"
            )
        return given


ACTIVATIONS: Registry[ActivationFacts] = Registry(
    "model.activation",
    {"gelu": ActivationFacts(), "gelu_tanh": ActivationFacts(), "swiglu": ActivationFacts(gated=True)},
    home="megascale.ops",
)
NORMS: Registry[NormFacts] = Registry(
    "model.norm", {"layernorm": NormFacts(bias=True), "rmsnorm": NormFacts(bias=False)}, home=MODEL
)
ATTENTIONS: Registry[PartFacts] = Registry(
    "model.attention", {"causal": PartFacts("grouped queries, full or in a sliding window")}, home=MODEL
)
MLPS: Registry[PartFacts] = Registry(
    "model.mlp", {"dense": PartFacts("one or (gated) two matrices in, one out")}, home=MODEL
)
BLOCKS: Registry[PartFacts] = Registry(
    "model.block",
    {
        "serial": PartFacts("x + MLP(LN(x + Attn(LN x)))"),
        "parallel": PartFacts("x + Attn(LN x) + MLP(LN x)"),
    },
    home=MODEL,
)
LINEAR_PRECISIONS: Registry[LinearFacts] = Registry(
    "train.linear_precision",
    {
        "default": LinearFacts("GEMMs in the type of train.precision"),
        "float8": LinearFacts(
            "float8 with one scale a matrix; embedding and logits as without",
            kept=1,
            copies=2,
            float8="all",
            gathered=1,
        ),
        "float8_rowwise": LinearFacts(
            "float8 with a scale a row; weight gradients as without", copies=2, float8="all but weight gradients"
        ),
    },
    home="megascale.parallel",
)

SPAN_SINKS = SpanSinks(
    "observe.span_sinks",
    {
        "parquet": SinkFacts("Parquet files beside the spool, for DuckDB"),
        "clickhouse": SinkFacts("a ClickHouse server", "http://HOST:8123/DATABASE"),
        "kafka": SinkFacts("topics of Kafka, rows as JSON", "HOST:9092"),
    },
    home="megascale.observe.store",
)
LOSSES: Registry[PartFacts] = Registry(
    "train.loss", {"cross_entropy": PartFacts("of the next token, natural logarithm")}, home="megascale.ops"
)
CALLBACKS: Registry[PartFacts] = Registry("train.callbacks", {}, home="megascale.train")
SINKS: Registry[PartFacts] = Registry(
    "observe.sinks",
    {"tensorboard": PartFacts("scalars for TensorBoard"), "wandb": PartFacts("Weights & Biases, under the run's name")},
    home="megascale.observe",
)

# Those of a model, by the setting that names them.
PARTS: dict[str, Registry[Any]] = {
    registry.key: registry for registry in (ACTIVATIONS, NORMS, ATTENTIONS, MLPS, BLOCKS, LINEAR_PRECISIONS)
}
