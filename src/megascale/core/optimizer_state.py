"""How much an optimizer keeps beside the master weights: from what it declares (config/optimizers.py). No torch."""

from __future__ import annotations

from math import prod

from megascale.config import ModelConfig
from megascale.config.optimizers import OPTIMIZERS
from megascale.core import flops
from megascale.core.inventory import layer_inventory


def state_elements(
    optimizer: str, model: ModelConfig, parameters: int, layers: tuple[int, int], tables: int, tensor: int = 1
) -> int:
    """Elements of state that `optimizer` keeps for a part of the model.

    Args:
        parameters: elements of all its tensors; layers: how many layers' attentions are in it, and how many MLPs.
        tables: elements of its matrices outside layers, embeddings and output.
        tensor: tensor-parallel ranks that cut the layers' matrices.
    """
    kept, h = OPTIMIZERS[optimizer].state_names, model.hidden
    each = len(kept("norm.weight", (h,)))
    found = parameters * each + tables * (len(kept("embedding.token.weight", (model.padded_vocab, h))) - each)
    for count, half in zip(layers, layer_inventory(model).halves, strict=True):
        for matrix in half:
            if matrix.decay:
                found += count * prod(matrix.local_shape(tensor)) * (len(kept(matrix.name, matrix.shape)) - each)
    return found


def checkpoint_elements(optimizer: str, model: ModelConfig) -> int:
    """Elements of a checkpoint: master weights, and what the optimizer keeps of them."""
    everything = flops.parameters(model)
    tables = everything - flops.parameters(model, embeddings=False) - (model.vocab if model.head_bias else 0)
    return everything + state_elements(optimizer, model, everything, (model.layers, model.layers), tables)
