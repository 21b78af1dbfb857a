"""The one list of what a model consists of: logical tensors, what is kept of them for backward, what is exchanged.

Modules, FLOPs, memory, traffic, checkpoints and the names of Hugging Face files derive from it. No torch.

A block has two parts, attention and MLP, behind norms. What each consists of stands in a registry under the name that
the setting gives it; another part brings its own inventory (tests/extend does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from megascale.config import ModelConfig
from megascale.config.parts import ATTENTIONS, BLOCKS, MLPS, NORMS
from megascale.config.registry import Registry
from megascale.core.tensors import Box, Piece

TOKENS = "embedding.token.weight"


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor of the whole model, whatever the layout.

    Attributes:
        name: such as `layers.3.attention.query.weight`.
        shape: without padding.
        cut: the dimension that tensor-parallel ranks divide; None: the same on all of them.
        std: standard deviation of its first values; None stands for the constant `value`.
        gemm: whether every token is multiplied with it.
        rows: of its first dimension in memory, where that is padded; those beyond `shape` are nobody's.
    """

    name: str
    shape: tuple[int, ...]
    partition_dim: int | None = None
    std: float | None = None
    init_value: float = 0.0
    gemm: bool = False
    rows: int | None = None

    @property
    def decay(self) -> bool:
        """Whether weight decay applies (and LAMB adapts): matrices yes, biases and norms no."""
        return len(self.shape) > 1

    @property
    def elements(self) -> int:
        """Trained numbers."""
        return prod(self.shape)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape with padding."""
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """The shape on one of `ranks` tensor-parallel ranks, with padding."""
        return tuple(n // ranks if d == self.partition_dim else n for d, n in enumerate(self.stored))

    def piece(self, rank: int, ranks: int) -> Piece:
        """The part that tensor-parallel rank `rank` holds."""
        sizes = self.local_shape(ranks)
        offsets = [rank * n if d == self.partition_dim else 0 for d, n in enumerate(sizes)]
        first = min(offsets[0], self.shape[0])
        count = max(0, min(sizes[0], self.shape[0] - first))
        return Piece(self.name, self.shape, Box((first, *offsets[1:]), (count, *sizes[1:])), self.decay)


@dataclass(frozen=True)
class Kept:
    """A tensor that a forward keeps for its backward: [sequence, batch, width] values of a micro-batch.

    Attributes:
        name: for people.
        width: values of a token, over all tensor-parallel ranks.
        over: what these ranks divide, the sequence or the columns.
        statistic: in float32 at least.
        dropped: what parallel.recompute calls it where backward computes it again; "" where it never does.
        gradient: whether a gradient of its size exists while its part goes backward.
        gemm: whether a GEMM's weight gradient is what it is kept for, alone or among others.
    """

    name: str
    width: int
    over: Literal["sequence", "columns"]
    statistic: bool = False
    dropped: str = ""
    gradient: bool = False
    gemm: Literal["no", "only", "also"] = "no"


@dataclass(frozen=True)
class PartInventory:
    """What an attention or an MLP consists of.

    Attributes:
        tensors: (model, name of the layer) -> its logical tensors.
        keeps: what it keeps beyond the norm before it.
        flops: of a token, forward, in a layer of that number, beside those of its matrices.
        splits: whether it can read its half of a parallel block's fused projection.
    """

    tensors: Callable[[ModelConfig, str], list[LogicalTensor]]
    saved_activations: Callable[[ModelConfig], list[Kept]]
    flops: Callable[[ModelConfig, int], float] = lambda model, layer: 0.0
    splits: bool = False


@dataclass(frozen=True)
class BlockInventory:
    """How a block composes its parts.

    Attributes:
        norms: how many it has; the second stands before the MLP.
        collectives: (gathers, scatters) of its forward under tensor parallelism.
        together: both parts read the same stream and go backward at once; else the stream between them is kept.
        divides: whether its attention and its MLP may lie in different chunks of the model.
    """

    norms: Callable[[ModelConfig], int]
    collectives: Callable[[ModelConfig], tuple[int, int]]
    together: bool
    divides: bool = False


def linear(name: str, rows: int, columns: int, cut: int, bias: bool, std: float) -> list[LogicalTensor]:
    """Weight [rows, columns] and bias [rows] of a linear layer, cut by rows (0) or by columns (1)."""
    weight = LogicalTensor(f"{name}.weight", (rows, columns), cut, std, gemm=True)
    return [weight, LogicalTensor(f"{name}.bias", (rows,), 0 if cut == 0 else None)] if bias else [weight]


def out_std(model: ModelConfig) -> float:
    """Standard deviation of first values of the matrices that add to the residual stream (GPT-2)."""
    return model.init_std / (2 * model.layers) ** 0.5


def norm_tensors(model: ModelConfig, name: str) -> list[LogicalTensor]:
    """Of one norm."""
    weight = LogicalTensor(f"{name}.weight", (model.hidden,), init_value=1.0)
    return [weight, LogicalTensor(f"{name}.bias", (model.hidden,))] if NORMS[model.norm].bias else [weight]


# the parts there are ---------------------------------------------------------------------------------------------


def _attention_tensors(model: ModelConfig, name: str) -> list[LogicalTensor]:
    h, d, std, bias = model.hidden, model.head_size, model.init_std, model.attention_bias
    tensors: list[LogicalTensor] = []
    for part, heads in (("query", model.heads), ("key", model.kv), ("value", model.kv)):
        tensors += linear(f"{name}.attention.{part}", heads * d, h, 0, bias, std)
    return tensors + linear(f"{name}.attention.output", h, model.heads * d, 1, model.out_bias, out_std(model))


def _attention_keeps(model: ModelConfig) -> list[Kept]:
    d, turned = model.head_size, model.positions == "rotary"
    return [
        Kept("query_key_value", (model.heads + 2 * model.kv) * d, "columns", gradient=True),
        *([Kept("rotated_query_key", (model.heads + model.kv) * d, "columns")] if turned else []),
        Kept("attention_output", model.heads * d, "columns", gradient=True, gemm="also"),
        Kept("attention_logsumexp", model.heads, "columns", statistic=True),
    ]


def window_share(sequence: int, window: int | None) -> float:
    """Part of the causal triangle's area that a window keeps: 1 for full attention."""
    if window is None or window >= sequence:
        return 1.0
    kept = window * (window + 1) / 2 + (sequence - window) * window
    return kept / (sequence * (sequence + 1) / 2)


