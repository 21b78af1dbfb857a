"""Errors of an imported model's logits and gradients, both sides with eager attention."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megascale.core.batch import Batch
from megascale.model.context import ForwardContext
from megascale.model.huggingface.family import join_weight
from megascale.model.huggingface.import_model import read_folder
from tests.model.huggingface import CONFIGS, prompt
from tests.model.test_huggingface_exactness import (
    LENGTH,
    collect_gradients,
    computing_in,
    draw_settings,
    find_gradient,
    make_chunk,
    make_theirs,
)

FLOAT32_LIMIT, FLOAT64_LIMIT = 1e-5, 1e-10  # of the maximum logit
MAX_ROUNDINGS = 3.0  # of `transformers` that an error in float32 may have in an ill-conditioned model
GRADIENT_LIMIT = 1e-9  # of the maximum gradient of a tensor, in float64


@dataclass(frozen=True)
class LogitErrors:
    """Maximum errors of logits over the maximum logit.

    Attributes:
        float32, float64: difference from `transformers` in the same precision.
        rounding: difference of `transformers` in float32 from `transformers` in float64.
        own_rounding: difference of our float32 from `transformers` in float64.
    """

    float32: float = 0.0
    float64: float = 0.0
    rounding: float = 0.0
    own_rounding: float = 0.0

    def find_fault(self) -> str:
        """Return which error is too large, or an empty string.

        A random model may amplify rounding, so the limit in float32 grows with the rounding of `transformers`.
        """
        if not self.float64 <= FLOAT64_LIMIT:
            return f"the logits' error in float64 is {self.float64:.1e}, above {FLOAT64_LIMIT:.0e}"
        limit = max(FLOAT32_LIMIT, MAX_ROUNDINGS * self.rounding)
        if not self.float32 <= limit:
            return f"the logits' error in float32 is {self.float32:.1e}, above {limit:.1e}"
        return ""

    def max_with(self, errors: LogitErrors) -> LogitErrors:
        """Return the larger of each error."""
        return LogitErrors(
            float32=max(self.float32, errors.float32),
            float64=max(self.float64, errors.float64),
            rounding=max(self.rounding, errors.rounding),
            own_rounding=max(self.own_rounding, errors.own_rounding),
        )


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


def measure_logits(family: str, settings: dict[str, Any], folder: Path) -> LogitErrors:
    """Return the errors of an imported model's logits.

    Args:
        folder: where the model is written; it must be empty.
    """
    tokens_BS = prompt(LENGTH, samples=2)
    theirs = make_theirs(family, settings, torch.float32)
    theirs.save_pretrained(folder)
    imported = read_folder(folder)
    errors = {}
    references = {}
    results = {}
    for dtype in (torch.float32, torch.float64):
        with computing_in(dtype), torch.no_grad():
            reference = make_theirs(family, settings, dtype)
            reference.load_state_dict(theirs.state_dict())
            expected = reference(tokens_BS).logits
        chunk = make_chunk(imported, dtype)
        with torch.no_grad():
            logits = chunk.compute_logits(chunk(tokens_BS.t())).transpose(0, 1)
        assert logits.dtype == expected.dtype == dtype
        errors[dtype] = _compare(logits, expected)
        references[dtype] = expected
        results[dtype] = logits
    exact = references[torch.float64]
    own_rounding = _compare(results[torch.float32].double(), exact)
    rounding = _compare(references[torch.float32].double(), exact)
    return LogitErrors(errors[torch.float32], errors[torch.float64], rounding, own_rounding)


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
    gradients = collect_gradients(chunk)
    theirs_by_name = dict(reference.named_parameters())
    # The name of GPT-NeoX's head depends on the release of transformers.
    theirs_by_name[imported.family.head_name] = reference.get_output_embeddings().weight
    errors = []
    for weight in imported.family.list_weights(imported.model):
        expected = find_gradient(weight.name, theirs_by_name)
        errors.append(_compare(join_weight(weight, gradients), expected))
    return max(errors)


def _compare(result: Tensor, expected: Tensor) -> float:
    """Return the maximum difference over the maximum value; infinite for NaN."""
    largest = expected.abs().max()
    error = (result - expected).abs().max()
    if largest > 0:  # an expert without tokens has no gradients
        error = error / largest
    return float(torch.nan_to_num(error, nan=torch.inf))
