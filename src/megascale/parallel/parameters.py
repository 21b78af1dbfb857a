"""Parameters that know which pieces of which logical tensors they hold, and layout-independent initial values.

A module is built on the meta device. The buffers of `parallel/` give it storage (`materialise`), and `initialise` fills
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megascale.core.inventory import LogicalTensor
from megascale.core.tensors import Piece
from megascale.ops.gradient_sink import SinkParameter


@dataclass(frozen=True)
class ParameterSpec:
    """Pieces, initial values and replication of a local parameter.

    Attributes:
        pieces: boxes of logical tensors, stacked along dimension 0; padding rows (if any) come last.
        init_std: standard deviation of the initial values; None stands for the constant `init_value`.
        replicated: the same values on every tensor-parallel rank, counted and saved once. Such parameters act on a
            rank's part of the sequence, so their gradients are summed over the tensor axis.
    """

    pieces: tuple[Piece, ...]
    init_std: float | None = None
    init_value: float = 0.0
    replicated: bool = False

    @property
    def cut_dimension(self) -> int | None:
        """The dimension along which this rank holds a part of each logical tensor; None if it holds all of them."""
        for piece in self.pieces:
            for dimension, (size, whole) in enumerate(zip(piece.box.sizes, piece.shape, strict=True)):
                if size < whole:
                    return dimension
        return None


class ModelParameter(SinkParameter):
    """A parameter of a chunk, with its spec and, in training, a gradient sink."""

    spec: ParameterSpec


def local_parameter(tensors: Sequence[LogicalTensor], rank: int, ranks: int, dtype: torch.dtype) -> nn.Parameter:
    """Return the stacked pieces that tensor-parallel rank `rank` holds of logical tensors with equal cut and init."""
    first = tensors[0]
    assert all(
        (t.partition_dim, t.init_std, t.init_value) == (first.partition_dim, first.init_std, first.init_value)
        for t in tensors
    ), tensors
    rows = sum(tensor.local_shape(ranks)[0] for tensor in tensors)
    pieces = tuple(tensor.piece(rank, ranks) for tensor in tensors)
    spec = ParameterSpec(pieces, first.init_std, first.init_value, replicated=first.partition_dim is None)
    return parameter((rows, *first.local_shape(ranks)[1:]), spec, dtype)


def parameter(shape: tuple[int, ...], spec: ParameterSpec, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter without storage (meta device) that carries its spec."""
    param = ModelParameter(torch.empty(shape, dtype=dtype, device="meta"))
    param.spec = spec
    return param


def spec_of(param: torch.Tensor) -> ParameterSpec:
    """Return the spec of a parameter made by `parameter`."""
    return param.spec  # type: ignore[attr-defined]


def materialise(module: nn.Module, storage: dict[nn.Parameter, torch.Tensor]) -> None:
    """Replace every meta parameter by one that lives in the given tensor of the same shape."""
    materialised = {}
    for param, tensor in storage.items():
        materialised[param] = ModelParameter(tensor, requires_grad=param.requires_grad)
        materialised[param].spec = spec_of(param)
    for submodule in module.modules():
        for name, param in submodule.named_parameters(recurse=False):
            setattr(submodule, name, materialised[param])


def piece_views(spec: ParameterSpec, data: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield each piece with its view of `data` (the parameter's elements, any shape) in the shape of its box."""
    flat = data.view(-1)
    start = 0
    for piece in spec.pieces:
        yield piece, flat[start : start + piece.box.count].view(piece.box.sizes)
        start += piece.box.count


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Fill every parameter from (seed, logical name): the same model on every layout.

    Each rank draws the whole logical tensor on the parameter's device and keeps its own box, so that ranks agree
    without communication. One logical tensor is in memory at a time. CPU and CUDA draw different values.
    """
    for param in module.parameters():
        spec = spec_of(param)
        param.zero_()
        for piece, view in piece_views(spec, param.data):
            if spec.init_std is None:
                view.fill_(spec.init_value)
                continue
            values = draw_initial_values(seed, piece.name, piece.shape, spec.init_std, view.device)
            box = piece.box
            view.copy_(values[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))])


def draw_initial_values(seed: int, name: str, shape: tuple[int, ...], std: float, device: torch.device) -> torch.Tensor:
    """Draw the initial values of a logical tensor: float32, normal, a function of (seed, name) and device type."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "big"))
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)
