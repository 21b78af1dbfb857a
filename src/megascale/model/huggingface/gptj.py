"""GPT-J: parallel block with one norm, rotary pairs of neighbours on part of a head, a bias on the logits."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.settings import (
    GELU,
    GELU_OUT,
    Family,
    Keys,
    asks,
    fraction_of,
    no_windows,
    plain_heads,
    rotary_width,
)
from megascale.model.huggingface.tensor_names import Weight, linear


def read(keys: Keys) -> dict[str, Any]:
    """See Family.read."""
    hidden, heads = keys.need("n_embd", "hidden_size"), keys.need("n_head", "num_attention_heads")
    return {
        "layers": keys.layers("n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "ffn_hidden": keys.get("n_inner", default=4 * hidden),
        "vocab_size": keys.need("vocab_size"),
        "sequence_length": keys.need("n_positions", "max_position_embeddings"),
        "block": "parallel",
        "norm_eps": keys.get("layer_norm_epsilon", default=1e-5),
        "activation": keys.choice("activation_function", GELU, "gelu_new"),
        "positions": "rotary",
        "rotary_fraction": fraction_of(keys.need("rotary_dim"), hidden // heads),
        "rotary_interleaved": True,
        "attention_bias": False,
        "head_bias": True,
        "tied_embeddings": keys.get("tie_word_embeddings", default=False),
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
        "rotary_dim": rotary_width(model),
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": GELU_OUT[model.activation],
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }


def faults(model: ModelConfig) -> list[str]:
    """See Family.faults."""
    wanted: dict[str, list[Any]] = {
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
    return asks(model, "GPT-J", wanted) + plain_heads(model, "GPT-J") + no_windows(model, "GPT-J")


def weights(model: ModelConfig) -> list[Weight]:
    """See Family.weights."""
    table = [Weight("transformer.wte.weight", ("embedding.token.weight",))]
    for i in range(model.layers):
        there, here = f"transformer.h.{i}", f"layers.{i}"
        table += linear(f"{there}.ln_1", f"{here}.norm1")
        for name, part in (("q", "query"), ("k", "key"), ("v", "value")):
            table += linear(f"{there}.attn.{name}_proj", f"{here}.attention.{part}", bias=False)
        table += linear(f"{there}.attn.out_proj", f"{here}.attention.output", bias=False)
        table += linear(f"{there}.mlp.fc_in", f"{here}.mlp.in")
        table += linear(f"{there}.mlp.fc_out", f"{here}.mlp.out")
    table += linear("transformer.ln_f", "norm")
    if not model.tied_embeddings:
        table.append(Weight("lm_head.weight", ("head.weight",)))
    return [*table, Weight("lm_head.bias", ("head.bias",))]


GPTJ = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    prefix="transformer.",
    head="lm_head.weight",
    read_config=read,
    write=write,
    faults=faults,
    list_weights=weights,
    buffers=r"\.attn\.(bias|masked_bias|embed_positions)$",
)
