"""Writing of low-rank adapters as a folder that `peft` loads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from megascale.config import ModelConfig
from megascale.core.adapters import LORA_A, LORA_B, AdapterSpec, list_adapters
from megascale.errors import ConfigError
from megascale.model.huggingface.family import Family
from megascale.model.huggingface.weight_files import write_weights

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # that peft puts before the names of transformers


def find_modules(family: Family, model: ModelConfig, spec: AdapterSpec) -> dict[str, str]:
    """Return the name of the module in transformers for each matrix with an adapter, by the matrix's logical name.

    Raises ConfigError for a matrix that the family stores transposed or joined with others, because PEFT has no
    adapters for a part of a module.
    """
    modules_by_matrix = {}
    for weight in family.list_weights(model):
        if len(weight.logical_names) == 1 and not weight.is_transposed and not weight.interleaved_heads:
            modules_by_matrix[weight.logical_names[0]] = weight.name.removesuffix(".weight")
    adapted_modules = {}
    for adapter in list_adapters(model, spec):
        matrix = adapter.matrix
        if matrix.name not in modules_by_matrix:
            raise ConfigError(
                f"{family.name} of transformers stores {matrix.name} joined with other matrices, for which PEFT has no "
                "adapter; omit --adapter to write the merged model"
            )
        adapted_modules[matrix.name] = modules_by_matrix[matrix.name]
    return adapted_modules


def write_adapter(
    out: Path,
    family: Family,
    model: ModelConfig,
    spec: AdapterSpec,
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    base: str,
) -> int:
    """Write the adapters into a folder, and return the number of trained parameters.

    Args:
        out: existing folder.
        read: returns a logical tensor by name.
        dtype: type of the written weights.
        base: folder or name of the base model, for adapter_config.json.

    Raises ConfigError like `find_modules`.
    """
    modules = find_modules(family, model, spec)
    tensors = {}
    for matrix, module in modules.items():
        name = matrix.removesuffix(".weight")
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = read(name + LORA_A).to(dtype).contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = read(name + LORA_B).to(dtype).contiguous()
    write_weights(tensors, out / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules.values()}),
    }
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values())
