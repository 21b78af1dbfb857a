"""Errors of an imported model's logits and gradients, both sides with eager attention."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megascale.core.batch import Batch
from megascale.model.context import ForwardContext
from megascale.model.huggingface.family import join_weight
from megascale.model.huggingface.import_model import read_folder
from megascale.model.transformer import Chunk
from megascale.parallel.parameters import piece_views, spec_of
from tests.model.huggingface import CONFIGS, prompt
from tests.model.test_huggingface_exactness import LENGTH, computing_in, draw_settings, make_chunk, make_theirs

ERROR_LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}  # of the maximum logit
GRADIENT_LIMIT = 1e-9  # of the maximum gradient of a tensor, in float64


def _draw_gpt2(choose: random.Random) -> dict[str, Any]:
    heads = choose.choice([1, 2, 4])
    return {
        "n_head": heads,
        "n_embd": heads * choose.choice([6, 11]),
        "n_inner": choose.choice([None, 37]),
        "n_positions": choose.choice([LENGTH, 64]),
        "activation_function": choose.choice(["gelu", "gelu_new"]),
        "tie_word_embeddings": choose.choice([True, False]),
    }


def _draw_gptj(choose: random.Random) -> dict[str, Any]:
    heads = choose.choice([1, 2, 4])
    size = choose.choice([6, 10])
    return {
        "n_head": heads,
        "n_embd": heads * size,
        "rotary_dim": choose.choice([2, 4, size]),
        "n_inner": choose.choice([None, 37]),
        "n_positions": 64,
        "activation_function": choose.choice(["gelu", "gelu_new"]),
    }


def _draw_gpt_neox(choose: random.Random) -> dict[str, Any]:
    heads = choose.choice([1, 2, 4])
    rope = {"rope_type": "default", "rope_theta": choose.choice([50.0, 1e4])}
    rope["partial_rotary_factor"] = choose.choice([0.25, 0.5, 1.0])
    return {
        "num_attention_heads": heads,
        "hidden_size": heads * choose.choice([8, 16]),
        "num_hidden_layers": choose.choice([1, 4]),
        "intermediate_size": choose.choice([17, 40]),
        "max_position_embeddings": 32,
        "use_parallel_residual": choose.choice([True, False]),
        "attention_bias": choose.choice([True, False]),
        "hidden_act": choose.choice(["gelu", "gelu_new"]),
        "tie_word_embeddings": choose.choice([True, False]),
        "rope_parameters": rope,
    }


_DRAW_OLDER = {"gpt2": _draw_gpt2, "gptj": _draw_gptj, "gpt_neox": _draw_gpt_neox}


def draw_family(family: str, number: int, seed: int = 0) -> dict[str, Any]:
    """Return the settings of a draw. The suite has the first five draws of seed 0 of the newer families."""
    choose = random.Random(f"{family}-{number}" if seed == 0 else f"{seed}-{family}-{number}")
    if family in _DRAW_OLDER:
        layers = "num_hidden_layers" if family == "gpt_neox" else "n_layer"
        return CONFIGS[family] | {layers: choose.choice([1, 3])} | _DRAW_OLDER[family](choose)
    return draw_settings(family, choose)


def measure_logits(family: str, settings: dict[str, Any], folder: Path) -> dict[torch.dtype, float]:
    """Return the maximum error of the logits over the maximum logit, in float32 and float64.

    Args:
        folder: where the model is written; it must be empty.
    """
    tokens_BS = prompt(LENGTH, samples=2)
    theirs = make_theirs(family, settings, torch.float32)
    theirs.save_pretrained(folder)
    imported = read_folder(folder)
    errors = {}
    for dtype in ERROR_LIMITS:
        with computing_in(dtype), torch.no_grad():
            reference = make_theirs(family, settings, dtype)
            reference.load_state_dict(theirs.state_dict())
            expected = reference(tokens_BS).logits
        chunk = make_chunk(imported, dtype)
        with torch.no_grad():
            logits = chunk.logits(chunk(tokens_BS.t())).transpose(0, 1)
        assert logits.dtype == expected.dtype == dtype
        errors[dtype] = _compare(logits, expected)
    return errors


def measure_gradients(family: str, folder: Path) -> float:
    """Return the maximum error of a gradient over the tensor's maximum gradient, in float64, for one configuration."""
    settings = CONFIGS[family]
    tokens_BS = prompt(31, samples=2)
    theirs = make_theirs(family, settings, torch.float32)
    theirs.save_pretrained(folder)
    with computing_in(torch.float64):
        reference = make_theirs(family, settings, torch.float64)
        reference.load_state_dict(theirs.state_dict())
        logits = reference(tokens_BS[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten()).backward()
    imported = read_folder(folder)
    chunk = make_chunk(imported, torch.float64)
    targets_SB = tokens_BS[:, 1:].t()
    token_grad = torch.tensor(1 / targets_SB.numel(), dtype=torch.float64)
    losses = chunk(tokens_BS[:, :-1].t(), Batch(targets=targets_SB), ForwardContext(token_grad=token_grad))
    (losses * token_grad).sum().backward()
    gradients = _collect_gradients(chunk)
    theirs_by_name = dict(reference.named_parameters())
    # The name of GPT-NeoX's head depends on the release of transformers.
    theirs_by_name[imported.family.head] = reference.get_output_embeddings().weight
    errors = []
    for weight in imported.family.list_weights(imported.model):
        expected = theirs_by_name[weight.name].grad
        errors.append(_compare(join_weight(weight, gradients), expected))
    return max(errors)


def _collect_gradients(chunk: Chunk) -> dict[str, Tensor]:
    gradients = {}
    with torch.device("meta"):
        twin = Chunk(chunk.model, range(chunk.model.layers), first=True, last=True)
    for parameter, described in zip(chunk.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None
        for piece, gradient in piece_views(spec_of(described), parameter.grad):
            gradients[piece.name] = gradient
    return gradients


def _compare(result: Tensor, expected: Tensor) -> float:
    """Return the maximum difference over the maximum value; infinite for NaN."""
    error = (result - expected).abs().max() / expected.abs().max()
    return float(torch.nan_to_num(error, nan=torch.inf))
