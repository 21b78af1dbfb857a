"""GPT-NeoX and Pythia: parallel or serial block with two norms, rotary positions on a part of each head.

Files store queries, keys and values as one tensor, interleaved head by head.
"""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import GELU, GELU_OUT, ConfigKeys, Family, StoredWeight, list_linear_weights
from megascale.model.huggingface.gpt_keys import find_gpt_faults
from megascale.model.huggingface.rotary import read_rotary


def read_config(keys: ConfigKeys) -> dict[str, Any]:
    """See Family.read_config."""
    bias = keys.get("attention_bias", default=True)
    hidden = keys.require_count("hidden_size")
    heads = keys.require_count("num_attention_heads")
    head_size = hidden // heads
    keys.require_value(
        "head_dim", head_size, "transformers uses head_dim for positions and hidden / heads for heads", head_size
    )
    rotary = read_rotary(keys, 0.25, "rotary_emb_base", "rotary_pct")
    if "rotary_scaling" in rotary:
        method = rotary["rotary_scaling"]["method"]
        raise keys.make_error("rope_type", method, "scaled rotary positions are not supported for GPT-NeoX")
    return {
        "layers": keys.require_layers("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "ffn_hidden": keys.require_count("intermediate_size"),
        "vocab_size": keys.require_count("vocab_size"),
        "sequence_length": keys.get("max_position_embeddings", default=2048),
        "block": "parallel" if keys.get("use_parallel_residual", default=True) else "serial",
        "parallel_norms": 2,
        "norm_eps": keys.get("layer_norm_eps", default=1e-5),
        "activation": keys.translate_activation("hidden_act", GELU, "gelu"),
        **rotary,
        "attention_bias": bias,
        "tied_embeddings": keys.get("tie_word_embeddings", default=False),
        "dropout": keys.read_dropout("hidden_dropout", attention="attention_dropout"),
        "init_std": keys.get("initializer_range", default=0.02),
    }


def write_config(model: ModelConfig) -> dict[str, Any]:
    """See Family.write_config."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.sequence_length,
        "use_parallel_residual": model.block == "parallel",
        "layer_norm_eps": model.norm_eps,
        "hidden_act": GELU_OUT[model.activation],
        # transformers 5 reads rope_parameters, older versions rotary_emb_base and rotary_pct.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rotary_base,
            "partial_rotary_factor": model.rotary_fraction,
        },
        "rotary_emb_base": model.rotary_base,
        "rotary_pct": model.rotary_fraction,
        "attention_bias": model.attention_bias or model.out_bias,
        "hidden_dropout": model.dropout,
        "attention_dropout": 0.0,
    }


def find_faults(model: ModelConfig) -> list[str]:
    """See Family.find_faults."""
    supported: dict[str, list[Any]] = {
        "positions": ["rotary"],
        "rotary_interleaved": [False],
        "head_bias": [False],
    }
    return find_gpt_faults(model, "GPT-NeoX", supported)


def list_weights(model: ModelConfig) -> list[StoredWeight]:
    """See Family.list_weights. If a parallel block has one norm, that norm is stored twice."""
    has_bias = model.attention_bias or model.out_bias
    if model.block == "parallel" and model.parallel_norms == 1:
        second_norm = "norm1"
    else:
        second_norm = "norm2"
    weights = [StoredWeight("gpt_neox.embed_in.weight", ("embedding.token.weight",))]
    for i in range(model.layers):
        hf_layer, layer = f"gpt_neox.layers.{i}", f"layers.{i}"
        qkv = [f"{layer}.attention.{part}" for part in ("query", "key", "value")]
        weights += list_linear_weights(f"{hf_layer}.input_layernorm", f"{layer}.norm1")
        weights += list_linear_weights(f"{hf_layer}.post_attention_layernorm", f"{layer}.{second_norm}")
        weights += list_linear_weights(
            f"{hf_layer}.attention.query_key_value", *qkv, has_bias=has_bias, interleaved_heads=model.heads
        )
        weights += list_linear_weights(f"{hf_layer}.attention.dense", f"{layer}.attention.output", has_bias=has_bias)
        weights += list_linear_weights(f"{hf_layer}.mlp.dense_h_to_4h", f"{layer}.mlp.in")
        weights += list_linear_weights(f"{hf_layer}.mlp.dense_4h_to_h", f"{layer}.mlp.out")
    weights += list_linear_weights("gpt_neox.final_layer_norm", "norm")
    if model.tied_embeddings:
        return weights
    return [*weights, StoredWeight("embed_out.weight", ("head.weight",))]


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    head_name="embed_out.weight",
    read_config=read_config,
    write_config=write_config,
    find_faults=find_faults,
    list_weights=list_weights,
    ignored_tensors=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
    ignored_keys=frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob"}),
)
