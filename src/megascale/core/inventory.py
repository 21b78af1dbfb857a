"""Inventory of a model: logical tensors, activations saved for backward, collectives of a block. No torch.

Modules, FLOPs, memory, traffic, checkpoints and the names in Hugging Face files derive from the inventory.

A layer has two parts: a mixer (attention) and a feed-forward (MLP). Each part has a norm before it, after it or both.
`resolve_layers` returns the layers' specifications. Two registries (`ATTENTION_PARTS`, `MLP_PARTS`) hold the inventory
of each part by the value of `model.attention` or `model.mlp`. A plugin registers the inventory of its part there (see
tests/extend).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from megascale.config import ModelConfig
from megascale.config.parts import ATTENTIONS, BLOCKS, MLPS, NORMS
from megascale.config.registry import Registry
from megascale.core.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, NormsSpec
from megascale.core.tensors import Box, Piece, is_decayed

TOKENS = "embedding.token.weight"  # logical name of the token embedding


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor of the model, independent of the layout.

    Attributes:
        name: such as `layers.3.attention.query.weight`.
        shape: shape without padding.
        partition_dim: dimension that tensor-parallel ranks divide; None: replicated on all of them.
        init_std: standard deviation of the initial values; None: the constant `init_value`.
        is_gemm_weight: whether every token is multiplied with it.
        padded_rows: size of the first dimension in memory, if that is padded. Rows beyond `shape` have no meaning.
        other_cuts: (axis, dimension that its ranks divide) of axes other than the tensor axis.
        is_trained: False for state of the model that no gradient changes, such as the bias of a router.
    """

    name: str
    shape: tuple[int, ...]
    partition_dim: int | None = None
    init_std: float | None = None
    init_value: float = 0.0
    is_gemm_weight: bool = False
    padded_rows: int | None = None
    other_cuts: tuple[tuple[str, int], ...] = ()
    is_trained: bool = True

    @property
    def cuts(self) -> dict[str, int]:
        """Dimension that the ranks of each axis divide, for the axes that cut the tensor."""
        if self.partition_dim is None:
            return dict(self.other_cuts)
        return {"tensor": self.partition_dim, **dict(self.other_cuts)}

    @property
    def decay(self) -> bool:
        """True if weight decay applies (and LAMB adapts): for matrices, not for biases and norms."""
        return is_decayed(self.name, self.shape)

    @property
    def is_unit_matrix(self) -> bool:
        """True for a matrix without copies along the tensor axis; from ZeRO-2 on it is in a unit of the forward."""
        return self.decay and self.partition_dim is not None

    @property
    def is_expert_stack(self) -> bool:
        """True for a stack of experts' matrices."""
        return ".mlp.experts." in self.name and self.name.endswith(".weight")

    @property
    def elements(self) -> int:
        """Number of trained elements."""
        return prod(self.shape) if self.is_trained else 0

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape with padding."""
        if self.padded_rows is None:
            return self.shape
        return (self.padded_rows, *self.shape[1:])

    def local_shape(self, ranks: int, expert: int = 1) -> tuple[int, ...]:
        """Return the padded shape on one of `ranks` tensor-parallel ranks and one of `expert` expert ranks."""
        return self.cut_shape({"tensor": ranks, "expert": expert})

    def cut_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the padded shape on one rank. `sizes`: ranks by axis; an axis that is left out has one rank."""
        shape = list(self.padded_shape)
        for axis, dim in self.cuts.items():
            shape[dim] //= sizes.get(axis, 1)
        return tuple(shape)

    def cut_piece(self, positions: Mapping[str, tuple[int, int]]) -> Piece:
        """Return a rank's piece of the tensor. `positions`: the rank's (index, number of ranks) by axis."""
        sizes = list(self.padded_shape)
        offsets = [0] * len(sizes)
        for axis, dim in self.cuts.items():
            index, ranks = positions.get(axis, (0, 1))
            sizes[dim] //= ranks
            offsets[dim] += index * sizes[dim]
        # The piece has no padding rows.
        first_row = min(offsets[0], self.shape[0])
        row_count = max(0, min(sizes[0], self.shape[0] - first_row))
        box = Box((first_row, *offsets[1:]), (row_count, *sizes[1:]))
        return Piece(self.name, self.shape, box, self.decay)


