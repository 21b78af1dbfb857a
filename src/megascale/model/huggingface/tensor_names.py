"""Logical tensors and the tensors of a Hugging Face file: one table a family, read in both directions.

A `Weight` says of which logical tensors one tensor of a file is made; `split` and `join` are each other's inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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


def split_weight(weight: Weight, tensor: Tensor) -> dict[str, Tensor]:
    """The logical tensors that a stored one holds, by name; views where strides allow."""
    tensor = tensor.t() if weight.transposed else tensor
    count = len(weight.parts)
    if weight.heads:
        by_head = tensor.unflatten(0, (weight.heads, count, -1))
        return {name: by_head[:, i].flatten(0, 1) for i, name in enumerate(weight.parts)}
    return dict(zip(weight.parts, tensor.chunk(count), strict=True))


def join_weight(weight: Weight, logical: Mapping[str, Tensor]) -> Tensor:
    """The stored tensor of logical ones, contiguous."""
    parts = [logical[name] for name in weight.parts]
    if weight.heads:
        tensor = torch.stack([part.unflatten(0, (weight.heads, -1)) for part in parts], dim=1).flatten(0, 2)
    else:
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (tensor.t() if weight.transposed else tensor).contiguous()
