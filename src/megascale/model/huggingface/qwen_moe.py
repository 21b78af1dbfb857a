"""Qwen3-MoE: Qwen3 with experts in all layers, or in all but the first layers, which are then dense."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys, list_windowed_layers
from megascale.model.huggingface.layer_rules import LayerRules, make_shared_window_rules
from megascale.model.huggingface.llama_like import LlamaLike
from megascale.model.huggingface.mixture import Mixture


def _read(keys: ConfigKeys) -> dict[str, Any]:
    keys.require_value("decoder_sparse_step", 1, "layers of experts must follow each other", default=1)
    dense_layers = keys.get("mlp_only_layers", default=[])
    if sorted(dense_layers) != list(range(len(dense_layers))):
        raise keys.make_error("mlp_only_layers", dense_layers, "only the first layers may be dense")
    return {
        "number": keys.get("num_experts", "num_local_experts", default=128),
        "top_k": keys.get("num_experts_per_tok", default=8),
        "width": keys.get("moe_intermediate_size", default=768),
        "normalize": "selected" if keys.get("norm_topk_prob", default=False) else "none",
        "dense_layers": len(dense_layers),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    settings = model.expert_settings
    return {
        "num_experts": settings.number,
        "moe_intermediate_size": settings.width or model.ffn,
        "norm_topk_prob": settings.normalize == "selected",
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(settings.dense_layers)),
    }


def _read_window(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    # transformers ignores max_window_layers in this family. Reading a key accepts it.
    keys.get("max_window_layers")
    # null means no window.
    window = keys.get_nullable("sliding_window", default=4096)
    if not keys.get("use_sliding_window", default=False) or window is None:
        return {}
    return {"window": window}


def _write_window(model: ModelConfig) -> dict[str, Any]:
    has_window = any(list_windowed_layers(model))
    return {"use_sliding_window": has_window, "sliding_window": model.window if has_window else None}


QWEN3_MOE = Mixture(
    LlamaLike(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3-MoE",
        kv_heads=4,
        biases="shared",
        qk_norm="head",
        mlp="experts",
        layer_rules=LayerRules(_read_window, _write_window, make_shared_window_rules(None).find_faults),
    ),
    experts_module="mlp",
    matrix_names=("gate_proj", "up_proj", "down_proj"),
    read=_read,
    write=_write,
    settings=("number", "top_k", "width", "normalize", "dense_layers"),
).make_family()