def _score_flops(model: ModelConfig, layer: int) -> float:
    s, q = model.sequence_length, model.heads * model.head_size
    return 4.0 * s * q * window_share(s, model.layer_window(layer))


def _mlp_tensors(model: ModelConfig, name: str) -> list[LogicalTensor]:
    h, f, std, bias = model.hidden, model.ffn, model.init_std, model.mlp_bias
    gate = linear(f"{name}.mlp.gate", f, h, 0, bias, std) if model.gated else []
    return [
        *gate,
        *linear(f"{name}.mlp.in", f, h, 0, bias, std),
        *linear(f"{name}.mlp.out", h, f, 1, bias, out_std(model)),
    ]


def _mlp_keeps(model: ModelConfig) -> list[Kept]:
    return [
        Kept("mlp_in", model.ffn * (2 if model.gated else 1), "columns", gradient=True),
        Kept("mlp_activation", model.ffn, "columns", dropped="activation", gradient=True, gemm="only"),
    ]


ATTENTION_PARTS: Registry[PartInventory] = Registry(
    ATTENTIONS.key, {"causal": PartInventory(_attention_tensors, _attention_keeps, _score_flops, splits=True)}
)
MLP_PARTS: Registry[PartInventory] = Registry(MLPS.key, {"dense": PartInventory(_mlp_tensors, _mlp_keeps, splits=True)})


def splits_projection(model: ModelConfig) -> bool:
    """Whether a parallel block has one projection for both halves: they share a norm, and both can read it."""
    parts = ATTENTION_PARTS[model.attention], MLP_PARTS[model.mlp]
    return model.parallel_norms == 1 and all(part.splits for part in parts)


BLOCK_PARTS: Registry[BlockInventory] = Registry(
    BLOCKS.key,
    {
        "serial": BlockInventory(lambda model: 2, lambda model: (2, 2), together=False, divides=True),
        "parallel": BlockInventory(
            lambda model: model.parallel_norms,
            lambda model: (1 if splits_projection(model) else 2, 1),
            together=True,
        ),
    },
)


# a layer, and the model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerInventory:
    """One layer's tensors, by what they belong to."""

    norm1: tuple[LogicalTensor, ...]
    norm2: tuple[LogicalTensor, ...]
    attention: tuple[LogicalTensor, ...]
    mlp: tuple[LogicalTensor, ...]

    def __iter__(self) -> Iterator[LogicalTensor]:
        yield from (*self.norm1, *self.norm2, *self.attention, *self.mlp)

    @property
    def halves(self) -> tuple[tuple[LogicalTensor, ...], tuple[LogicalTensor, ...]]:
        """Of a block that divides: what belongs to its attention, and to its MLP."""
        return (*self.norm1, *self.attention), (*self.norm2, *self.mlp)


