"""gpt-oss: attention sinks, clamped SwiGLU, biases on all linear layers, and a window in every second layer.

Files store the experts of a layer as one stack, in which columns of gate and up projection alternate. Released files
hold experts in MXFP4, which must be converted to bfloat16 before import.
"""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.core.layer_spec import ExpertsSpec
from megascale.model.huggingface.family import ConfigKeys, StackOrder, StoredWeight, list_linear_weights
from megascale.model.huggingface.layer_rules import make_listed_window_rules
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
    inner = f"{name}.experts.in"
    outer = f"{name}.experts.out"
    matrix_count = spec.input_matrices
    width = spec.width
    # The file has gate and up projection as [hidden, width x matrices], and their biases as [width x matrices].
    gate_up_order = StackOrder((matrix_count, width, hidden), ((2,), (1, 0)))
    gate_up_bias_order = StackOrder((matrix_count, width), ((1, 0),))
    # The file has the down projection as [width, hidden].
    down_order = StackOrder((hidden, width), ((1,), (0,)))
    hf_experts = f"{hf_name}.experts"
    return [
        *list_linear_weights(f"{hf_name}.router", f"{name}.router", has_bias=False),
        StoredWeight(f"{hf_name}.router.bias", (f"{name}.router.logit.bias",)),
        StoredWeight(f"{hf_experts}.gate_up_proj", (f"{inner}.weight",), stack_order=gate_up_order),
        StoredWeight(f"{hf_experts}.gate_up_proj_bias", (f"{inner}.bias",), stack_order=gate_up_bias_order),
        StoredWeight(f"{hf_experts}.down_proj", (f"{outer}.weight",), stack_order=down_order),
        StoredWeight(f"{hf_experts}.down_proj_bias", (f"{outer}.bias",)),
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
        has_divisible_hidden=False,
        mlp="experts",
        layer_rules=make_listed_window_rules(
            lambda keys, layers: [i % 2 == 0 for i in range(layers)], default_window=128
        ),
        ignored_keys=frozenset({"initial_context_length"}),
    ),
    experts_module="mlp",
    matrix_names=("", "", ""),
    read=_read,
    write=_write,
    settings=("number", "top_k"),
    required_settings={"biases": True},
    list_experts=_list_experts,
).make_family()
