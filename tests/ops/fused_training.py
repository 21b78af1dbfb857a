"""Whole training steps with every fused kernel, through Triton's interpreter, against the same steps without any."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import Batch
from megascale.core.layout import lay_out
from megascale.train.engine import Engine

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 4, "vocab_size": 64}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "mlp_bias": False, "attention_bias": False}
GEMMA = LLAMA | {
    "norm": "rmsnorm_zero_centred",
    "norm_placement": "both",
    "activation": "geglu_tanh",
    "qk_norm": "head",
    "embedding_multiplier": 5.0,
    "attention_multiplier": 0.5,
    "attention_softcap": 2.0,
    "logit_softcap": 3.0,
}
COHERE = LLAMA | {"norm": "layernorm_no_bias", "block": "parallel", "activation": "geglu_tanh", "logit_multiplier": 0.3}
# A layer without positions and with norms of queries and keys, behind one with fewer rotated entries.
MIXED = {
    "positions": "rotary",
    "layer_pattern": "FN",
    "layer_kinds": {"F": {"rotary_fraction": 0.5, "kv_heads": 1}, "N": {"positions": "none", "qk_norm": "head"}},
}


def steps(
    mode: str, model: dict, recompute: str, microbatches: int
) -> tuple[list[tuple[float, float]], dict[str, str]]:
    """Return loss and gradient norm of two steps, and the active kernels."""
    tree = {
        "model": SMALL | model,
        "parallel": {"recompute": recompute},
        "train": {"micro_batch": 1, "global_batch": microbatches},
        "kernels": {"mode": mode, "attention": "eager" if "attention_softcap" in model else "sdpa"},
    }
    engine = Engine(lay_out(from_tree(tree), 1), None, torch.device("cpu"))
    rows = torch.randint(0, 64, (5, 1), generator=torch.Generator().manual_seed(0))
    report = [engine.step(lambda i: Batch(rows[:-1], rows[1:]), step, 1e-3) for step in (1, 2)]
    return [(float(item.loss), float(item.grad_norm)) for item in report], engine.runtime.kernels.list_choices()


# Gradients of a second micro-batch are added by the same kernels in all models with the same kinds of parameters.
@pytest.mark.parametrize(
    ("model", "recompute", "microbatches"),
    [
        ({}, "none", 2),
        ({"dropout": 0.1}, "selective", 1),
        ({"block": "parallel"}, "none", 2),
        ({"block": "parallel"}, "activation", 1),
        ({"block": "parallel", "activation": "swiglu", "attention_bias": False}, "selective", 2),
        ({"block": "parallel", "parallel_norms": 2, "activation": "swiglu"}, "none", 1),
        (LLAMA, "activation", 2),
        (LLAMA | {"qk_norm": "head", "kv_heads": 2}, "none", 2),
        ({"block": "parallel", **MIXED}, "none", 1),
        (GEMMA, "selective", 2),
        (COHERE, "activation", 1),
    ],
)
def test_fused_steps_are_the_plain_ones(model, recompute, microbatches):
    plain, _ = steps("reference", model, recompute, microbatches)
    fused, active = steps("fused", model, recompute, microbatches)
    assert active["adamw"] == active["cross entropy"] == "triton"
    if recompute == "none":
        assert active["add norm"] == "triton"
    for local, remote in zip(fused, plain, strict=True):
        assert local == pytest.approx(remote, rel=1e-5)
    assert plain[0] != plain[-1]
