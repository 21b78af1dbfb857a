"""Gemma 2 and 3 (text): norms before and after attention and MLP, with gain 1 + weight; GeGLU; scaled embeddings.

Gemma 2 also has softcaps of attention scores and logits.
"""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.layer_rules import (
    make_listed_window_rules,
    make_rope_by_kind_rules,
    read_window_interval,
)
from megascale.model.huggingface.llama_like import LlamaLike, Scalar


def _write_query_scalar(model: ModelConfig) -> int:
    """Return query_pre_attn_scalar, an integer by whose inverse square root scores are multiplied.

    Without a multiplier in [model] it is the head size.
    """
    if model.attention_multiplier is None:
        return model.head_size
    return max(1, round(model.attention_multiplier**-2))


_QUERY_SCALAR = Scalar(
    "attention_multiplier",
    "query_pre_attn_scalar",
    256,
    read=lambda scalar: float(scalar**-0.5),
    write=_write_query_scalar,
    has_value=lambda model: model.attention_multiplier in (None, _write_query_scalar(model) ** -0.5),
)
_COMMON: dict[str, Any] = {
    "kv_heads": 4,
    "head_dim": 256,
    "norm": "rmsnorm_zero_centred",
    "norm_placement": "both",
    "activation": "geglu_tanh",
    "activation_key": "hidden_activation",
    "is_embedding_scaled": True,
    "is_tied": True,
    "biases": "shared",
    "ignored_keys": frozenset({"_sliding_window_pattern"}),  # transformers made layer_types of this key
}
GEMMA2 = LlamaLike(
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma 2",
    scalars=(
        _QUERY_SCALAR,
        Scalar("attention_softcap", "attn_logit_softcapping", 50.0),
        Scalar("logit_softcap", "final_logit_softcapping", 30.0),
    ),
    required_values={"use_bidirectional_attention": False},
    # Every second layer has the window. Older files have no layer_types.
    layer_rules=make_listed_window_rules(lambda keys, layers: [i % 2 == 0 for i in range(layers)]),
    **_COMMON,
).make_family()
GEMMA3 = LlamaLike(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma 3",
    qk_norm="head",
    scalars=(_QUERY_SCALAR, Scalar("logit_softcap", "final_logit_softcapping", None)),
    # The configuration class of transformers has a softcap of attention scores, which the model does not apply.
    required_values={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    layer_rules=make_rope_by_kind_rules(
        lambda keys, layers: read_window_interval(keys, layers, default=6),
        default_bases=(10000.0, 1000000.0),
        local_base_key="rope_local_base_freq",
    ),
    **_COMMON,
).make_family()
