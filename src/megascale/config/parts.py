"""Registries of the parts that settings name: activations, norms, optimizers, losses, span sinks and others.

An entry holds the facts of a part that can be known without torch. A second registry next to the code has the
implementation under the same name: ops/activation.py, model/norm.py, model/attention.py, model/mlp.py, model/block.py,
parallel/linear.py, optim/rules.py, optim/learning_rate.py or observe/metrics.py. `home` is the package of these
modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megascale.config.registry import Registry

MODEL_PACKAGE = "megascale.model"


@dataclass(frozen=True)
class ActivationFacts:
    """Facts of an activation.

    Attributes:
        gated: whether the activation takes two projections of the input, [gate | up], and returns one tensor of half
            the width.
    """

    gated: bool = False


@dataclass(frozen=True)
class NormFacts:
    """Facts of a norm.

    Attributes:
        bias: whether the norm has a bias. A norm with a bias always subtracts the mean.
        subtracts_mean: whether a norm without a bias subtracts the mean.
        initial_weight: value of the weight that leaves the normed input as it is.
    """

    bias: bool
    subtracts_mean: bool = False
    initial_weight: float = 1.0

    @property
    def moments(self) -> int:
        """Number of statistics per token that forward saves for backward: mean and deviation, or root mean square."""
        if self.bias or self.subtracts_mean:
            return 2
        return 1


@dataclass(frozen=True)
class PartFacts:
    """Facts of a part: at least a description of one line, which commands print."""

    description: str


@dataclass(frozen=True)
class AttentionFacts(PartFacts):
    """Facts of an attention.

    Attributes:
        masks_documents: whether attention stays within `ForwardContext.documents`; if not, samples with documents are
            refused.
        bounds_scores: whether attention applies `AttentionSpec.softcap`; if not, model.attention_softcap is refused.
        divides_tokens: whether queries attend over the tokens of all context ranks; if not, parallel.context above 1 is
            refused.
    """

    masks_documents: bool = False
    bounds_scores: bool = False
    divides_tokens: bool = False


@dataclass(frozen=True)
class SinkFacts:
    """Facts of a span sink.

    Attributes:
        description: description of one line, which commands print.
        address_format: form of ADDRESS in NAME=ADDRESS; "" if the sink needs no address.
    """

    description: str
    address_format: str = ""


@dataclass(frozen=True)
class LinearFacts:
    """Effects of a `train.linear_precision` on memory and speed.

    Attributes:
        description: description of one line, which commands print.
        saved_input_bytes: bytes per element of the copy of a GEMM's input that forward saves for backward; None:
            forward saves the input itself.
        weight_copy_bytes: bytes per element of all quantised copies of a weight, which are made once per step.
        float8_gemms: GEMMs of a layer that run in float8.
        gathered_weight_bytes: bytes per element of quantised weights that data-parallel ranks can gather; None: they
            can gather weights in train.precision only.
        has_expert_gemms: whether layers of experts are possible.
    """

    description: str
    saved_input_bytes: int | None = None
    weight_copy_bytes: int = 0
    float8_gemms: Literal["none", "all", "all but weight gradients"] = "none"
    gathered_weight_bytes: int | None = None
    has_expert_gemms: bool = False


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts of an optimizer.

    Attributes:
        state_names: function of a parameter's logical name and shape that returns the names of its state tensors. Each
            state tensor is as large as the parameter and zero before the first step.
        own_settings: keys of [optimizer] that only this optimizer reads.
        default_peak: default of lr.peak with this optimizer; None: the default in [lr].
        has_matrix_norms: whether the update of a matrix depends on its norm, so that matrices stacked in one tensor
            need one norm each.
        communicates: whether the update needs collectives between the ranks that share the state of a pipeline stage.
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
        description: description of one line, which commands print.
        own_settings: keys of [lr] that only this schedule reads.
    """

    description: str
    own_settings: tuple[str, ...] = ()


class SpanSinks(Registry[SinkFacts]):
    """Registry of span sinks, which a setting names as NAME or NAME=ADDRESS."""

    def validate_setting(self, setting: str) -> str:
        """Return `setting` if it names a sink, with an address if the sink needs one. Raises ValueError otherwise."""
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


# Default of lr.peak with LAMB. The best peak of the short runs in dev/reports/convergence.md is 1e-2. Half of it leaves
# a margin for longer runs, although it raised the held-out loss of the short runs by 0.05 to 0.16.
LAMB_PEAK = 5e-3
MOMENTS = ("exp_avg", "exp_avg_sq")  # names of Adam's state tensors


def _moment_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return MOMENTS


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a logical tensor is a matrix, or a stack of matrices, of a layer.

    Embedding and output matrices do not count, nor do the stacked bias vectors of experts.
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
        "lamb": OptimizerFacts(
            _moment_names,
            own_settings=("trust_min", "trust_max", "lamb_bias_correction"),
            default_peak=LAMB_PEAK,
            has_matrix_norms=True,
        ),
        "muon": OptimizerFacts(
            _muon_state_names, own_settings=("muon_momentum", "muon_nesterov", "muon_steps", "muon_rms")
        ),
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
            own_settings=("decay_fraction", "decay_shape"),
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
        "experts": PartFacts("mixture of experts: each token passes a few of them"),
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
        "default": LinearFacts("GEMMs in the type of train.precision", has_expert_gemms=True),
        "float8": LinearFacts(
            "float8 with one scale per matrix; embedding and logits in train.precision",
            saved_input_bytes=1,
            weight_copy_bytes=2,
            float8_gemms="all",
            gathered_weight_bytes=1,
            has_expert_gemms=True,
        ),
        "float8_rowwise": LinearFacts(
            "float8 with one scale per row; weight gradients in train.precision",
            weight_copy_bytes=2,
            float8_gemms="all but weight gradients",
            has_expert_gemms=True,
        ),
        "float8_rowwise_wgrad": LinearFacts(
            "float8 with one scale per row; weight gradients in float8 with one scale per matrix",
            saved_input_bytes=1,
            weight_copy_bytes=2,
            float8_gemms="all",
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

# Registries of the parts of a model, by setting.
MODEL_PARTS: dict[str, Registry[Any]] = {
    registry.key: registry for registry in (ACTIVATIONS, NORMS, ATTENTIONS, MLPS, BLOCKS, LINEAR_PRECISIONS)
}
