"""Phi-3 and Phi-4: fused tensors, longrope, and rotary positions on a part of each head (Phi-4 mini)."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys
from megascale.model.huggingface.layer_rules import LayerRules, share_window
from megascale.model.huggingface.llama_like import LlamaLike

_WINDOW = share_window(None)
_ORIGINAL = "original_max_position_embeddings"


def _read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Return the window. For transformers the outer key of the original context length has priority."""
    outer = keys.get(_ORIGINAL, default=4096)
    for name in ("rope_scaling", "rope_parameters"):
        inner = keys.get(name, default={}).get(_ORIGINAL, outer)
        if inner != outer:
            raise keys.make_error(f"{name}.{_ORIGINAL}", inner, f"but {_ORIGINAL} outside of the table is {outer!r}")
    return _WINDOW.read(keys, layers)


def _write(model: ModelConfig) -> dict[str, Any]:
    # The class's default may lie outside the vocabulary.
    written = _WINDOW.write(model) | {"pad_token_id": None}
    if model.rotary_scaling is not None and model.rotary_scaling.original_length is not None:
        written[_ORIGINAL] = model.rotary_scaling.original_length
    return written


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
    layers=LayerRules(_read, _write, _WINDOW.find_faults),
    required_values={"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
).make_family()
