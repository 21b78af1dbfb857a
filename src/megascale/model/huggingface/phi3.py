"""Phi-3 and Phi-4: fused input matrices, longrope, and rotary positions on a part of each head (Phi-4 mini)."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys
from megascale.model.huggingface.layer_rules import LayerRules, make_shared_window_rules
from megascale.model.huggingface.llama_like import LlamaLike

_WINDOW_RULES = make_shared_window_rules(None)
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def _read_layers(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Return the window.

    Raises DataError if the original context length of a table differs from that outside of the table, to which
    transformers gives priority.
    """
    outer = keys.get(_ORIGINAL_LENGTH, default=4096)
    for name in ("rope_scaling", "rope_parameters"):
        inner = keys.get(name, default={}).get(_ORIGINAL_LENGTH, outer)
        if inner != outer:
            raise keys.make_error(
                f"{name}.{_ORIGINAL_LENGTH}", inner, f"but {_ORIGINAL_LENGTH} outside of the table is {outer!r}"
            )
    return _WINDOW_RULES.read(keys, layers)


def _write_layers(model: ModelConfig) -> dict[str, Any]:
    # The default of pad_token_id may lie outside the vocabulary.
    config = _WINDOW_RULES.write(model) | {"pad_token_id": None}
    if model.rotary_scaling is not None and model.rotary_scaling.original_length is not None:
        config[_ORIGINAL_LENGTH] = model.rotary_scaling.original_length
    return config


PHI3 = LlamaLike(
    "phi3",
    "Phi3ForCausalLM",
    "Phi-3",
    norm_eps=1e-5,
    rope_types=("default", "longrope"),
    has_partial_rotary=True,
    is_fused=True,
    dropout_keys=("resid_pdrop", "embd_pdrop"),
    declares_head_dim=False,
    layer_rules=LayerRules(_read_layers, _write_layers, _WINDOW_RULES.find_faults),
    required_values={"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
).make_family()
