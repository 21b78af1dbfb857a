"""Parts of a model, of training and of its output that settings name, with their facts that need no torch.

The implementation of each part stands under the same name in a registry next to the code: ops/activation.py,
model/norm.py, model/attention.py, model/mlp.py, model/block.py, parallel/linear.py, optim/rules.py,
optim/learning_rate.py, observe/metrics.py.
Memory, checkpoints and resuming derive from the facts of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megascale.config.registry import Registry

MODEL_PACKAGE = "megascale.model"  # home of modules that register a part of the model


@dataclass(frozen=True)
class ActivationFacts:
    """Facts of an activation.

    Attributes:
        gated: whether it takes two input projections, [gate | up], and returns one.
    """

    gated: bool = False


@dataclass(frozen=True)
class NormFacts:
    """Facts of a norm.

    Attributes:
        bias: whether it has a bias; such a norm subtracts the mean.
        subtracts_mean: whether a norm without bias does.
        initial_weight: value of the weight that leaves the normed input as it is.
    """

    bias: bool
    subtracts_mean: bool = False
    initial_weight: float = 1.0

    @property
    def moments(self) -> int:
        """Statistics per token that it saves."""
        if self.bias or self.subtracts_mean:
            return 2
        return 1


@dataclass(frozen=True)
class PartFacts:
    """Facts of another part: its description, one line for people."""

    description: str


@dataclass(frozen=True)
class AttentionFacts(PartFacts):
    """Facts of an attention.

    Attributes:
        masks_documents: whether it keeps to `ForwardContext.documents`; samples with documents are refused otherwise.
        bounds_scores: whether it applies `AttentionSpec.softcap`; model.attention_softcap is refused otherwise.
        divides_tokens: whether it attends over the tokens of all context ranks; parallel.context above 1 is refused
            otherwise.
    """

    masks_documents: bool = False
    bounds_scores: bool = False
    divides_tokens: bool = False


@dataclass(frozen=True)
class SinkFacts:
    """Facts of a span sink.

    Attributes:
        description: one line for people.
        address_format: form of the address in NAME=ADDRESS; "" if the sink needs none.
    """

    description: str
    address_format: str = ""


@dataclass(frozen=True)
class LinearFacts:
    """Effects of a `train.linear_precision` on memory and speed.

    Attributes:
        description: one line for people.
        saved_input_bytes: bytes per element of the copy of a GEMM's input that backward saves; None: the input itself.
        weight_copy_bytes: bytes per element of the copies of weights that are made once per step.
        float8_gemms: GEMMs of a layer that run in float8.
        gathered_weight_bytes: bytes per element in which data-parallel ranks can send weights; None: only as weights.
    """

    description: str
    saved_input_bytes: int | None = None
    weight_copy_bytes: int = 0
    float8_gemms: Literal["none", "all", "all but weight gradients"] = "none"
    gathered_weight_bytes: int | None = None


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts of an optimizer.

    Attributes:
        state_names: maps (logical name, shape) to the names of the state tensors for this tensor. Each is as large as
            the tensor and zero before the first step.
        own_settings: keys of [optimizer] that only this optimizer reads.
        default_peak: its own default of lr.peak; None: the general default.
        has_matrix_norms: whether the update of a matrix depends on its norm, so that stacked matrices are told apart.
        communicates: whether the update communicates with the ranks that share the state of a stage.
    """

    state_names: Callable[[str, tuple[int, ...]], tuple[str, ...]]
    own_settings: tuple[str, ...] = ()
    default_peak: float | None = None
    has_matrix_norms: bool = False
    communicates: bool = True


@dataclass(frozen=True)
class LrScheduleFacts:
    """Facts of a learning-rate schedule.

    Attributes:
        description: one line for people.
        own_settings: keys of [lr] that only this schedule reads.
    """

    description: str
    own_settings: tuple[str, ...] = ()


class SpanSinks(Registry[SinkFacts]):
    """Registry of span sinks, which a setting names as NAME or NAME=ADDRESS."""

    def validate_setting(self, setting: str) -> str:
        """Return `setting` if it names a sink with the address that it needs. Raises ValueError otherwise."""
        name, _, address = setting.partition("=")
        facts = self[self.validate_name(name)]
        if facts.address_format and not address:
            raise ValueError(f"{self.key}={setting!r} needs an address: {name}={facts.address_format}")
        if "@" in address:
            raise ValueError(
                f"{self.key}: the address of {name} holds a user or password, which the run folder would reveal; "
                "set them in the environment (docs/observe.md)"
            )
        return setting


# Half of the best value in dev/reports/convergence.md, which costs 0.05 to 0.16 of loss: those runs were short.
LAMB_PEAK = 5e-3
MOMENTS = ("exp_avg", "exp_avg_sq")


