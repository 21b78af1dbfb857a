"""Logits of imported models against `transformers` to rounding, in float32 and in float64, both with eager attention.

The configurations are drawn, with every scaling of rotary positions, and sequences beyond the original context length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascale.model.huggingface.export import write_folder
from megascale.model.huggingface.import_model import ImportedModel, read_folder
from megascale.model.transformer import Chunk
from tests.model.huggingface import NO_TOKENS, SIZES, chunk_of, loop_over_experts, prompt, transformers

DRAWS = 5
LENGTH = 60  # of the sequences, beyond the original and the extended context
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "seed_oss", "mixtral", "qwen3_moe")
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}  # of the maximum logit


def draw_rotary(choose: random.Random) -> dict[str, Any]:
    """Draw rotary positions with any scaling."""
    rope: dict[str, Any] = {"rope_theta": choose.choice([50.0, 1e4]), "rope_type": "default"}
    method = choose.choice(["default", "linear", "llama3", "yarn", "yarn"])
    if method == "default":
        return rope
    rope |= {"rope_type": method, "factor": choose.choice([1.5, 4.0])}
    if method != "linear":
        rope["original_max_position_embeddings"] = choose.choice([8, 16])
    if method == "llama3":
        rope |= {"low_freq_factor": choose.choice([0.5, 1.0]), "high_freq_factor": choose.choice([2.0, 4.0])}
    if method == "yarn":
        rope |= choose.choice([{}, {"truncate": False}, {"beta_fast": 4.0, "beta_slow": 0.5}])
        rope |= choose.choice([{}, {"attention_factor": 1.3}, {"mscale": 2.0, "mscale_all_dim": 0.5}])
    return rope


def draw_settings(family: str, choose: random.Random) -> dict[str, Any]:
    """Draw a configuration of a family."""
    groups = choose.choice([1, 2])
    heads = groups * choose.choice([1, 2])
    settings = SIZES | {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * choose.choice([6, 12]),
        "intermediate_size": choose.choice([17, 40]),
        "num_hidden_layers": choose.choice([1, 4]),
        "max_position_embeddings": 32,
        "rms_norm_eps": choose.choice([1e-6, 1e-3]),
        "tie_word_embeddings": choose.choice([True, False]),
        "rope_parameters": draw_rotary(choose),
    }
    if family != "qwen2" and family != "olmo2":
        settings["head_dim"] = choose.choice([8, 10])
    if family == "mixtral":
        settings |= {"num_local_experts": 5, "num_experts_per_tok": choose.choice([1, 3])}
    if family == "qwen3_moe":
        settings |= {"num_experts": 6, "num_experts_per_tok": choose.choice([1, 4]), "moe_intermediate_size": 7}
        settings |= {"norm_topk_prob": choose.choice([True, False])}
        settings |= {"mlp_only_layers": choose.choice([[], [0]]) if settings["num_hidden_layers"] > 1 else []}
    if family in ("mistral", "mixtral"):
        settings["sliding_window"] = choose.choice([None, 5, 40])
    if family in ("qwen2", "qwen3", "smollm3") and choose.random() < 0.5:
        settings |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    if family in ("llama", "qwen3", "smollm3", "olmo2", "seed_oss", "qwen3_moe"):
        settings["attention_bias"] = choose.choice([True, False])
    if family in ("llama", "smollm3", "seed_oss"):
        settings["mlp_bias"] = choose.choice([True, False])
    if family == "seed_oss":
        settings |= {"attention_out_bias": choose.choice([True, False]), "residual_dropout": 0.0}
    return settings


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Let `transformers` compute in a type where its classes name float32: positions, norms and softmax."""
    patch = pytest.MonkeyPatch()
    with patch.context() as names:
        names.setattr(torch, "float", dtype)
        names.setattr(torch, "float32", dtype)
        names.setattr(torch.Tensor, "float", lambda x: x.to(dtype))
        yield


def make_theirs(family: str, settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """Make a random model of `transformers` with eager attention."""
    config = transformers.AutoConfig.for_model(family, **(NO_TOKENS | settings))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=dtype, **loop_over_experts(family)
    ).eval()
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def make_chunk(imported: ImportedModel, dtype: torch.dtype) -> Chunk:
    """Make our model of an imported folder."""
    return chunk_of(imported.model, imported.tensors).to(dtype) if dtype == torch.float32 else _make_wide(imported)


def _make_wide(imported: ImportedModel) -> Chunk:
    narrow = chunk_of(imported.model, {name: tensor.float() for name, tensor in imported.tensors.items()})
    layers = range(imported.model.layers)
    wide = Chunk(imported.model, layers, first=True, last=True, dtype=torch.float64).to_empty(device="cpu")
    with torch.no_grad():
        for ours, source in zip(wide.parameters(), narrow.parameters(), strict=True):
            ours.copy_(source)
    return wide


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("number", range(DRAWS))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_round_trip_of_a_drawn_model(family: str, number: int, dtype: torch.dtype, tmp_path: Path) -> None:
    settings = draw_settings(family, random.Random(f"{family}-{number}"))
    tokens_BS = prompt(LENGTH, samples=2)
    theirs = make_theirs(family, settings, torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    with computing_in(dtype), torch.no_grad():
        reference = make_theirs(family, settings, dtype)
        reference.load_state_dict(theirs.state_dict())
        expected = reference(tokens_BS).logits
    imported = read_folder(tmp_path / "theirs")
    chunk = make_chunk(imported, dtype)
    with torch.no_grad():
        logits = chunk.logits(chunk(tokens_BS.t())).transpose(0, 1)
    assert logits.dtype == expected.dtype == dtype
    assert (logits - expected).abs().max() < LIMITS[dtype] * expected.abs().max()
    if dtype == torch.float32:
        write_folder(
            tmp_path / "ours",
            imported.family,
            imported.model,
            lambda names: {name: imported.tensors[name] for name in names},
            dtype=dtype,
            file_bytes=1 << 30,
        )
        before = load_file(tmp_path / "theirs" / "model.safetensors")
        after = load_file(tmp_path / "ours" / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert read_folder(tmp_path / "ours").model == imported.model
