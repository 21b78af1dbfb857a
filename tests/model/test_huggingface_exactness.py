"""Logits of imported models against `transformers` to rounding, in float32 and in float64, both with eager attention.

The configurations are drawn, with every scaling of rotary positions, and sequences beyond the original context length.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascale.core.batch import Batch
from megascale.model.context import ForwardContext, KVCache
from megascale.model.huggingface.export import write_folder
from megascale.model.huggingface.family import join_weight
from megascale.model.huggingface.import_model import ImportedModel, read_folder
from megascale.model.transformer import Chunk
from megascale.parallel.parameters import get_spec, list_piece_views
from tests.model.huggingface import CONFIGS, NO_TOKENS, SIZES, chunk_of, loop_over_experts, prompt, transformers

DRAWS = int(os.environ.get("MEGASCALE_FAMILY_DRAWS", "3"))  # more of them in a campaign
LENGTH = 60  # of the sequences, beyond the original and the extended context
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "seed_oss"),
    *("ministral", "cohere", "cohere2", "granite", "olmo3", "gemma2", "gemma3_text", "phi3"),
    *("mixtral", "qwen3_moe", "gpt_oss"),
)
_WITHOUT_HEAD_DIM = ("qwen2", "olmo2", "cohere", "cohere2", "granite", "olmo3", "phi3")
_SLIDING, _FULL = "sliding_attention", "full_attention"
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


def draw_kinds(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the layers that have a window."""
    layers = settings["num_hidden_layers"]
    return {
        "sliding_window": choose.choice([1, 5, 40]),
        "layer_types": [choose.choice([_SLIDING, _FULL]) for _ in range(layers)],
    }