@dataclass(frozen=True)
class SavedActivation:
    """An activation [sequence, batch, width] of a micro-batch that a forward saves for its backward.

    Attributes:
        name: name in messages and tests.
        width: values per token, over all tensor-parallel ranks.
        split_along: dimension that tensor-parallel ranks divide; "none": each of them has all of it.
        is_statistic: whether it is stored in float32 at least.
        recompute_name: value of parallel.recompute under which backward recomputes it; "" if it never does.
        has_gradient: whether a gradient of its size exists during the part's backward.
        gemm_input: whether a GEMM's weight gradient reads it: "no", "only" (nothing else does), "also" (others do too).
    """

    name: str
    width: int
    split_along: Literal["sequence", "columns", "none"]
    is_statistic: bool = False
    recompute_name: str = ""
    has_gradient: bool = False
    gemm_input: Literal["no", "only", "also"] = "no"


@dataclass(frozen=True)
class PartInventory:
    """Inventory of an attention or an MLP.

    Attributes:
        tensors: maps (layer, name of the layer) to the part's logical tensors.
        saved_activations: activations that the part saves, without those of the norm before it.
        flops: maps (layer, sequence length) to forward FLOPs per token, without those of tensors with `is_gemm_weight`.
        splits_fused_projection: whether the part can read its columns of a parallel block's fused projection.
        make_spec: makes the part's specification from the model's settings; None: the built-in part's function.
        saves_norm_output: whether backward keeps the output of the norm before it even if norms are recomputed.
        workspace: values per token, over all tensor-parallel ranks, that exist only during backward, beyond the
            gradients of saved activations.
    """

    tensors: Callable[[LayerSpec, str], list[LogicalTensor]]
    saved_activations: Callable[[LayerSpec], list[SavedActivation]]
    flops: Callable[[LayerSpec, int], float] = lambda layer, sequence: 0.0
    splits_fused_projection: bool = False
    make_spec: Callable[[ModelConfig], Any] | None = None
    saves_norm_output: bool = False
    workspace: Callable[[LayerSpec], int] = lambda layer: 0


@dataclass(frozen=True)
class BlockInventory:
    """Composition of a block from its parts.

    Attributes:
        norm_count: number of norms; the second one stands before the MLP.
        collectives: (gathers, scatters) of its forward under tensor parallelism.
        is_parallel: whether both parts read the same residual stream and go backward at once. If not, the stream
            between them is saved.
        can_split: whether attention and MLP may lie in different chunks of the model.
    """

    norm_count: Callable[[ModelConfig], int]
    collectives: Callable[[LayerSpec], tuple[int, int]]
    is_parallel: bool
    can_split: bool = False


def linear_tensors(
    name: str, rows: int, columns: int, partition_dim: int, bias: bool, std: float
) -> list[LogicalTensor]:
    """Return the weight [rows, columns] and bias [rows] of a linear layer, divided by rows (0) or by columns (1)."""
    tensors = [LogicalTensor(f"{name}.weight", (rows, columns), partition_dim, std, is_gemm_weight=True)]
    if bias:
        tensors.append(LogicalTensor(f"{name}.bias", (rows,), 0 if partition_dim == 0 else None))
    return tensors


def norm_tensors(norm: str, hidden: int, name: str) -> list[LogicalTensor]:
    """Return the tensors of one norm, whose kind is a value of model.norm."""
    facts = NORMS[norm]
    tensors = [LogicalTensor(f"{name}.weight", (hidden,), init_value=facts.initial_weight)]
    if facts.bias:
        tensors.append(LogicalTensor(f"{name}.bias", (hidden,)))
    return tensors


# built-in parts --------------------------------------------------------------------------------------------------


