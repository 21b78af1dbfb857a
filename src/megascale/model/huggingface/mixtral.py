"""Mixtral: Mistral with experts in all layers, stored one by one."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys
from megascale.model.huggingface.layer_rules import make_shared_window_rules
from megascale.model.huggingface.llama_like import LlamaLike
from megascale.model.huggingface.mixture import Mixture


def _read(keys: ConfigKeys) -> dict[str, Any]:
    jitter = keys.get("router_jitter_noise", default=0.0)
    if jitter:
        keys.notes.append(f"router_jitter_noise={jitter} is ignored: routers have no noise in training")
    return {
        "number": keys.get("num_local_experts", "num_experts", default=8),
        "top_k": keys.get("num_experts_per_tok", default=2),
        "normalize": "selected",
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"num_local_experts": model.expert_settings.number, "router_jitter_noise": 0.0}


MIXTRAL = Mixture(
    LlamaLike(
        "mixtral",
        "MixtralForCausalLM",
        "Mixtral",
        kv_heads=8,
        norm_eps=1e-5,
        rope_base=1e6,
        has_divisible_hidden=False,
        mlp="experts",
        layer_rules=make_shared_window_rules(None),
    ),
    experts_module="block_sparse_moe",
    matrix_names=("w1", "w3", "w2"),
    read=_read,
    write=_write,
    settings=("number", "top_k"),
).make_family()