def _moment_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return MOMENTS


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a logical tensor is a matrix, or a stack of matrices, of a layer, not of embedding or output.

    Biases of experts are stacked vectors.
    """
    return name.startswith("layers.") and len(shape) >= 2 and not name.endswith(".bias")


def _muon_state_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    if is_hidden_matrix(name, shape):
        return ("momentum",)
    return MOMENTS


OPTIMIZERS: Registry[OptimizerFacts] = Registry(
    "optimizer.name",
    {
        "adamw": OptimizerFacts(_moment_names, communicates=False),
        "lamb": OptimizerFacts(_moment_names, ("trust_min", "trust_max", "lamb_bias_correction"), LAMB_PEAK, True),
        "muon": OptimizerFacts(_muon_state_names, ("muon_momentum", "muon_nesterov", "muon_steps", "muon_rms")),
    },
    home="megascale.optim",
)

LR_SCHEDULES: Registry[LrScheduleFacts] = Registry(
    "lr.schedule",
    {
        "cosine": LrScheduleFacts("half a cosine from peak to min"),
        "linear": LrScheduleFacts("a straight line from peak to min"),
        "wsd": LrScheduleFacts(
            "warm-up, stable, decay: peak until the last lr.decay_fraction of the steps",
            ("decay_fraction", "decay_shape"),
        ),
        "constant": LrScheduleFacts("peak"),
        "inverse_sqrt": LrScheduleFacts("peak * sqrt(warmup_steps / step), at least min"),
    },
    home="megascale.optim",
)

ACTIVATIONS: Registry[ActivationFacts] = Registry(
    "model.activation",
    {
        "gelu": ActivationFacts(),
        "gelu_tanh": ActivationFacts(),
        "swiglu": ActivationFacts(gated=True),
        "geglu_tanh": ActivationFacts(gated=True),
        "swiglu_clamped": ActivationFacts(gated=True),
    },
    home="megascale.ops",
)
NORMS: Registry[NormFacts] = Registry(
    "model.norm",
    {
        "layernorm": NormFacts(bias=True),
        "layernorm_no_bias": NormFacts(bias=False, subtracts_mean=True),
        "rmsnorm": NormFacts(bias=False),
        "rmsnorm_zero_centred": NormFacts(bias=False, initial_weight=0.0),
    },
    home=MODEL_PACKAGE,
)
ATTENTIONS: Registry[AttentionFacts] = Registry(
    "model.attention",
    {
        "causal": AttentionFacts(
            "causal, grouped queries, full or in a sliding window",
            masks_documents=True,
            bounds_scores=True,
            divides_tokens=True,
        )
    },
    home=MODEL_PACKAGE,
)
MLPS: Registry[PartFacts] = Registry(
    "model.mlp",
    {
        "dense": PartFacts("one input projection (gated: two), one output projection"),
        "experts": PartFacts("mixture of experts, of which each token passes a few"),
    },
    home=MODEL_PACKAGE,
)
BLOCKS: Registry[PartFacts] = Registry(
    "model.block",
    {
        "serial": PartFacts("x + MLP(LN(x + Attn(LN x)))"),
        "parallel": PartFacts("x + Attn(LN x) + MLP(LN x)"),
    },
    home=MODEL_PACKAGE,
)
LINEAR_PRECISIONS: Registry[LinearFacts] = Registry(
    "train.linear_precision",
    {
        "default": LinearFacts("GEMMs in the type of train.precision"),
        "float8": LinearFacts(
            "float8 with one scale per matrix; embedding and logits in train.precision",
            saved_input_bytes=1,
            weight_copy_bytes=2,
            float8_gemms="all",
            gathered_weight_bytes=1,
        ),
        "float8_rowwise": LinearFacts(
            "float8 with one scale per row; weight gradients in train.precision",
            weight_copy_bytes=2,
            float8_gemms="all but weight gradients",
        ),
    },
    home="megascale.parallel",
)

SPAN_SINKS = SpanSinks(
    "observe.span_sinks",
    {
        "parquet": SinkFacts("Parquet files next to the spool, for DuckDB"),
        "clickhouse": SinkFacts("a ClickHouse server", "http://HOST:8123/DATABASE"),
        "kafka": SinkFacts("Kafka topics with rows as JSON", "HOST:9092"),
    },
    home="megascale.observe.store",
)
LOSSES: Registry[PartFacts] = Registry(
    "train.loss",
    {"cross_entropy": PartFacts("cross-entropy of the next token, in nats")},
    home="megascale.ops",
)
CALLBACKS: Registry[PartFacts] = Registry("train.callbacks", {}, home="megascale.train")
SINKS: Registry[PartFacts] = Registry(
    "observe.sinks",
    {"tensorboard": PartFacts("scalars for TensorBoard"), "wandb": PartFacts("Weights & Biases, under the run's name")},
    home="megascale.observe",
)

# Parts of a model, by their setting.
MODEL_PARTS: dict[str, Registry[Any]] = {
    registry.key: registry for registry in (ACTIVATIONS, NORMS, ATTENTIONS, MLPS, BLOCKS, LINEAR_PRECISIONS)
}
