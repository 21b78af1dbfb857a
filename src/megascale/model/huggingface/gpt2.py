"""GPT-2: serial block, LayerNorm, learned positions, one fused Conv1D for query, key and value."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.settings import GELU, GELU_OUT, Family, Keys, asks, no_windows, plain_heads
from megascale.model.huggingface.tensor_names import Weight, linear


def read(keys: Keys) -> dict[str, Any]:
    """See Family.read."""
    keys.only("scale_attn_weights", True, "scores without the usual scale cannot be represented", default=True)
    keys.only("scale_attn_by_inverse_layer_idx", False, "scores scaled by layer cannot be represented", default=False)
    keys.only("add_cross_attention", False, "cross-attention cannot be represented", default=False)
    hidden = keys.need("n_embd", "hidden_size")
    return {
        "layers": keys.layers("n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": keys.need("n_head", "num_attention_heads"),
        "ffn_hidden": keys.get("n_inner", default=4 * hidden),
        "vocab_size": keys.need("vocab_size"),
        # transformers has no n_ctx; the oldest files have nothing else.
        "sequence_length": keys.get("n_positions", "max_position_embeddings") or keys.need("n_ctx"),
        "norm_eps": keys.get("layer_norm_epsilon", default=1e-5),
        "activation": keys.choice("activation_function", GELU, "gelu_new"),
        "tied_embeddings": keys.get("tie_word_embeddings", default=True),
        "dropout": keys.dropout("resid_pdrop", "embd_pdrop", attention="attn_pdrop"),
        "init_std": keys.get("initializer_range", default=0.02),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """See Family.write."""
    return {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.sequence_length,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": GELU_OUT[model.activation],
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }


def faults(model: ModelConfig) -> list[str]:
    """See Family.faults."""
    wanted: dict[str, list[Any]] = {
        "block": ["serial"],
        "norm": ["layernorm"],
        "activation": list(GELU_OUT),
        "positions": ["learned"],
        "head_bias": [False],
    }
    return asks(model, "GPT-2", wanted) + plain_heads(model, "GPT-2") + no_windows(model, "GPT-2")


def weights(model: ModelConfig) -> list[Weight]:
    """See Family.weights."""
    table = [
        Weight("transformer.wte.weight", ("embedding.token.weight",)),
        Weight("transformer.wpe.weight", ("embedding.position.weight",)),
    ]
    for i in range(model.layers):
        there, here = f"transformer.h.{i}", f"layers.{i}"
        qkv = [f"{here}.attention.{part}" for part in ("query", "key", "value")]
        table += linear(f"{there}.ln_1", f"{here}.norm1")
        table += linear(f"{there}.attn.c_attn", *qkv, transposed=True)
        table += linear(f"{there}.attn.c_proj", f"{here}.attention.output", transposed=True)
        table += linear(f"{there}.ln_2", f"{here}.norm2")
        table += linear(f"{there}.mlp.c_fc", f"{here}.mlp.in", transposed=True)
        table += linear(f"{there}.mlp.c_proj", f"{here}.mlp.out", transposed=True)
    table += linear("transformer.ln_f", "norm")
    return table if model.tied_embeddings else [*table, Weight("lm_head.weight", ("head.weight",))]


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    head="lm_head.weight",
    read_config=read,
    write=write,
    faults=faults,
    list_weights=weights,
    buffers=r"\.attn\.(bias|masked_bias)$",
)