def _attention_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """Return the tensors of causal attention. The layer's tensors have names that begin with `name`."""
    mixer = layer.mixer
    d = mixer.head_size
    tensors: list[LogicalTensor] = []
    projections = [("query", mixer.heads), ("key", mixer.kv_heads), ("value", mixer.kv_heads)]
    if mixer.has_gate:
        projections.append(("gate", mixer.heads))
    for projection, heads in projections:
        tensors += linear_tensors(
            f"{name}.attention.{projection}",
            rows=heads * d,
            columns=layer.hidden,
            partition_dim=0,
            bias=mixer.input_bias,
            std=layer.init_std,
        )
    if mixer.has_sinks:
        tensors.append(LogicalTensor(f"{name}.attention.sink.weight", (mixer.heads,), 0))
    for projection, heads in (("query", mixer.heads), ("key", mixer.kv_heads)):
        norm_name = f"{name}.attention.{projection}_norm"
        if mixer.qk_norm == "head":
            tensors += norm_tensors(layer.norms.name, d, norm_name)
        elif mixer.qk_norm == "projection":
            tensors.append(LogicalTensor(f"{norm_name}.weight", (heads * d,), 0, init_value=1.0))
    return tensors + linear_tensors(
        f"{name}.attention.output",
        rows=layer.hidden,
        columns=mixer.heads * d,
        partition_dim=1,
        bias=mixer.output_bias,
        std=layer.output_init_std,
    )


def _attention_saved_activations(layer: LayerSpec) -> list[SavedActivation]:
    mixer = layer.mixer
    d = mixer.head_size
    saved = [SavedActivation("query_key_value", (mixer.heads + 2 * mixer.kv_heads) * d, "columns", has_gradient=True)]
    normed_heads = mixer.heads + mixer.kv_heads
    if mixer.rope is not None or mixer.qk_norm:
        saved.append(SavedActivation("rotated_query_key", normed_heads * d, "columns"))
    if mixer.qk_norm:
        # A norm over the whole projection has one statistic for the query and one for the key.
        statistics = 2 if mixer.qk_norm == "projection" else normed_heads * layer.norms.moments
        saved.append(SavedActivation("query_key_norm_statistics", statistics, "columns", is_statistic=True))
    output_width = mixer.heads * d
    if mixer.multiplier is not None:
        saved.append(SavedActivation("scaled_query", output_width, "columns"))
    saved.append(SavedActivation("attention_output", output_width, "columns", has_gradient=True, gemm_input="also"))
    saved.append(SavedActivation("attention_logsumexp", mixer.heads, "columns", is_statistic=True))
    if mixer.has_gate:
        # The projection, its sigmoid, and the product that the output projection reads.
        saved.append(SavedActivation("attention_gate", output_width, "columns", has_gradient=True))
        saved.append(SavedActivation("attention_gate_sigmoid", output_width, "columns"))
        saved.append(SavedActivation("gated_output", output_width, "columns", has_gradient=True, gemm_input="only"))
    return saved


def window_area_fraction(sequence: int, window: int | None) -> float:
    """Return the fraction of the causal triangle's area within a window; 1 for full attention."""
    if window is None or window >= sequence:
        return 1.0
    area = window * (window + 1) / 2 + (sequence - window) * window
    return area / (sequence * (sequence + 1) / 2)


def _score_flops(layer: LayerSpec, sequence: int) -> float:
    """Return the forward FLOPs per token of the two GEMMs of attention: scores, and the weighted sum of values.

    By the convention of core/flops.py, masked positions of full causal attention count too.
    """
    mixer = layer.mixer
    return 4.0 * sequence * mixer.heads * mixer.head_size * window_area_fraction(sequence, mixer.window)


def _mlp_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    return _dense_tensors(layer, layer.feed_forward, f"{name}.mlp")


def _dense_tensors(layer: LayerSpec, mlp: DenseSpec, name: str) -> list[LogicalTensor]:
    """Return the tensors of a dense MLP, with names that begin with `name`."""
    h = layer.hidden
    f = mlp.width
    tensors: list[LogicalTensor] = []
    if mlp.is_gated:
        tensors += linear_tensors(f"{name}.gate", rows=f, columns=h, partition_dim=0, bias=mlp.bias, std=layer.init_std)
    tensors += linear_tensors(f"{name}.in", rows=f, columns=h, partition_dim=0, bias=mlp.bias, std=layer.init_std)
    return tensors + linear_tensors(
        f"{name}.out", rows=h, columns=f, partition_dim=1, bias=mlp.bias, std=layer.output_init_std
    )


