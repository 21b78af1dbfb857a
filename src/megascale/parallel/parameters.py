"""Parameters with a record of the pieces of logical tensors that they hold, and layout-independent initial values.

A logical tensor is a tensor of the model, independent of the layout. A piece is the box of it that a rank holds
(core/tensors.py).

A module is constructed on the meta device. The buffers of `parallel/` then allocate its parameters (`materialise`), and
`initialise` fills them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megascale.config.axes import AXES
from megascale.core.inventory_records import LogicalTensor
from megascale.core.tensors import Box, Piece
from megascale.errors import ConfigError
from megascale.ops.gradient_sink import SinkParameter
from megascale.parallel.collectives import Axis


@dataclass(frozen=True)
class ParameterSpec:
    """The pieces of logical tensors in a local parameter, and their initial values.

    Attributes:
        pieces: boxes of logical tensors, stacked along dimension 0; padding rows, if any, come last.
        init_std: standard deviation of the initial values; None: all values are `init_value`.
        cut_axes: axes whose ranks hold different pieces. Along the other axes of a stage the parameter is replicated.
    """

    pieces: tuple[Piece, ...]
    init_std: float | None = None
    init_value: float = 0.0
    cut_axes: tuple[str, ...] = ()

    @property
    def cut_dimension(self) -> int | None:
        """The first dimension along which this rank holds only a part of a logical tensor; None if it holds all."""
        for piece in self.pieces:
            for dimension, (local_size, full_size) in enumerate(zip(piece.box.sizes, piece.shape, strict=True)):
                if local_size < full_size:
                    return dimension
        return None

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Axes of a stage along which every rank holds the same values."""
        return tuple(name for name in AXES.stage if name not in self.cut_axes)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Axes over which the gradient is summed, apart from `AXES.shards` and `AXES.copies`, which sum all gradients.

        Along these axes the parameter is replicated, and each rank computes with a different part of the batch.
        """
        replicated = [name for name in self.replicated_axes if name not in AXES.shards + AXES.copies]
        return tuple(name for name in replicated if AXES[name].cuts_batch != "nothing")

    def is_counted(self, position: Mapping[str, int]) -> bool:
        """Return whether the rank at `position` adds the parameter to norms. Only one replica of a parameter is added.

        Ranks along `AXES.shards` each count their own shard.

        Args:
            position: index of the rank along each axis; 0 for axes that are left out.
        """
        return not any(position.get(name, 0) for name in self.replicated_axes if name not in AXES.shards)


class LocalParameter(SinkParameter):
    """A parameter with its spec. In training it has a gradient sink.

    Attributes:
        spec: pieces of logical tensors and initial values.
        adapter: low-rank adapter of a row-parallel matrix (parallel/adapters.py); None without one. The operator that
            reads the matrix adds the adapter's output.
    """

    spec: ParameterSpec
    adapter: Any = None


def local_parameter(
    tensors: Sequence[LogicalTensor], rank: int, ranks: int, dtype: torch.dtype, axes: Mapping[str, Axis] | None = None
) -> LocalParameter:
    """Return a parameter on the meta device that stacks a rank's pieces of several logical tensors.

    Args:
        tensors: logical tensors with equal cuts and initial values.
        rank, ranks: index on the tensor axis, and its size.
        axes: other axes by name, for tensors that are cut along them.

    Raises ConfigError for a cut along an axis that does not cut parameters.
    """
    first = tensors[0]
    for name in first.cuts:
        if not AXES[name].cuts_parameters:
            raise ConfigError(
                f"{first.name} is cut along the axis {name}, along which gradients of all parameters are summed; "
                "register the axis with cuts_parameters=True"
            )
    for tensor in tensors:
        properties = (tensor.cuts, tensor.init_std, tensor.init_value)
        if properties != (first.cuts, first.init_std, first.init_value):
            raise ConfigError(
                f"{first.name} and {tensor.name} share a parameter, so their cuts and initial values must be equal; "
                "make a parameter for each of them"
            )
    positions = {name: (axis.rank, axis.size) for name, axis in (axes or {}).items()}
    positions["tensor"] = (rank, ranks)
    sizes = {name: size for name, (_, size) in positions.items()}
    rows = sum(tensor.cut_shape(sizes)[0] for tensor in tensors)
    pieces = tuple(tensor.cut_piece(positions) for tensor in tensors)
    spec = ParameterSpec(pieces, first.init_std, first.init_value, cut_axes=tuple(first.cuts))
    return _make_parameter(torch.empty((rows, *first.cut_shape(sizes)[1:]), dtype=dtype, device="meta"), spec)


def _make_parameter(data: torch.Tensor, spec: ParameterSpec, requires_grad: bool = True) -> LocalParameter:
    param = LocalParameter(data, requires_grad)
    param.spec = spec
    return param


def get_spec(param: torch.Tensor) -> ParameterSpec:
    """Return the spec of a parameter, which `local_parameter` must have made."""
    assert isinstance(param, LocalParameter)
    return param.spec


def materialise(module: nn.Module, storage: dict[nn.Parameter, torch.Tensor]) -> None:
    """Replace parameters of a module by parameters in the memory that `storage` has for them, of the same shape."""
    materialised = {}
    for param, tensor in storage.items():
        materialised[param] = _make_parameter(tensor, get_spec(param), param.requires_grad)
        materialised[param].adapter = getattr(param, "adapter", None)
    for submodule in module.modules():
        for name, param in submodule.named_parameters(recurse=False):
            if param in materialised:
                setattr(submodule, name, materialised[param])


def list_piece_views(spec: ParameterSpec, data: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield each piece, and a view of the piece's elements in the shape of its box.

    Args:
        data: elements of the parameter, in any shape.
    """
    flat = data.view(-1)
    start = 0
    for piece in spec.pieces:
        yield piece, flat[start : start + piece.box.count].view(piece.box.sizes)
        start += piece.box.count


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Initialise every parameter by the seed and the logical names, which gives the same model on every layout.

    Each rank draws the complete logical tensor on the parameter's device and keeps its own box, so that ranks agree
    without communication. One logical tensor is in memory at a time. CPU and CUDA draw different values.
    """
    for param in module.parameters():
        initialise_parameter(param, seed)


@torch.no_grad()
def initialise_parameter(param: nn.Parameter, seed: int) -> None:
    """Initialise one parameter, see `initialise`."""
    spec = get_spec(param)
    param.zero_()
    for piece, view in list_piece_views(spec, param.data):
        if spec.init_std is None:
            view.fill_(spec.init_value)
            continue
        for name, shape, box, target in _list_draws(piece, view):
            values = draw_initial_values(seed, name, shape, spec.init_std, view.device)
            ranges = [slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)]
            target.copy_(values[tuple(ranges)])


def _list_draws(piece: Piece, view: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
    """Yield name, shape, box and view of each tensor that is drawn in one call.

    That is the complete logical tensor, or each matrix of a stack of matrices (experts): all experts of a layer in
    float32 may not fit in memory.
    """
    box = piece.box
    if len(piece.shape) <= 2:
        yield piece.name, piece.shape, box, view
        return
    matrix_box = Box(box.offsets[1:], box.sizes[1:])
    for i, matrix_view in enumerate(view):
        yield f"{piece.name}[{box.offsets[0] + i}]", piece.shape[1:], matrix_box, matrix_view


def draw_initial_values(seed: int, name: str, shape: tuple[int, ...], std: float, device: torch.device) -> torch.Tensor:
    """Return normally distributed initial values of a logical tensor, float32 of `shape`.

    They depend only on the seed, the name and the type of the device.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "big"))
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)
