"""Parameters that know which parts of which logical tensors they hold, and initial values that no layout changes.

A module is built on the meta device; the buffers of `parallel/` give it storage (`materialise`), `initialise` values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megascale.core.inventory import LogicalTensor
from megascale.core.tensors import Box, Piece


@dataclass(frozen=True)
class Spec:
    """What a local parameter is.

    Attributes:
        pieces: the boxes of logical tensors it holds, stacked along dimension 0; padding rows (if any) come last.
        init_std: standard deviation of its initial values; None stands for the constant `init_value`.
        replicated: the same values on every tensor-parallel rank: counted and saved once. Such parameters act on a
            rank's part of the sequence, so their gradients are summed over the tensor axis.
    """

    pieces: tuple[Piece, ...]
    init_std: float | None = None
    init_value: float = 0.0
    replicated: bool = False


def local_parameter(tensors: Sequence[LogicalTensor], rank: int, ranks: int, dtype: torch.dtype) -> nn.Parameter:
    """What tensor-parallel rank `rank` of `ranks` holds of logical tensors that are cut and begin alike, stacked."""
    first = tensors[0]
    assert all(
        (t.partition_dim, t.std, t.init_value) == (first.partition_dim, first.std, first.init_value) for t in tensors
    ), tensors
    rows = sum(tensor.local_shape(ranks)[0] for tensor in tensors)
    pieces = tuple(tensor.piece(rank, ranks) for tensor in tensors)
    spec = Spec(pieces, first.std, first.init_value, replicated=first.partition_dim is None)
    return parameter((rows, *first.local_shape(ranks)[1:]), spec, dtype)


def parameter(shape: tuple[int, ...], spec: Spec, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without storage (meta device), carrying its spec."""
    p = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    p.spec = spec  # type: ignore[attr-defined]
    return p


def spec_of(p: torch.Tensor) -> Spec:
    """The spec of a parameter made by `parameter`."""
    return p.spec  # type: ignore[attr-defined]


def materialise(module: nn.Module, storage: dict[nn.Parameter, torch.Tensor]) -> None:
    """Replace every meta parameter by one that lives in the given tensor of the same shape."""
    made = {}
    for p, tensor in storage.items():
        made[p] = nn.Parameter(tensor, requires_grad=p.requires_grad)
        made[p].spec = spec_of(p)  # type: ignore[attr-defined]
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):
            setattr(part, name, made[p])


def piece_views(spec: Spec, data: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece with the view of `data` (the parameter's elements, any shape) that has the box's shape."""
    flat = data.view(-1)
    start = 0
    for piece in spec.pieces:
        yield piece, flat[start : start + piece.box.count].view(piece.box.sizes)
        start += piece.box.count


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Fill every parameter from (seed, logical name): the same model on every layout.

    The whole logical tensor is drawn on the parameter's device and this rank's box is kept, so ranks agree
    without talking; one tensor at a time is held whole. CPU and CUDA draw different values.
    """
    for p in module.parameters():
        spec = spec_of(p)
        p.zero_()
        for piece, view in piece_views(spec, p.data):
            if spec.init_std is None:
                view.fill_(spec.init_value)
                continue
            view.copy_(_cut(draw_initial_values(seed, piece.name, piece.shape, spec.init_std, view.device), piece.box))


def draw_initial_values(seed: int, name: str, shape: tuple[int, ...], std: float, device: torch.device) -> torch.Tensor:
    """The first values of a whole logical tensor, float32: normal, a function of (seed, name) and kind of device."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "big"))
    whole = torch.empty(shape, dtype=torch.float32, device=device)
    return whole.normal_(0.0, std, generator=generator)


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