def _mlp_saved_activations(layer: LayerSpec) -> list[SavedActivation]:
    return _dense_saved_activations(layer.feed_forward, "mlp")


def _dense_saved_activations(mlp: DenseSpec, name: str) -> list[SavedActivation]:
    """Return the activations that a dense MLP saves, with names that begin with `name`."""
    return [
        SavedActivation(f"{name}_in", mlp.input_width, "columns", has_gradient=True),
        SavedActivation(
            f"{name}_activation",
            mlp.width,
            "columns",
            recompute_name="activation",
            has_gradient=True,
            gemm_input="only",
        ),
    ]


def _experts_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """Return the tensors of the router, of the stacks of experts, and of the shared MLP."""
    h = layer.hidden
    mlp: ExpertsSpec = layer.feed_forward
    expert_count = mlp.settings.number
    width = mlp.width
    input_shape = (expert_count, mlp.input_matrices, width, h)

    def make_stack(part_name: str, shape: tuple[int, ...], std: float | None) -> LogicalTensor:
        return LogicalTensor(f"{name}.mlp.experts.{part_name}", shape, 0, std, other_cuts=(("expert", 0), ("slice", 0)))

    tensors = [
        LogicalTensor(f"{name}.mlp.router.weight", (expert_count, h), init_std=layer.init_std),
        make_stack("in.weight", input_shape, layer.init_std),
        make_stack("out.weight", (expert_count, h, width), layer.output_init_std),
    ]
    if mlp.settings.biases:
        tensors.append(LogicalTensor(f"{name}.mlp.router.logit.bias", (expert_count,)))
        tensors.append(make_stack("in.bias", input_shape[:-1], None))
        tensors.append(make_stack("out.bias", (expert_count, h), None))
    if mlp.settings.bias_rate:
        tensors.append(LogicalTensor(f"{name}.mlp.router.bias", (expert_count,), is_trained=False))
    if mlp.shared is not None:
        tensors += _dense_tensors(layer, mlp.shared, f"{name}.mlp.shared")
    if mlp.settings.shared_gate:
        tensors.append(LogicalTensor(f"{name}.mlp.shared.scale.weight", (h,), init_std=layer.init_std))
    return tensors


def _experts_saved_activations(layer: LayerSpec) -> list[SavedActivation]:
    """Return the activations that experts save with an even load; backward recomputes the MLP activation."""
    mlp: ExpertsSpec = layer.feed_forward
    settings = mlp.settings
    top_k = settings.top_k
    # Widths are in float32 values. Each choice has three int64 values, each as wide as two float32: the chosen expert,
    # and the token and the slot of its row.
    plan_width = 6 * top_k
    if settings.normalize == "selected":
        plan_width += top_k + 1  # the selected scores and their sum
    saved = [
        SavedActivation("router_scores", settings.number, "sequence", is_statistic=True),
        SavedActivation("expert_plan", plan_width, "sequence", is_statistic=True),
        # The row and the weight of each choice of all ranks' tokens.
        SavedActivation("gathered_choices", 3 * top_k, "none", is_statistic=True),
        SavedActivation("experts_in", top_k * mlp.input_matrices * mlp.width, "columns", has_gradient=True),
    ]
    if settings.z_loss:
        saved.append(SavedActivation("router_logits", settings.number + 1, "sequence", is_statistic=True))
    if mlp.shared is not None:
        saved += _dense_saved_activations(mlp.shared, "shared")
    if settings.shared_gate:
        saved.append(SavedActivation("shared_output", layer.hidden, "sequence"))
        saved.append(SavedActivation("shared_scale", 1, "sequence", is_statistic=True))
    return saved


def _experts_workspace(layer: LayerSpec) -> int:
    """Return the values per token of backward's temporary rows, of which each token has `top_k`.

    There are two arrays of rows as wide as the layer, and three as wide as the experts' activation.
    """
    mlp: ExpertsSpec = layer.feed_forward
    return mlp.settings.top_k * (2 * layer.hidden + 3 * mlp.width)