def draw_cohere(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the settings that Command R has of its own."""
    return {"layer_norm_eps": settings.pop("rms_norm_eps"), "logit_scale": choose.choice([0.0625, 0.3])}


def draw_cohere2(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the settings that Command R7B has of its own; some layer has positions."""
    kinds = draw_kinds(choose, settings)
    kinds["layer_types"][0] = _SLIDING
    return draw_cohere(choose, settings) | kinds


def draw_granite(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the multipliers of Granite."""
    return {
        "embedding_multiplier": choose.choice([1.0, 12.0]),
        "residual_multiplier": choose.choice([1.0, 0.22]),
        "attention_multiplier": choose.choice([1.0, 0.0078125, 0.3]),
        "logits_scaling": choose.choice([1.0, 8.0, 13.0]),
    }


def draw_ropes(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw windows, and rotary positions for both kinds of layers."""
    ropes = {_SLIDING: draw_rotary(choose), _FULL: draw_rotary(choose)}
    for rope in ropes.values():
        rope.pop("truncate", None)  # transformers reads it from the wrong table
    return draw_kinds(choose, settings) | {"rope_parameters": ropes}


def draw_gemma(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the settings that both Gemma families have of their own."""
    return {
        "final_logit_softcapping": choose.choice([None, 2.0, 30.0]),
        "query_pre_attn_scalar": choose.choice([3, settings["head_dim"], 144]),
        "hidden_activation": choose.choice(["gelu_pytorch_tanh", "gelu_new"]),
    }


def draw_gemma2(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the settings that Gemma 2 has of its own."""
    softcap = {"attn_logit_softcapping": choose.choice([None, 1.5, 50.0])}
    return softcap | draw_gemma(choose, settings) | draw_kinds(choose, settings)


def draw_gemma3(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the settings that Gemma 3 has of its own."""
    return draw_gemma(choose, settings) | draw_ropes(choose, settings)


def draw_phi3(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the settings that Phi-3 has of its own; sequences end before or after the original context."""
    fraction = choose.choice([1.0, 0.67])
    pairs = int(settings["hidden_size"] // settings["num_attention_heads"] * fraction) // 2
    rope = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": fraction}
    if choose.random() < 0.8:
        short = [choose.uniform(1, 2) for _ in range(pairs)]
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": [3 * factor for factor in short]}
        rope |= choose.choice([{}, {"attention_factor": 1.2}])
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": choose.choice([16, 100]),
        "max_position_embeddings": 128,
        "sliding_window": choose.choice([None, 5]),
    }


def draw_mixtral(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw Mixtral's experts."""
    return {"num_local_experts": 5, "num_experts_per_tok": choose.choice([1, 3])}


def draw_qwen3_moe(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw Qwen3-MoE's experts, and a dense first layer."""
    dense_layers: list[int] = []
    if settings["num_hidden_layers"] > 1:
        dense_layers = choose.choice([[], [0]])
    return {
        "num_experts": 6,
        "num_experts_per_tok": choose.choice([1, 4]),
        "moe_intermediate_size": 7,
        "norm_topk_prob": choose.choice([True, False]),
        "mlp_only_layers": dense_layers,
    }


def draw_gpt_oss(choose: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw the experts and windows of gpt-oss."""
    experts = {"num_local_experts": 5, "num_experts_per_tok": choose.choice([1, 3])}
    return draw_kinds(choose, settings) | experts


_DRAW_OF_FAMILY = {
    "gpt_oss": draw_gpt_oss,
    "mixtral": draw_mixtral,
    "qwen3_moe": draw_qwen3_moe,
    "ministral": draw_kinds,
    "cohere": draw_cohere,
    "cohere2": draw_cohere2,
    "granite": draw_granite,
    "olmo3": draw_ropes,
    "gemma2": draw_gemma2,
    "gemma3_text": draw_gemma3,
    "phi3": draw_phi3,
}


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
    if family not in _WITHOUT_HEAD_DIM:
        settings["head_dim"] = choose.choice([8, 10])
    if family in _DRAW_OF_FAMILY:
        settings |= _DRAW_OF_FAMILY[family](choose, settings)
    if family in ("mistral", "mixtral"):
        settings["sliding_window"] = choose.choice([None, 5, 40])
    if family in ("qwen2", "qwen3", "smollm3") and choose.random() < 0.5:
        settings |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    if family in (
        "llama",
        "qwen3",
        "smollm3",
        "olmo2",
        "seed_oss",
        "cohere",
        "cohere2",
        "granite",
        "olmo3",
        "qwen3_moe",
        "gpt_oss",
    ):
        settings["attention_bias"] = choose.choice([True, False])
    if family in ("llama", "smollm3", "seed_oss", "granite"):
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
    wide = Chunk(imported.model, layers, is_first=True, is_last=True, dtype=torch.float64).to_empty(device="cpu")
    with torch.no_grad():
        for ours, source in zip(wide.parameters(), narrow.parameters(), strict=True):
            ours.copy_(source)
    return wide


@pytest.mark.parametrize(("number", "dtype"), zip(range(DRAWS), cycle(LIMITS), strict=False))
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
        logits = chunk.compute_logits(chunk(tokens_BS.t())).transpose(0, 1)
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


def collect_gradients(chunk: Chunk) -> dict[str, torch.Tensor]:
    """Return the gradients of the logical tensors by name."""
    gradients = {}
    with torch.device("meta"):
        twin = Chunk(chunk.model, range(chunk.model.layers), is_first=True, is_last=True)
    for parameter, described in zip(chunk.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None
        for piece, gradient in list_piece_views(get_spec(described), parameter.grad):
            gradients[piece.name] = gradient
    return gradients


def find_gradient(name: str, parameters: dict[str, Any]) -> torch.Tensor:
    """Return the gradient of a stored tensor; transformers stacks the experts of a layer in memory."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
    if match is None:
        return parameters[name].grad
    stem, expert, part = match[1], int(match[2]), match[3]
    if part in ("w2", "down_proj"):
        return parameters[f"{stem}.down_proj"].grad[expert]
    gate, up = parameters[f"{stem}.gate_up_proj"].grad[expert].chunk(2)
    return gate if part in ("w1", "gate_proj") else up


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_transformers(family: str, tmp_path: Path) -> None:
    """The loss of training and its gradients, in float64, for one configuration of the family."""
    settings = CONFIGS[family]
    tokens_BS = prompt(31, samples=2)
    theirs = make_theirs(family, settings, torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    with computing_in(torch.float64):
        reference = make_theirs(family, settings, torch.float64)
        reference.load_state_dict(theirs.state_dict())
        logits = reference(tokens_BS[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten())
        expected.backward()
    imported = read_folder(tmp_path / "theirs")
    chunk = make_chunk(imported, torch.float64)
    inputs_SB = tokens_BS[:, :-1].t()
    targets_SB = tokens_BS[:, 1:].t()
    # As the engine does: the gradients of the logits are computed in forward.
    token_grad = torch.tensor(1 / targets_SB.numel(), dtype=torch.float64)
    losses = chunk(inputs_SB, Batch(targets=targets_SB), ForwardContext(token_grad=token_grad))
    (losses * token_grad).sum().backward()
    assert abs(losses.mean() - expected) < 1e-10 * expected.abs()
    gradients = collect_gradients(chunk)
    names = dict(reference.named_parameters())
    for weight in imported.family.list_weights(imported.model):
        gradient = find_gradient(weight.name, names)
        error = (join_weight(weight, gradients) - gradient).abs().max()
        assert error <= 1e-9 * gradient.abs().max(), weight.name
    # A backward that computes the logits again gives the same gradients.
    for parameter in chunk.parameters():
        parameter.grad = None
    chunk(inputs_SB, Batch(targets=targets_SB)).mean().backward()
    for name, gradient in collect_gradients(chunk).items():
        assert (gradient - gradients[name]).abs().max() <= 1e-10 * gradients[name].abs().max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_steps_equal_a_pass_over_the_whole_sequence(family: str, tmp_path: Path) -> None:
    """Sequences are longer than every window and original context of these configurations."""
    make_theirs(family, CONFIGS[family], torch.float32).save_pretrained(tmp_path / "theirs")
    chunk = make_chunk(read_folder(tmp_path / "theirs"), torch.float64)
    tokens_SB = prompt(40, samples=2).t()
    cache = KVCache()
    with torch.no_grad():
        whole = chunk.compute_logits(chunk(tokens_SB))
        for start, stop in [(0, 20), *((i, i + 1) for i in range(20, 40))]:
            logits = chunk.compute_logits(chunk(tokens_SB[start:stop], None, ForwardContext(cache=cache)))
            cache.length = stop
            assert (logits - whole[start:stop]).abs().max() < 1e-12 * whole.abs().max()
