"""Logical tensors and the tensors of a Hugging Face file: one table a family, read in both directions.

A `Weight` says of which logical tensors one tensor of a file is made; `split` and `join` are each other's inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config import ModelConfig


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every logical tensor of a model, in model order."""
    h, d, vocab = model.hidden, model.head_size, model.vocab
    shapes: dict[str, tuple[int, ...]] = {"embedding.token.weight": (vocab, h)}
    if model.positions == "learned":
        shapes["embedding.position.weight"] = (model.sequence_length, h)
    for layer in range(model.layers):
        name = f"layers.{layer}"
        shapes |= _norm(model, f"{name}.norm1")
        if model.block == "serial" or model.parallel_norms == 2:
            shapes |= _norm(model, f"{name}.norm2")
        for part, rows in (("query", model.heads * d), ("key", model.kv * d), ("value", model.kv * d)):
            shapes |= _linear(f"{name}.attention.{part}", rows, h, model.attention_bias)
        shapes |= _linear(f"{name}.attention.output", h, model.heads * d, model.out_bias)
        if model.gated:
            shapes |= _linear(f"{name}.mlp.gate", model.ffn, h, model.mlp_bias)
        shapes |= _linear(f"{name}.mlp.in", model.ffn, h, model.mlp_bias)
        shapes |= _linear(f"{name}.mlp.out", h, model.ffn, model.mlp_bias)
    shapes |= _norm(model, "norm")
    if not model.tied_embeddings:
        shapes["head.weight"] = (vocab, h)
    if model.head_bias:
        shapes["head.bias"] = (vocab,)
    return shapes


def _norm(model: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (model.hidden,)}
    return weight if model.norm == "rmsnorm" else weight | {f"{name}.bias": (model.hidden,)}


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


@dataclass(frozen=True)
class Weight:
    """One tensor of a Hugging Face file.

    Attributes:
        name: its name there.
        parts: the logical tensors that it holds, all of one shape, stacked along their first dimension.
        transposed: stored [in, out], as GPT-2's Conv1D.
        heads: above 0, the parts are interleaved head by head (GPT-NeoX): [head, part, head size, ...].
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    heads: int = 0

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The stored shape, given those of the logical tensors."""
        first, *rest = shapes[self.parts[0]]
        stacked = (first * len(self.parts), *rest)
        return stacked[::-1] if self.transposed else stacked


def linear(name: str, *parts: str, bias: bool = True, transposed: bool = False, heads: int = 0) -> list[Weight]:
    """Weight and bias of a linear layer; `parts` are logical names without `.weight`."""
    made = [Weight(f"{name}.weight", tuple(f"{part}.weight" for part in parts), transposed, heads)]
    if bias:
        made.append(Weight(f"{name}.bias", tuple(f"{part}.bias" for part in parts), heads=heads))
    return made


def split(weight: Weight, tensor: Tensor) -> dict[str, Tensor]:
    """The logical tensors that a stored one holds, by name; views where strides allow."""
    tensor = tensor.t() if weight.transposed else tensor
    count = len(weight.parts)
    if weight.heads:
        by_head = tensor.unflatten(0, (weight.heads, count, -1))
        return {name: by_head[:, i].flatten(0, 1) for i, name in enumerate(weight.parts)}
    return dict(zip(weight.parts, tensor.chunk(count), strict=True))


def join(weight: Weight, logical: Mapping[str, Tensor]) -> Tensor:
    """The stored tensor of logical ones, contiguous."""
    parts = [logical[name] for name in weight.parts]
    if weight.heads:
        tensor = torch.stack([part.unflatten(0, (weight.heads, -1)) for part in parts], dim=1).flatten(0, 2)
    else:
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (tensor.t() if weight.transposed else tensor).contiguous()