def _experts_flops(layer: LayerSpec, sequence: int) -> float:
    """Return the forward FLOPs per token of the router and of the experts that the token passes."""
    mlp: ExpertsSpec = layer.feed_forward
    expert_elements = (mlp.input_matrices + 1) * mlp.width * layer.hidden
    router_elements = mlp.settings.number * layer.hidden
    return 2.0 * (mlp.settings.top_k * expert_elements + router_elements)


_CAUSAL_ATTENTION = PartInventory(
    _attention_tensors, _attention_saved_activations, _score_flops, splits_fused_projection=True
)
_DENSE_MLP = PartInventory(_mlp_tensors, _mlp_saved_activations, splits_fused_projection=True)
ATTENTION_PARTS: Registry[PartInventory] = Registry(ATTENTIONS.key, {"causal": _CAUSAL_ATTENTION})
_EXPERTS = PartInventory(
    _experts_tensors,
    _experts_saved_activations,
    _experts_flops,
    make_spec=ExpertsSpec.from_model,
    saves_norm_output=True,
    workspace=_experts_workspace,
)
MLP_PARTS: Registry[PartInventory] = Registry(MLPS.key, {"dense": _DENSE_MLP, "experts": _EXPERTS})


def has_fused_projection(layer: LayerSpec) -> bool:
    """Return whether one projection serves both parts of a parallel block.

    The parts must share a norm and be able to read the fused projection. An attention with a gate cannot.
    """
    if getattr(layer.mixer, "has_gate", False):
        return False
    parts = (ATTENTION_PARTS[layer.mixer.name], MLP_PARTS[layer.feed_forward.name])
    return layer.norms.count == 1 and all(part.splits_fused_projection for part in parts)


BLOCK_PARTS: Registry[BlockInventory] = Registry(
    BLOCKS.key,
    {
        "serial": BlockInventory(lambda model: 2, lambda layer: (2, 2), is_parallel=False, can_split=True),
        "parallel": BlockInventory(
            lambda model: model.parallel_norms,
            lambda layer: (1 if has_fused_projection(layer) else 2, 1),
            is_parallel=True,
        ),
    },
)


# layer and model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerInventory:
    """Logical tensors of one layer, by part."""

    norm1: tuple[LogicalTensor, ...]
    norm2: tuple[LogicalTensor, ...]
    attention: tuple[LogicalTensor, ...]
    mlp: tuple[LogicalTensor, ...]
    post_norm1: tuple[LogicalTensor, ...] = ()
    post_norm2: tuple[LogicalTensor, ...] = ()

    def __iter__(self) -> Iterator[LogicalTensor]:
        yield from self.norm1
        yield from self.norm2
        yield from self.attention
        yield from self.mlp
        yield from self.post_norm1
        yield from self.post_norm2

    @property
    def halves(self) -> tuple[tuple[LogicalTensor, ...], tuple[LogicalTensor, ...]]:
        """Tensors of the attention with its norms, and of the MLP with its norms."""
        return self.norm1 + self.attention + self.post_norm1, self.norm2 + self.mlp + self.post_norm2


def _resolve_layer(model: ModelConfig, layer_count: int) -> LayerSpec:
    """Return the specification of a layer with the settings of `model`, in a model of `layer_count` layers."""
    make_mixer_spec = ATTENTION_PARTS[model.attention].make_spec or AttentionSpec.from_model
    make_feed_forward_spec = MLP_PARTS[model.mlp].make_spec or DenseSpec.from_model
    branch_count = 2 * layer_count  # each layer adds two outputs to the residual stream
    return LayerSpec(
        hidden=model.hidden,
        init_std=model.init_std,
        output_init_std=model.init_std / branch_count**0.5,
        mixer=make_mixer_spec(model),
        feed_forward=make_feed_forward_spec(model),
        norms=NormsSpec(
            model.block,
            model.norm,
            model.norm_eps,
            count=BLOCK_PARTS[model.block].norm_count(model),
            placement=model.norm_placement,
        ),
        residual_multiplier=model.residual_multiplier,
    )


