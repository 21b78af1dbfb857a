"""GPT-2: serial block, LayerNorm, learned positions, one fused Conv1D for query, key and value."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys, Family, StoredWeight, list_linear_weights
from megascale.model.huggingface.gpt_keys import SUMMARY_KEYS, find_gpt_faults, read_gpt_keys, write_gpt_keys


def read_config(keys: ConfigKeys) -> dict[str, Any]:
    """See Family.read_config."""
    keys.require_value(
        "scale_attn_weights", True, "attention scores without the usual scale are not supported", default=True
    )
    keys.require_value(
        "scale_attn_by_inverse_layer_idx", False, "scores scaled by layer are not supported", default=False
    )
    keys.require_value("add_cross_attention", False, "cross-attention is not supported", default=False)
    length = keys.get("n_positions", "max_position_embeddings") or keys.require_count("n_ctx")
    # transformers does not read n_ctx, which is the only length in the oldest files.
    if keys.get("n_ctx", default=length) != length:
        raise keys.make_error("n_ctx", keys.get("n_ctx"), f"but n_positions={length!r} has the same meaning")
    return {
        **read_gpt_keys(keys),
        "sequence_length": length,
        "tied_embeddings": keys.get("tie_word_embeddings", default=True),
    }


def find_faults(model: ModelConfig) -> list[str]:
    """See Family.find_faults."""
    supported: dict[str, list[Any]] = {
        "block": ["serial"],
        "positions": ["learned"],
        "head_bias": [False],
    }
    return find_gpt_faults(model, "GPT-2", supported)


def list_weights(model: ModelConfig) -> list[StoredWeight]:
    """See Family.list_weights."""
    weights = [
        StoredWeight("transformer.wte.weight", ("embedding.token.weight",)),
        StoredWeight("transformer.wpe.weight", ("embedding.position.weight",)),
    ]
    for i in range(model.layers):
        hf_layer, layer = f"transformer.h.{i}", f"layers.{i}"
        qkv = [f"{layer}.attention.{part}" for part in ("query", "key", "value")]
        weights += list_linear_weights(f"{hf_layer}.ln_1", f"{layer}.norm1")
        weights += list_linear_weights(f"{hf_layer}.attn.c_attn", *qkv, is_transposed=True)
        weights += list_linear_weights(f"{hf_layer}.attn.c_proj", f"{layer}.attention.output", is_transposed=True)
        weights += list_linear_weights(f"{hf_layer}.ln_2", f"{layer}.norm2")
        weights += list_linear_weights(f"{hf_layer}.mlp.c_fc", f"{layer}.mlp.in", is_transposed=True)
        weights += list_linear_weights(f"{hf_layer}.mlp.c_proj", f"{layer}.mlp.out", is_transposed=True)
    weights += list_linear_weights("transformer.ln_f", "norm")
    if model.tied_embeddings:
        return weights
    return [*weights, StoredWeight("lm_head.weight", ("head.weight",))]


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    head_name="lm_head.weight",
    read_config=read_config,
    write_config=write_gpt_keys,
    find_faults=find_faults,
    list_weights=list_weights,
    ignored_tensors=r"\.attn\.(bias|masked_bias)$",
    ignored_keys=SUMMARY_KEYS | {"reorder_and_upcast_attn"},
)
