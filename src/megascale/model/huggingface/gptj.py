"""GPT-J: parallel block with one norm, rotary pairs of neighbours on part of a head, a bias on the logits."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import (
    GELU,
    GELU_OUT,
    SUMMARY_KEYS,
    ConfigKeys,
    Family,
    StoredWeight,
    find_head_faults,
    find_unsupported_values,
    find_window_faults,
    linear_weights,
)
from megascale.model.huggingface.rotary import rotary_fraction_of, rotary_width


def read(keys: ConfigKeys) -> dict[str, Any]:
    """See Family.read_config."""
    hidden, heads = keys.require_count("n_embd", "hidden_size"), keys.require_count("n_head", "num_attention_heads")
    return {
        "layers": keys.require_layers("n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "ffn_hidden": keys.get("n_inner", default=4 * hidden),
        "vocab_size": keys.require_count("vocab_size"),
        "sequence_length": keys.require_count("n_positions", "max_position_embeddings"),
        "block": "parallel",
        "norm_eps": keys.get("layer_norm_epsilon", default=1e-5),
        "activation": keys.translate("activation_function", GELU, "gelu_new"),
        "positions": "rotary",
        "rotary_fraction": rotary_fraction_of(keys.require_count("rotary_dim"), hidden // heads),
        "rotary_interleaved": True,
        "attention_bias": False,
        "head_bias": True,
        "tied_embeddings": keys.get("tie_word_embeddings", default=False),
        "dropout": keys.read_dropout("resid_pdrop", "embd_pdrop", attention="attn_pdrop"),
        "init_std": keys.get("initializer_range", default=0.02),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """See Family.write_config."""
    return {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.sequence_length,
        "rotary_dim": rotary_width(model),
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": GELU_OUT[model.activation],
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }


def faults(model: ModelConfig) -> list[str]:
    """See Family.find_faults."""
    supported: dict[str, list[Any]] = {
        "block": ["parallel"],
        "parallel_norms": [1],
        "norm": ["layernorm"],
        "activation": list(GELU_OUT),
        "positions": ["rotary"],
        "rotary_interleaved": [True],
        "rotary_base": [10000.0],
        "attention_bias": [False],
        "out_bias": [False],
    }
    return (
        find_unsupported_values(model, "GPT-J", supported)
        + find_head_faults(model, "GPT-J")
        + find_window_faults(model, "GPT-J")
    )


def weights(model: ModelConfig) -> list[StoredWeight]:
    """See Family.list_weights."""
    table = [StoredWeight("transformer.wte.weight", ("embedding.token.weight",))]
    for i in range(model.layers):
        hf_layer, layer = f"transformer.h.{i}", f"layers.{i}"
        table += linear_weights(f"{hf_layer}.ln_1", f"{layer}.norm1")
        for name, part in (("q", "query"), ("k", "key"), ("v", "value")):
            table += linear_weights(f"{hf_layer}.attn.{name}_proj", f"{layer}.attention.{part}", bias=False)
        table += linear_weights(f"{hf_layer}.attn.out_proj", f"{layer}.attention.output", bias=False)
        table += linear_weights(f"{hf_layer}.mlp.fc_in", f"{layer}.mlp.in")
        table += linear_weights(f"{hf_layer}.mlp.fc_out", f"{layer}.mlp.out")
    table += linear_weights("transformer.ln_f", "norm")
    if not model.tied_embeddings:
        table.append(StoredWeight("lm_head.weight", ("head.weight",)))
    return [*table, StoredWeight("lm_head.bias", ("head.bias",))]


GPTJ = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    prefix="transformer.",
    head="lm_head.weight",
    read_config=read,
    write_config=write,
    find_faults=faults,
    list_weights=weights,
    buffers=r"\.attn\.(bias|masked_bias|embed_positions)$",
    ignored_keys=SUMMARY_KEYS,
    required_values={"rotary": True, "scale_attn_weights": True},
)
