"""Choice of captured chunks, from the configuration alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale import config as configuration
from megascale.config.parts import ACTIVATIONS
from megascale.core.grid import Grid
from megascale.core.rank_memory import explain_no_graphs


def why(*settings: str, data: int = 1, tensor: int = 1) -> str:
    tree = configuration.load(None, ["model.preset=gpt2-124m", "train.global_batch=16"] + list(settings))
    return explain_no_graphs(tree, Grid(tensor=tensor, data=data))


def test_small_micro_batches_are_and_large_ones_gain_nothing():
    assert why("train.micro_batch=4") == ""
    large = ("model.preset=gpt-13b", "train.micro_batch=8")
    assert "longer than its launches" in why(*large)
    assert why("model.preset=gpt-13b", "train.micro_batch=2", tensor=2) == ""  # each rank has half of it to do
    assert "longer than its launches" in why("model.preset=gpt-13b", "train.micro_batch=2")
    assert why(*large, "kernels.graphs=on") == ""


@pytest.mark.parametrize("graphs", ["auto", "on"])
def test_what_cannot_be_captured(graphs):
    requested = f"kernels.graphs={graphs}"
    assert why(requested, tensor=2) == ""
    assert "only overlap.tensor=fused" in why(requested, "overlap.tensor=async", tensor=2)
    assert "dropout" in why(requested, "model.dropout=0.1")
    for zero in ("parallel.zero=2", "parallel.zero=3"):
        assert why(requested, zero, data=2) == ""
        assert why(requested, zero, tensor=2) == ""
        assert f"{zero} cuts graphs" in why(requested, zero, data=2, tensor=2)
    rowwise = (requested, "train.linear_precision=float8_rowwise")
    assert why(*rowwise, "parallel.zero=2", data=2) == ""
    assert "makes copies of all" in why(*rowwise, "parallel.zero=3", data=2)
    assert why("kernels.graphs=off") == "kernels.graphs=off"


def test_a_part_from_outside_is_not_captured_unless_its_user_says_so():
    """It may draw random numbers, which a replay would repeat without a word."""
    ACTIVATIONS.register("noisy", replace(ACTIVATIONS["gelu"]))
    try:
        reason = why("model.activation=noisy", "train.micro_batch=4")
        assert "model.activation=noisy is registered by a package" in reason
        assert why("model.activation=noisy", "train.micro_batch=4", "kernels.graphs=on") == ""
    finally:
        ACTIVATIONS.remove("noisy")