@lru_cache(maxsize=256)
def resolve_layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the specification of every layer, from the model's pattern and kinds of layers."""
    letters = set(model.layer_pattern)
    layer_by_letter = {letter: _resolve_layer(model.resolve_kind(letter), model.layers) for letter in letters}
    layers = [layer_by_letter[letter] for letter in model.layer_letters()]  # a letter per layer, as in "SSSL"
    if model.experts is not None:
        # The first `dense_layers` layers have a dense MLP instead of experts.
        for index, letter in zip(range(model.experts.dense_layers), model.layer_letters(), strict=False):
            kind = model.resolve_kind(letter)
            if kind.mlp == "experts":
                layers[index] = _resolve_layer(kind.model_copy(update={"mlp": "dense"}), model.layers)
    return tuple(layers)


def has_experts(model: ModelConfig) -> bool:
    """Return whether any layer of the model has experts."""
    return any(isinstance(layer.feed_forward, ExpertsSpec) for layer in resolve_layers(model))


@lru_cache(maxsize=256)
def count_distinct_layers(model: ModelConfig) -> tuple[tuple[LayerSpec, int], ...]:
    """Return each different layer of a model once, with the number of layers that equal it."""
    return tuple(Counter(resolve_layers(model)).items())


@lru_cache(maxsize=512)
def layer_inventory(layer: LayerSpec, index: int = 0) -> LayerInventory:
    """Return the tensors of a layer; equal layers differ in the names only, by their index."""
    name = f"layers.{index}"
    norms = layer.norms

    def make_norm(part: str, exists: bool) -> tuple[LogicalTensor, ...]:
        return tuple(norm_tensors(norms.name, layer.hidden, f"{name}.{part}")) if exists else ()

    return LayerInventory(
        norm1=make_norm("norm1", norms.has_pre),
        norm2=make_norm("norm2", norms.has_pre and norms.count == 2),
        attention=tuple(ATTENTION_PARTS[layer.mixer.name].tensors(layer, name)),
        mlp=tuple(MLP_PARTS[layer.feed_forward.name].tensors(layer, name)),
        post_norm1=make_norm("post_norm1", norms.has_post),
        post_norm2=make_norm("post_norm2", norms.has_post),
    )


@lru_cache(maxsize=256)
def layer_saved_activations(layer: LayerSpec) -> tuple[SavedActivation, ...]:
    """Return the activations that a layer's forward saves, in the order of the table in core/saved_tensors.py."""
    attention, mlp = half_saved_activations(layer)
    if BLOCK_PARTS[layer.norms.block].is_parallel:
        mlp = mlp[1:]  # both parts read the same residual stream, which is saved once
    return attention + mlp


@lru_cache(maxsize=256)
def half_saved_activations(layer: LayerSpec) -> tuple[tuple[SavedActivation, ...], tuple[SavedActivation, ...]]:
    """Return the saved activations of a layer's attention, and those of its MLP.

    Each of the two begins with the residual stream that is the half's input.
    """
    norms = layer.norms
    # Without a norm before it, a part's projection reads the stream itself.
    stream_use: Literal["no", "only"] = "no" if norms.has_pre else "only"
    attention = [SavedActivation("input", layer.hidden, "sequence", gemm_input=stream_use)]
    mlp = [SavedActivation("middle", layer.hidden, "sequence", gemm_input=stream_use)]
    if norms.has_pre:
        attention += _norm_saved_activations(layer, "")
    if norms.has_pre and norms.count == 2:
        mlp += _norm_saved_activations(layer, "second_")
    if MLP_PARTS[layer.feed_forward.name].saves_norm_output:
        # Experts save their input itself. A shared MLP saves its own copy.
        mlp_use: Literal["no", "also"] = "no" if layer.feed_forward.shared is None else "also"
        mlp = [_save_itself(activation, mlp_use) for activation in mlp]
        if BLOCK_PARTS[norms.block].is_parallel and norms.count == 1:
            attention = [_save_itself(activation, "also", activation.recompute_name) for activation in attention]
    attention += ATTENTION_PARTS[layer.mixer.name].saved_activations(layer)
    mlp += MLP_PARTS[layer.feed_forward.name].saved_activations(layer)
    if norms.has_post:
        attention += _post_norm_saved_activations(layer, "")
        mlp += _post_norm_saved_activations(layer, "second_")
    return tuple(attention), tuple(mlp)


