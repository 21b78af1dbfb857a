"""GPT-NeoX (and Pythia): two norms in a parallel or serial block, rotary halves on part of a head, QKV by head."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.settings import GELU, GELU_OUT, Family, Keys, asks, no_windows, plain_heads
from megascale.model.huggingface.tensor_names import Weight, linear


def read(keys: Keys) -> dict[str, Any]:
    """See Family.read."""
    bias = keys.get("attention_bias", default=True)
    hidden, heads = keys.need("hidden_size"), keys.need("num_attention_heads")
    keys.only("head_dim", hidden // heads, "transformers would rotate by it and cut heads without it", hidden // heads)
    return {
        "layers": keys.layers("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "ffn_hidden": keys.need("intermediate_size"),
        "vocab_size": keys.need("vocab_size"),
        "sequence_length": keys.get("max_position_embeddings", default=2048),
        "block": "parallel" if keys.get("use_parallel_residual", default=True) else "serial",
        "parallel_norms": 2,
        "norm_eps": keys.get("layer_norm_eps", default=1e-5),
        "activation": keys.choice("hidden_act", GELU, "gelu"),
        **keys.rotary(0.25, "rotary_emb_base", "rotary_pct"),
        "attention_bias": bias,
        "tied_embeddings": keys.get("tie_word_embeddings", default=False),
        "dropout": keys.dropout("hidden_dropout", attention="attention_dropout"),
        "init_std": keys.get("initializer_range", default=0.02),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """See Family.write."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.sequence_length,
        "use_parallel_residual": model.block == "parallel",
        "layer_norm_eps": model.norm_eps,
        "hidden_act": GELU_OUT[model.activation],
        # transformers 5 reads the first, older versions the other two.
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


def faults(model: ModelConfig) -> list[str]:
    """See Family.faults."""
    wanted: dict[str, list[Any]] = {
        "norm": ["layernorm"],
        "activation": list(GELU_OUT),
        "positions": ["rotary"],
        "rotary_interleaved": [False],
        "head_bias": [False],
    }
    return asks(model, "GPT-NeoX", wanted) + plain_heads(model, "GPT-NeoX") + no_windows(model, "GPT-NeoX")


def weights(model: ModelConfig) -> list[Weight]:
    """See Family.weights. A parallel block's one norm is two equal ones here."""
    bias = model.attention_bias or model.out_bias
    second = "norm1" if model.block == "parallel" and model.parallel_norms == 1 else "norm2"
    table = [Weight("gpt_neox.embed_in.weight", ("embedding.token.weight",))]
    for i in range(model.layers):
        there, here = f"gpt_neox.layers.{i}", f"layers.{i}"
        qkv = [f"{here}.attention.{part}" for part in ("query", "key", "value")]
        table += linear(f"{there}.input_layernorm", f"{here}.norm1")
        table += linear(f"{there}.post_attention_layernorm", f"{here}.{second}")
        table += linear(f"{there}.attention.query_key_value", *qkv, bias=bias, heads=model.heads)
        table += linear(f"{there}.attention.dense", f"{here}.attention.output", bias=bias)
        table += linear(f"{there}.mlp.dense_h_to_4h", f"{here}.mlp.in")
        table += linear(f"{there}.mlp.dense_4h_to_h", f"{here}.mlp.out")
    table += linear("gpt_neox.final_layer_norm", "norm")
    return table if model.tied_embeddings else [*table, Weight("embed_out.weight", ("head.weight",))]


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    head="embed_out.weight",
    read_config=read,
    write=write,
    faults=faults,
    list_weights=weights,
    buffers=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
)
