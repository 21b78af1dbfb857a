"""Random models of the Hugging Face families, as theirs and as ours, each with what must come of it.

Drawn by a function that picks one of several values, so that a test can draw with hypothesis and the soak from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.model.huggingface.family import GELU

Choose = Callable[[Sequence[Any]], Any]
REMOVED = object()  # a key that is taken out of config.json
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GELUS = [name for name in GELU if name != "gelu_fast"]  # its constants are rounded


@dataclass(frozen=True)
class Theirs:
    """A model of transformers.

    Attributes:
        family: its model_type.
        settings: what its configuration is made of.
        edits: changes of config.json once it is written, as other versions and other people write it.
        refused: the key that must be named by a refusal; None if it must be imported and give the same logits.
        length: tokens to compare on.
    """

    family: str
    settings: dict[str, Any]
    length: int
    edits: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None


@dataclass(frozen=True)
class Ours:
    """A model of ours.

    Attributes:
        family: what it is exported as.
        keys: of [model].
        refused: the key of [model] that must be named by a refusal; None if it must be exported.
        length: tokens to compare on.
    """

    family: str
    keys: dict[str, Any]
    length: int
    refused: str | None = None


# theirs ------------------------------------------------------------------------------------------------------------


def theirs(choose: Choose) -> Theirs:
    """A model of transformers."""
    family = choose(["gpt2", "gptj", "gpt_neox", "llama", "mistral", "qwen2"])
    heads = choose([1, 2, 3, 4])
    size = choose([4, 6, 10])
    positions = choose([16, 32])
    layers, ffn = choose([1, 2, 3]), choose([7, 37, 64])
    settings: dict[str, Any] = {
        "vocab_size": choose([17, 101]),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": choose([False, True]),
    }
    if family in ("gpt2", "gptj"):
        settings |= {"n_embd": heads * size, "n_head": heads, "n_layer": layers, "n_positions": positions}
        settings |= {"n_inner": choose([None, ffn]), "activation_function": choose(_GELUS)}
        settings["layer_norm_epsilon"] = choose([1e-5, 1e-2])
        length = positions
    else:
        settings |= {"hidden_size": heads * size, "num_attention_heads": heads, "num_hidden_layers": layers}
        settings |= {"intermediate_size": ffn, "max_position_embeddings": positions}
        length = choose([positions - 3, 2 * positions])
    edits, refused = _OF_THEIRS[family](choose, settings, heads, size)
    if refused is None and choose([True, False, False, False]):
        more, refused = choose(_FOR_ALL)
        edits = edits | more
    return Theirs(family, settings, length, edits, refused)


Edited = tuple[dict[str, Any], str | None]

# Of every family: what nothing hangs on, and what must be refused; transformers ignores an unknown key.
_FOR_ALL: list[Edited] = [
    ({"use_cache": False, "architectures": ["Other"], "initializer_range": 0.5}, None),
    ({"unknown_key": [1]}, "unknown_key"),
    ({"auto_map": {"AutoModelForCausalLM": "theirs.Model"}}, None),
    ({"rope_scaling": None, "is_causal": True}, None),
    ({"is_causal": False}, "is_causal"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"per_layer_config": {"0": {"num_attention_heads": 1}}}, "per_layer_config"),
    ({"model_type": "mamba"}, "model_type"),
]


def _gpt2(choose: Choose, settings: dict[str, Any], heads: int, size: int) -> Edited:
    settings["reorder_and_upcast_attn"] = choose([False, True])
    unlike = settings["n_layer"] + 1
    return choose(
        [
            ({}, None),
            ({"n_ctx": settings["n_positions"]}, None),
            ({"layer_norm_epsilon": REMOVED, "activation_function": REMOVED}, None),
            ({"scale_attn_weights": False}, "scale_attn_weights"),
            ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
            ({"activation_function": choose(["relu", "quick_gelu", "silu"])}, "activation_function"),
            ({"num_hidden_layers": unlike}, "num_hidden_layers"),
            ({"add_cross_attention": True}, "add_cross_attention"),
        ]
    )


def _gptj(choose: Choose, settings: dict[str, Any], heads: int, size: int) -> Edited:
    settings["rotary_dim"] = choose([width for width in (2, 4, 6, 10) if width <= size])
    return choose(
        [
            ({}, None),
            ({"rope_theta": 500.0}, "rope_theta"),  # its class has one base
            ({"layer_norm_epsilon": REMOVED, "activation_function": REMOVED, "n_inner": REMOVED}, None)
            if settings["n_inner"] is None
            else ({"layer_norm_epsilon": REMOVED}, None),
            ({"rotary_dim": None}, "rotary_dim"),
            ({"activation_function": "relu"}, "activation_function"),
        ]
    )


def _shares(size: int) -> list[float]:
    """Parts of a head that may rotate: an even width."""
    return [share for share in (0.25, 0.5, 0.61, 1.0) if int(size * share) and not int(size * share) % 2]


def _rope(choose: Choose, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": choose([100.0, 10000.0, 500000.0]), **more}


def _scaled(choose: Choose) -> Edited:
    """Scaled positions, in the place where older files have them, beside the new one or alone."""
    kind = choose(["proportional", "dynamic"])
    scaling = {choose(["type", "rope_type"]): kind, "factor": 4.0}
    alone = {"rope_parameters": None} if choose([True, False]) else {}
    return {"rope_scaling": scaling, **alone}, "rope_scaling.rope_type"


def _gpt_neox(choose: Choose, settings: dict[str, Any], heads: int, size: int) -> Edited:
    shares = _shares(size)
    settings |= {
        "use_parallel_residual": choose([True, False]),
        "attention_bias": choose([True, False]),
        "hidden_act": choose(_GELUS),
        "layer_norm_eps": choose([1e-5, 1e-2]),
        "rope_parameters": _rope(choose, partial_rotary_factor=choose(shares)),
    }
    old = {"rope_parameters": None, "rotary_pct": choose(shares), "rotary_emb_base": choose([100, 10000])}
    rope = settings["rope_parameters"]
    return choose(
        [
            ({}, None),
            (old, None),
            ({"layer_norm_eps": REMOVED, "hidden_act": REMOVED, "use_parallel_residual": REMOVED}, None),
            ({"rope_scaling": dict(rope)}, None),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),  # its class reads rotary_pct
            _scaled(choose),
            ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type"),
            ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_parameters"),
            ({"rotary_emb_base": 77}, "rotary_emb_base"),
            ({"rope_theta": 77.0}, "rope_theta"),
            ({"rotary_pct": 0.75}, "rotary_pct"),
            ({"head_dim": size + 2}, "head_dim"),
            ({"hidden_act": "relu"}, "hidden_act"),
        ]
    )


def _llama_like(choose: Choose, settings: dict[str, Any], heads: int) -> list[Edited]:
    """Return the settings that Llama, Mistral and Qwen2 share."""
    settings |= {
        "num_key_value_heads": choose([n for n in (1, 2, 3, 4) if not heads % n]),
        "rms_norm_eps": choose([1e-6, 1e-2]),
        "rope_parameters": _rope(choose),
        "hidden_act": choose(["silu", "swish"]),
    }
    base = settings["rope_parameters"]["rope_theta"]
    return [
        ({}, None),
        ({}, None),
        ({"rope_parameters": None, "rope_theta": choose([100.0, 20000])}, None),
        ({"rope_parameters": None}, None),
        ({"rope_theta": base}, None),
        ({"rope_scaling": {"type": "default", "rope_theta": base}}, None),
        ({"rms_norm_eps": REMOVED, "hidden_act": REMOVED, "attention_dropout": 0.1}, None),
        _scaled(choose),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": base + 1}}, "rope_parameters.rope_theta"),
        ({"rope_theta": base + 1}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {_FULL: dict(settings["rope_parameters"])}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": choose(["relu", "gelu"])}, "hidden_act"),
    ]


def _llama(choose: Choose, settings: dict[str, Any], heads: int, size: int) -> Edited:
    settings |= {"head_dim": choose([None, 6, 10]), "pretraining_tp": choose([1, 2])}
    settings |= {"attention_bias": choose([False, True]), "mlp_bias": choose([False, True])}
    # Its class has no window.
    windowed: Edited = ({"sliding_window": 3}, "sliding_window")
    return choose([*_llama_like(choose, settings, heads), windowed])


def _mistral(choose: Choose, settings: dict[str, Any], heads: int, size: int) -> Edited:
    settings |= {"head_dim": choose([None, 6, 10]), "sliding_window": choose([None, 1, 3, 16, 32, 40])}
    local: list[Edited] = [
        ({"attention_bias": False, "mlp_bias": False}, None),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": None}, None),
        ({"sliding_window": REMOVED}, None),
        ({"use_sliding_window": False}, "use_sliding_window"),
    ]
    return choose(_llama_like(choose, settings, heads) + local)


def _qwen2(choose: Choose, settings: dict[str, Any], heads: int, size: int) -> Edited:
    layers = settings["num_hidden_layers"]
    windowed = choose([True, True, False])
    kinds = [choose([_SLIDING, _FULL]) if windowed else _FULL for _ in range(layers)]
    settings |= {
        "use_sliding_window": windowed,
        "sliding_window": choose([1, 3, 16, 40]),
        "max_window_layers": choose([0, 1, 28]),
        "layer_types": choose([kinds, None]),
    }
    pair = [_SLIDING] * layers
    local: list[Edited] = [
        ({"sliding_window": None, "layer_types": None}, None),
        ({"sliding_window": None, "layer_types": REMOVED, "use_sliding_window": True, "max_window_layers": 0}, None),
        ({"sliding_window": REMOVED, "layer_types": REMOVED, "use_sliding_window": True, "max_window_layers": 0}, None),
        ({"use_sliding_window": REMOVED, "layer_types": REMOVED}, None),
        ({"max_window_layers": REMOVED, "layer_types": REMOVED}, None),
        ({"attention_bias": False}, "attention_bias"),  # its class always has them
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": False, "layer_types": pair}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": None, "layer_types": pair}, "layer_types"),
        ({"layer_types": [_FULL] * (layers + 1)}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * layers}, "layer_types"),
    ]
    return choose(_llama_like(choose, settings, heads) + local)


_OF_THEIRS: dict[str, Callable[[Choose, dict[str, Any], int, int], Edited]] = {
    "gpt2": _gpt2,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
}


# ours --------------------------------------------------------------------------------------------------------------

_LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "mlp_bias": False}
# Of each family: the keys that make a model one of it, and single keys that make it none.
_FAMILIES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "gpt2": (
        {},
        [{"block": "parallel"}, {"positions": "rotary"}, {"window": 5}, {"head_bias": True}, {"norm": "rmsnorm"}],
    ),
    "gptj": (
        {"block": "parallel", "positions": "rotary", "rotary_interleaved": True, "attention_bias": False},
        [{"rotary_base": 500.0}, {"window": 99}, {"parallel_norms": 2}, {"attention_out_bias": True}],
    ),
    "gpt_neox": (
        {"positions": "rotary"},
        [{"rotary_interleaved": True}, {"window": 99}, {"head_bias": True}, {"activation": "swiglu"}],
    ),
    "llama": (
        {**_LLAMA, "attention_bias": False},
        [
            {"window": 5},
            {"window": 99},
            {"rotary_fraction": 0.5, "head_dim": 8},
            {"block": "parallel"},
            {"positions": "none"},
        ],
    ),
    "mistral": (
        {**_LLAMA, "attention_bias": False},
        [{"attention_bias": True}, {"mlp_bias": True}, {"rotary_interleaved": True}, {"norm": "layernorm"}],
    ),
    "qwen2": (
        {**_LLAMA, "attention_out_bias": False},
        [{"mlp_bias": True}, {"attention_out_bias": True}, {"activation": "gelu"}, {"head_bias": True}],
    ),
}


def ours(choose: Choose) -> Ours:
    """A model of ours that a family can say, or that differs from one in a key."""
    family = choose(list(_FAMILIES))
    base, obstacles = _FAMILIES[family]
    heads = choose([1, 2, 3, 4])
    size = choose([4, 8, 10])
    sequence = choose([16, 32])
    keys = {
        **base,
        "layers": choose([1, 2, 3]),
        "heads": heads,
        "hidden": heads * size,
        "sequence_length": sequence,
        "ffn_hidden": choose([7, 40]),
        "vocab_size": choose([17, 101]),
        "vocab_multiple": choose([1, 8]),
        "norm_eps": choose([1e-5, 1e-2]),
        "tied_embeddings": choose([True, False]),
    }
    if family in ("gpt2", "gptj", "gpt_neox"):
        keys |= {"activation": choose(["gelu", "gelu_tanh"]), "mlp_bias": choose([True, False])}
    else:
        keys["kv_heads"] = choose([n for n in (1, 2, 3, 4) if not heads % n])
        keys["head_dim"] = choose([None, 6])
    length = sequence
    if family not in ("gpt2", "gptj"):
        length = choose([sequence - 3, 2 * sequence])
        keys["rotary_base"] = choose([100.0, 10000.0, 500000.0])
    if family == "gpt2":
        keys |= {"attention_bias": choose([True, False]), "attention_out_bias": choose([None, True, False])}
        keys["window"] = choose([None, sequence, sequence + 9])  # felt nowhere: positions end before
    elif family == "gptj":
        keys |= {"rotary_fraction": choose(_shares(size)), "head_bias": choose([True, False])}
    elif family == "gpt_neox":
        keys |= {"block": choose(["serial", "parallel"]), "parallel_norms": choose([1, 2])}
        keys |= {"rotary_fraction": choose(_shares(size)), "attention_out_bias": choose([None, True, False])}
    elif family == "llama":
        keys |= {"attention_out_bias": choose([None, True]), "mlp_bias": choose([True, False])}
    elif family == "mistral":
        keys["window"] = choose([None, 1, 5, sequence - 1, sequence, sequence + 5])
    else:
        keys |= {"window": choose([None, 1, 5, sequence, sequence + 5]), "layer_pattern": choose(["S", "SL", "LSL"])}
        keys["attention_bias"] = choose([True, False])
    refused = None
    if choose([True, False, False, False]):
        obstacle = choose(obstacles)
        keys |= obstacle
        refused = next(iter(obstacle))
        refused = {"attention_out_bias": "out_bias"}.get(refused, refused)
    return Ours(family, keys, length, refused)
