"""GPT-J: parallel block with one norm, a bias on the logits, interleaved rotary positions on a part of each head."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys, Family, StoredWeight, list_linear_weights
from megascale.model.huggingface.gpt_keys import SUMMARY_KEYS, find_gpt_faults, read_gpt_keys, write_gpt_keys
from megascale.model.huggingface.rotary import compute_rotary_fraction, compute_rotary_width


def read_config(keys: ConfigKeys) -> dict[str, Any]:
    """See Family.read_config."""
    model = read_gpt_keys(keys)
    head_size = model["hidden"] // model["heads"]
    return {
        **model,
        "sequence_length": keys.require_count("n_positions", "max_position_embeddings"),
        "block": "parallel",
        "positions": "rotary",
        "rotary_fraction": compute_rotary_fraction(keys.require_count("rotary_dim"), head_size),
        "rotary_interleaved": True,
        "attention_bias": False,
        "head_bias": True,
        "tied_embeddings": keys.get("tie_word_embeddings", default=False),
    }


def write_config(model: ModelConfig) -> dict[str, Any]:
    """See Family.write_config."""
    return {**write_gpt_keys(model), "rotary_dim": compute_rotary_width(model)}


def find_faults(model: ModelConfig) -> list[str]:
    """See Family.find_faults."""
    supported: dict[str, list[Any]] = {
        "block": ["parallel"],
        "parallel_norms": [1],
        "positions": ["rotary"],
        "rotary_interleaved": [True],
        "rotary_base": [10000.0],
        "attention_bias": [False],
        "out_bias": [False],
    }
    return find_gpt_faults(model, "GPT-J", supported)


def list_weights(model: ModelConfig) -> list[StoredWeight]:
    """See Family.list_weights."""
    weights = [StoredWeight("transformer.wte.weight", ("embedding.token.weight",))]
    for i in range(model.layers):
        hf_layer, layer = f"transformer.h.{i}", f"layers.{i}"
        weights += list_linear_weights(f"{hf_layer}.ln_1", f"{layer}.norm1")
        for hf_name, name in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            weights += list_linear_weights(f"{hf_layer}.attn.{hf_name}", f"{layer}.attention.{name}", has_bias=False)
        weights += list_linear_weights(f"{hf_layer}.attn.out_proj", f"{layer}.attention.output", has_bias=False)
        weights += list_linear_weights(f"{hf_layer}.mlp.fc_in", f"{layer}.mlp.in")
        weights += list_linear_weights(f"{hf_layer}.mlp.fc_out", f"{layer}.mlp.out")
    weights += list_linear_weights("transformer.ln_f", "norm")
    if not model.tied_embeddings:
        weights.append(StoredWeight("lm_head.weight", ("head.weight",)))
    return [*weights, StoredWeight("lm_head.bias", ("head.bias",))]


GPTJ = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    prefix="transformer.",
    head_name="lm_head.weight",
    read_config=read_config,
    write_config=write_config,
    find_faults=find_faults,
    list_weights=list_weights,
    ignored_tensors=r"\.attn\.(bias|masked_bias|embed_positions)$",
    ignored_keys=SUMMARY_KEYS,
    required_values={"rotary": True, "scale_attn_weights": True},
)