def _save_itself(
    activation: SavedActivation, gemm_input: Literal["no", "also"], recompute_name: str = ""
) -> SavedActivation:
    """Return an activation that a copy for a GEMM does not replace, and that is recomputed as `recompute_name`."""
    if activation.gemm_input == "no":
        gemm_input = "no"
    return replace(activation, gemm_input=gemm_input, recompute_name=recompute_name)


def _norm_saved_activations(layer: LayerSpec, prefix: str) -> list[SavedActivation]:
    """Return the activations that a norm before a part saves."""
    statistics = SavedActivation(
        f"{prefix}norm_statistics", layer.norms.moments, "sequence", is_statistic=True, recompute_name="norms"
    )
    output = SavedActivation(
        f"{prefix}norm_output", layer.hidden, "sequence", recompute_name="norms", gemm_input="only"
    )
    return [statistics, output]


def _post_norm_saved_activations(layer: LayerSpec, prefix: str) -> list[SavedActivation]:
    """Return the activations that a norm after a part saves."""
    return [
        SavedActivation(f"{prefix}post_norm_input", layer.hidden, "sequence"),
        SavedActivation(f"{prefix}post_norm_statistics", layer.norms.moments, "sequence", is_statistic=True),
    ]


@lru_cache(maxsize=256)
def gradient_widths(layer: LayerSpec) -> tuple[int, int]:
    """Return the values per token whose gradients exist during backward: (of the attention, of the MLP)."""
    attention = ATTENTION_PARTS[layer.mixer.name].saved_activations(layer)
    mlp = MLP_PARTS[layer.feed_forward.name]
    return (
        sum(activation.width for activation in attention if activation.has_gradient),
        sum(activation.width for activation in mlp.saved_activations(layer) if activation.has_gradient)
        + mlp.workspace(layer),
    )


@lru_cache(maxsize=64)
def embedding_tensors(model: ModelConfig) -> tuple[LogicalTensor, ...]:
    """Return the tensors before the first layer."""
    h = model.hidden
    tokens = LogicalTensor(TOKENS, (model.vocab, h), 0, model.init_std, padded_rows=model.padded_vocab)
    if model.positions != "learned":
        return (tokens,)
    return tokens, LogicalTensor("embedding.position.weight", (model.sequence_length, h), None, model.init_std)


@lru_cache(maxsize=64)
def head_tensors(model: ModelConfig) -> tuple[LogicalTensor, ...]:
    """Return the tensors after the final norm. Tied logits use the token embedding, which is not repeated here."""
    rows = model.padded_vocab
    tensors = []
    if not model.tied_embeddings:
        shape = (model.vocab, model.hidden)
        tensors.append(LogicalTensor("head.weight", shape, 0, model.init_std, is_gemm_weight=True, padded_rows=rows))
    if model.head_bias:
        tensors.append(LogicalTensor("head.bias", (model.vocab,), 0, padded_rows=rows))
    return tuple(tensors)


def output_matrix(model: ModelConfig) -> LogicalTensor:
    """Return the matrix that projects onto the logits: the head, or the tied token embedding."""
    if model.tied_embeddings:
        return embedding_tensors(model)[0]
    return head_tensors(model)[0]


def list_tensors(model: ModelConfig) -> Iterator[LogicalTensor]:
    """Yield every logical tensor of a model, in model order."""
    yield from embedding_tensors(model)
    for index, layer in enumerate(resolve_layers(model)):
        yield from layer_inventory(layer, index)
    yield from norm_tensors(model.norm, model.hidden, "norm")
    yield from head_tensors(model)


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every logical tensor by name, in model order: the content of a checkpoint."""
    return {tensor.name: tensor.shape for tensor in list_tensors(model)}


def count_elements(tensors: Iterable[LogicalTensor], ranks: int = 1, expert: int = 1) -> int:
    """Return the number of trained elements on one of `ranks` tensor-parallel ranks, padding included.

    Args:
        expert: ranks of the expert axis (parallel.expert).
    """
    return sum(prod(tensor.local_shape(ranks, expert)) for tensor in tensors if tensor.is_trained)
