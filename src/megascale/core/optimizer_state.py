"""How much an optimizer keeps beside the master weights: from what it declares (config/optimizers.py). No torch."""

from __future__ import annotations

from math import prod

from megascale.config import ModelConfig
from megascale.config.optimizers import OPTIMIZERS
from megascale.core import flops


def layer_matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Logical matrices of one layer, by name within it."""
    h, d = model.hidden, model.head_size
    q, k = model.heads * d, model.kv * d
    attention = {"query": (q, h), "key": (k, h), "value": (k, h), "output": (h, q)}
    mlp = {"in": (model.ffn, h), "out": (h, model.ffn)} | ({"gate": (model.ffn, h)} if model.gated else {})
    named = {f"attention.{name}.weight": shape for name, shape in attention.items()}
    return named | {f"mlp.{name}.weight": shape for name, shape in mlp.items()}


def state_elements(
    optimizer: str, model: ModelConfig, parameters: int, layers: int, tables: int, tensor: int = 1
) -> int:
    """Elements of state that `optimizer` keeps for a part of the model.

    Args:
        parameters: elements of all its tensors; layers: how many layers are in it.
        tables: elements of its matrices outside layers, embeddings and output.
        tensor: tensor-parallel ranks that cut the layers' matrices.
    """
    kept, h = OPTIMIZERS[optimizer].state, model.hidden
    each = len(kept("norm.weight", (h,)))
    found = parameters * each + tables * (len(kept("embedding.token.weight", (model.padded_vocab, h))) - each)
    for name, shape in layer_matrices(model).items():
        found += layers * prod(shape) // tensor * (len(kept(f"layers.0.{name}", shape)) - each)
    return found


def checkpoint_elements(optimizer: str, model: ModelConfig) -> int:
    """Elements of a checkpoint: master weights, and what the optimizer keeps of them."""
    everything = flops.parameters(model)
    tables = everything - flops.parameters(model, embeddings=False) - (model.vocab if model.head_bias else 0)
    return everything + state_elements(optimizer, model, everything, model.layers, tables)
