"""Random models of transformers for the tests, quietly and without a network; skips where the package is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

from megascale.model.transformer import Chunk  # noqa: E402
from tests.chaos.soak.huggingface import chunk_of as chunk_of  # noqa: E402

CLOSE = 1e-4  # largest difference of logits in float32
VOCAB = 101
NO_TOKENS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCAB}
# One odd shape a family: what `small` makes without further settings.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 21, "n_head": 3, "n_layer": 2, "n_positions": 32, "n_inner": 37},
    "gptj": {"n_embd": 42, "n_head": 3, "n_layer": 2, "n_positions": 32, "n_inner": 37, "rotary_dim": 6},
    "gpt_neox": {**SIZES, "intermediate_size": 37, "max_position_embeddings": 32, "hidden_size": 40},
    "llama": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
    },
    "mistral": {
        **SIZES,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "sliding_window": 5,
    },
    "qwen2": {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 21,
        "max_position_embeddings": 32,
        "sliding_window": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
    },
    "qwen3_moe": {
        **SIZES,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 11,
        "mlp_only_layers": [0],
    },
    "gpt_oss": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 22,
        "max_position_embeddings": 32,
        "sliding_window": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "truncate": False,
        },
    },
    "olmo2": {**SIZES, "num_key_value_heads": 2, "intermediate_size": 37, "max_position_embeddings": 32},
    "seed_oss": {
        **SIZES,
        "hidden_size": 30,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
    },
    "ministral": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere": {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "logit_scale": 0.7,
    },
    "cohere2": {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "logit_scale": 0.7,
    },
    "granite": {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "olmo3": {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    },
    "gemma2": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "sliding_window": 4,
        "tie_word_embeddings": False,  # else its texts repeat one token
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 7,
    },
    "gemma3_text": {
        **SIZES,
        "tie_word_embeddings": False,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
    },
    "phi3": {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "sliding_window": 12,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.67,
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 4.5],
        },
    },
    "smollm3": {
        **SIZES,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
        "no_rope_layers": [1, 0, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}


def loop_over_experts(family: str) -> dict[str, str]:
    """Arguments of a model of transformers: its grouped GEMMs take certain sizes and types only."""
    return {"experts_implementation": "eager"} if family in ("mixtral", "qwen3_moe", "gpt_oss") else {}


def small(family: str, seed: int = 0, **settings: object):
    """A random model of a family; norms and biases are random too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **(NO_TOKENS | CONFIGS[family] | settings))
    model = transformers.AutoModelForCausalLM.from_config(config, **loop_over_experts(family)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def load(folder: Path):
    """A folder as users load it; every tensor of the model must come from the folder."""
    model, result = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(result.values()), result
    if loop_over_experts(model.config.model_type):
        model.set_experts_implementation("eager")
    return model.eval()


def prompt(length: int = 24, samples: int = 3) -> torch.Tensor:
    """Random tokens [samples, length]."""
    return torch.randint(0, VOCAB, (samples, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def difference(chunk: Chunk, theirs, length: int = 24) -> float:
    """Largest difference between our logits and theirs."""
    tokens_BS = prompt(length)
    ours = chunk.compute_logits(chunk(tokens_BS.t())).transpose(0, 1)
    expected = theirs(tokens_BS).logits
    assert expected.abs().max() > 0.5  # else all logits near zero would pass
    return float((ours - expected).abs().max())
