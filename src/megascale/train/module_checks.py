"""Checks of a package's modules: their tensors must be those that their inventory declares, and must be trained.

A tensor that no inventory declares is neither updated nor saved. A declared tensor that no module holds or that gets no
gradient keeps its initial values. Neither causes an error by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megascale.config import ModelConfig
from megascale.core.inventory import LogicalTensor, layer_inventory, list_tensors, resolve_layers
from megascale.core.layers import ChunkLayers
from megascale.errors import ConfigError
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.parameters import LocalParameter, get_spec

_REMEDY = "declare it in the part's inventory and make it with local_parameter (docs/extending.md)"


def list_own_modules(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a chunk whose classes are those of packages, with their paths."""
    for path, module in chunk.named_modules():
        if not type(module).__module__.startswith(("megascale.", "torch.")):
            yield path, module


def check_tensors(chunk: nn.Module, layers: ChunkLayers, model: ModelConfig, trains_all: bool = True) -> None:
    """Raise ConfigError if a module of a package holds other tensors than its inventory declares.

    The chunk may be on the meta device. Nothing is compared if all modules are built in.

    Args:
        trains_all: whether all parameters are trained; false with adapters (train.lora).
    """
    own_modules = list(list_own_modules(chunk))
    if not own_modules:
        return
    for path, module in own_modules:
        name = f"{path} ({type(module).__name__})"
        for key, parameter in module.named_parameters():
            if not isinstance(parameter, LocalParameter):
                raise ConfigError(f"{name} has the parameter {key}, which would not be trained or saved; {_REMEDY}")
            if trains_all and not parameter.requires_grad:
                raise ConfigError(
                    f"{name} has the parameter {key} with requires_grad=False, and all declared tensors are trained; "
                    "compute a constant in forward, or register a buffer with persistent=False"
                )
        own_ids = {id(parameter) for parameter in module.parameters()}
        for key, tensor in vars(module).items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and id(tensor) not in own_ids:
                raise ConfigError(f"{name} has the tensor {key}, which would not be trained or saved; {_REMEDY}")
        for submodule_path, submodule in module.named_modules():
            for key in submodule._buffers.keys() - submodule._non_persistent_buffers_set:
                full_key = f"{submodule_path}.{key}".lstrip(".")
                raise ConfigError(
                    f"{name} has the buffer {full_key}, which no checkpoint contains, so that a resumed run would "
                    "begin with its initial value; register a constant with persistent=False, and keep no other state"
                )
    names = [tensor.name for tensor in list_tensors(model)]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ConfigError(
            f"{repeated[0]} is declared more than once, and a checkpoint would contain one of the tensors; begin its "
            "name with the name of the layer, which the inventory receives"
        )
    present_names = {piece.name for parameter in chunk.parameters() for piece in get_spec(parameter).pieces}
    for tensor in _list_layer_tensors(layers, model):
        if tensor.name not in present_names:
            raise ConfigError(
                f"{tensor.name} is declared by the inventory of the layer's parts, and no module holds it; make it "
                "with local_parameter, or leave it out of the inventory. A module must not be shared by layers"
            )


def _list_layer_tensors(layers: ChunkLayers, model: ModelConfig) -> Iterator[LogicalTensor]:
    """Yield the logical tensors of the layers, or halves of layers, of a chunk."""
    specs = resolve_layers(model)
    for index, half in layers:
        inventory = layer_inventory(specs[index], index)
        attention_tensors, mlp_tensors = inventory.halves
        if half != "mlp":
            yield from attention_tensors
        if half != "attention":
            yield from mlp_tensors


def check_gradients(chunks: Sequence[nn.Module], data_parallel: DataParallel) -> None:
    """Raise ConfigError if a parameter of a package's module got no gradient in the first step."""
    for chunk_index, chunk in enumerate(chunks):
        own_parameters = {id(param) for _, module in list_own_modules(chunk) for param in module.parameters()}
        if not own_parameters:
            continue
        for parameter in data_parallel.list_unused_parameters(chunk_index):
            if id(parameter) in own_parameters:
                names = ", ".join(piece.name for piece in get_spec(parameter).pieces)
                raise ConfigError(
                    f"{names}: the first step computed no gradient of the parameter; use it in forward without "
                    ".data, detach() or NumPy, or leave it out of the module and its inventory"
                )
