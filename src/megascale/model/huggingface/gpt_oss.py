"""gpt-oss: attention sinks, clamped SwiGLU, biases everywhere, and windows in every other layer.

Files hold the experts of a layer as stacks, with the columns of gate and up projection alternating. Released files have
experts in MXFP4; those must be converted to bfloat16 first.
"""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.core.layer_spec import ExpertsSpec
from megascale.model.huggingface.family import ConfigKeys, StackOrder, StoredWeight, linear_weights
from megascale.model.huggingface.layer_rules import list_windows
from megascale.model.huggingface.llama_like import LlamaLike
from megascale.model.huggingface.mixture import Mixture
from megascale.ops.activation import SWIGLU_ALPHA, SWIGLU_LIMIT


def _read(keys: ConfigKeys) -> dict[str, Any]:
    keys.require_value("swiglu_alpha", SWIGLU_ALPHA, "model.activation=swiglu_clamped has one slope", SWIGLU_ALPHA)
    keys.require_value("swiglu_limit", SWIGLU_LIMIT, "model.activation=swiglu_clamped has one limit", SWIGLU_LIMIT)
    if keys.get("rope_scaling") is None and keys.get("rope_parameters") is None:
        raise keys.make_error(
            "rope_parameters",
            None,
            "without it transformers scales positions by yarn with factor 32; write the positions of the model into "
            "rope_parameters",
        )
    return {
        "number": keys.get("num_local_experts", "num_experts", default=128),
        "top_k": keys.get("num_experts_per_tok", "experts_per_token", default=4),
        "normalize": "selected",
        "biases": True,
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_local_experts": model.expert_settings.number,
        "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": SWIGLU_LIMIT,
    }


def _list_experts(hf_name: str, name: str, spec: ExpertsSpec, hidden: int) -> list[StoredWeight]:
    """Return the router and the stacks of one layer."""
    into, out = f"{name}.experts.in", f"{name}.experts.out"
    matrices, width = spec.input_matrices, spec.width
    return [
        *linear_weights(f"{hf_name}.router", f"{name}.router", bias=False),
        StoredWeight(f"{hf_name}.router.bias", (f"{name}.router.logit.bias",)),
        # [hidden, width, matrices], the last two joined
        StoredWeight(
            f"{hf_name}.experts.gate_up_proj",
            (f"{into}.weight",),
            order=StackOrder((matrices, width, hidden), ((2,), (1, 0))),
        ),
        StoredWeight(
            f"{hf_name}.experts.gate_up_proj_bias", (f"{into}.bias",), order=StackOrder((matrices, width), ((1, 0),))
        ),
        StoredWeight(
            f"{hf_name}.experts.down_proj", (f"{out}.weight",), order=StackOrder((hidden, width), ((1,), (0,)))
        ),
        StoredWeight(f"{hf_name}.experts.down_proj_bias", (f"{out}.bias",)),
    ]


GPT_OSS = Mixture(
    LlamaLike(
        "gpt_oss",
        "GptOssForCausalLM",
        "gpt-oss",
        kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        rope_base=150000.0,
        activation="swiglu_clamped",
        biases="shared",
        has_bias_by_default=True,
        has_sinks=True,
        divides_hidden=False,
        mlp="experts",
        layers=list_windows(lambda keys, layers: [i % 2 == 0 for i in range(layers)], default_window=128),
        ignored_keys=frozenset({"initial_context_length"}),
    ),
    module="mlp",
    names=("", "", ""),
    read=_read,
    write=_write,
    settings=("number", "top_k"),
    required={"biases": True},
    list_experts=_list_experts,
).make_family()