@lru_cache(maxsize=512)
def layer_inventory(model: ModelConfig, layer: int = 0) -> LayerInventory:
    """The tensors of one layer; all layers have the same but for their names."""
    name, block = f"layers.{layer}", BLOCK_PARTS[model.block]
    return LayerInventory(
        tuple(norm_tensors(model, f"{name}.norm1")),
        tuple(norm_tensors(model, f"{name}.norm2")) if block.norms(model) == 2 else (),
        tuple(ATTENTION_PARTS[model.attention].tensors(model, name)),
        tuple(MLP_PARTS[model.mlp].tensors(model, name)),
    )


@lru_cache(maxsize=256)
def layer_keeps(model: ModelConfig) -> tuple[Kept, ...]:
    """What a layer's forward keeps, in the order of the table in core/memory.py."""
    attention, mlp = half_keeps(model)
    return attention + (mlp[1:] if BLOCK_PARTS[model.block].together else mlp)


@lru_cache(maxsize=256)
def half_keeps(model: ModelConfig) -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
    """Of them what belongs to the attention, and to the MLP; each begins with the stream that it reads."""
    h, moments = model.hidden, 2 if NORMS[model.norm].bias else 1

    def norm(prefix: str) -> list[Kept]:
        return [
            Kept(f"{prefix}norm_statistics", moments, "sequence", statistic=True, dropped="norms"),
            Kept(f"{prefix}norm_output", h, "sequence", dropped="norms", gemm="only"),
        ]

    attention = (Kept("input", h, "sequence"), *norm(""), *ATTENTION_PARTS[model.attention].saved_activations(model))
    second = norm("second_") if BLOCK_PARTS[model.block].norms(model) == 2 else []
    return attention, (Kept("middle", h, "sequence"), *second, *MLP_PARTS[model.mlp].saved_activations(model))


@lru_cache(maxsize=256)
def gradient_widths(model: ModelConfig) -> tuple[int, int]:
    """Values of a token whose gradients exist while the attention, and while the MLP goes backward."""
    parts = ATTENTION_PARTS[model.attention], MLP_PARTS[model.mlp]
    attention, mlp = (sum(one.width for one in part.saved_activations(model) if one.gradient) for part in parts)
    return attention, mlp


@lru_cache(maxsize=64)
def embedding_tensors(model: ModelConfig) -> tuple[LogicalTensor, ...]:
    """In front of the first layer."""
    h, std = model.hidden, model.init_std
    tokens = LogicalTensor(TOKENS, (model.vocab, h), 0, std, rows=model.padded_vocab)
    if model.positions != "learned":
        return (tokens,)
    return tokens, LogicalTensor("embedding.position.weight", (model.sequence_length, h), None, std)


@lru_cache(maxsize=64)
def head_tensors(model: ModelConfig) -> tuple[LogicalTensor, ...]:
    """Behind the last norm. The matrix of tied logits is the token embedding, listed there."""
    rows, tensors = model.padded_vocab, []
    if not model.tied_embeddings:
        tensors.append(LogicalTensor("head.weight", (model.vocab, model.hidden), 0, model.init_std, 0.0, True, rows))
    if model.head_bias:
        tensors.append(LogicalTensor("head.bias", (model.vocab,), 0, rows=rows))
    return tuple(tensors)


def output_matrix(model: ModelConfig) -> LogicalTensor:
    """The matrix of the logits."""
    return embedding_tensors(model)[0] if model.tied_embeddings else head_tensors(model)[0]


def inventory(model: ModelConfig) -> Iterator[LogicalTensor]:
    """Every logical tensor of a model, in model order."""
    yield from embedding_tensors(model)
    for layer in range(model.layers):
        yield from layer_inventory(model, layer)
    yield from norm_tensors(model, "norm")
    yield from head_tensors(model)


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every logical tensor of a model, in model order: what checkpoints hold."""
    return {tensor.name: tensor.shape for tensor in inventory(model)}


def elements(tensors: Iterator[LogicalTensor] | tuple[LogicalTensor, ...] | LayerInventory, ranks: int = 1) -> int:
    """Numbers held on one of `ranks` tensor-parallel ranks, padding included."""
    return sum(prod(tensor.local_shape(ranks)) for tensor in tensors)
