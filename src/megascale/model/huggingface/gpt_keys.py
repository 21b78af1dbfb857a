"""Conversions and checks that the families GPT-2, GPT-J and GPT-NeoX share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import (
    GELU,
    GELU_OUT,
    ConfigKeys,
    find_head_faults,
    find_unsupported_values,
    find_window_faults,
)

# Keys of GPT-2 and GPT-J for multiple-choice heads, which have no effect on the logits.
SUMMARY_KEYS = frozenset(
    f"summary_{key}" for key in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
)


def read_gpt_keys(keys: ConfigKeys) -> dict[str, Any]:
    """Return the keys of [model] that GPT-2 and GPT-J read from the same keys of config.json."""
    hidden = keys.require_count("n_embd", "hidden_size")
    return {
        "layers": keys.require_layers("n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": keys.require_count("n_head", "num_attention_heads"),
        "ffn_hidden": keys.get("n_inner", default=4 * hidden),
        "vocab_size": keys.require_count("vocab_size"),
        "norm_eps": keys.get("layer_norm_epsilon", default=1e-5),
        "activation": keys.translate_activation("activation_function", GELU, "gelu_new"),
        "dropout": keys.read_dropout("resid_pdrop", "embd_pdrop", attention="attn_pdrop"),
        "init_std": keys.get("initializer_range", default=0.02),
    }


def write_gpt_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that GPT-2 and GPT-J have in common."""
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


def find_gpt_faults(model: ModelConfig, title: str, supported: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the reasons why a model does not fit a GPT family: LayerNorm, GELU, full attention, no grouped queries.

    Args:
        title: name of the family in the reasons.
        supported: supported values of further keys of [model].
    """
    common = {"norm": ["layernorm"], "activation": list(GELU_OUT)}
    faults = find_unsupported_values(model, title, {**common, **supported})
    return faults + find_head_faults(model, title) + find_window_faults(model, title)
