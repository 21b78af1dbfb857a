"""Inventory of a model: logical tensors, activations saved for backward, collectives of a block. No torch.

Modules, FLOPs, memory, traffic, checkpoints and the names in Hugging Face files derive from the inventory.

A layer has two parts: a mixer (attention) and a feed-forward (MLP). Each part has a norm before it, after it or both.
`resolve_layers` returns the layers' specifications. part_inventories.py has the inventory of each part, and
inventory_records.py the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from megascale.config import ModelConfig

# Plugins import the records and registries from this module (docs/stability.md).
from megascale.core.inventory_records import BlockInventory as BlockInventory
from megascale.core.inventory_records import LogicalTensor as LogicalTensor
from megascale.core.inventory_records import PartInventory as PartInventory
from megascale.core.inventory_records import SavedActivation as SavedActivation
from megascale.core.inventory_records import linear_tensors as linear_tensors
from megascale.core.inventory_records import norm_tensors as norm_tensors
from megascale.core.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, NormsSpec
from megascale.core.part_inventories import ATTENTION_PARTS as ATTENTION_PARTS
from megascale.core.part_inventories import BLOCK_PARTS as BLOCK_PARTS
from megascale.core.part_inventories import MLP_PARTS as MLP_PARTS

TOKENS = "embedding.token.weight"  # logical name of the token embedding

# layers -------------------------------------------------------------------------------------------------------------


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
    return any(isinstance(layer.feed_forward, ExpertsSpec) for layer, _ in count_distinct_layers(model))


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


# model --------------------------------------------------------------------------------------------------------------


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
