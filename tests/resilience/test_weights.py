"""Checksums: copies agree in a calm run, and a flipped bit is noticed where it happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.api import load_config, train
from megascale.core.status import read_status
from megascale.errors import TrainingError
from megascale.train import weights
from megascale.train.weights import digest, sum_bits


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.data())
def test_any_single_flipped_bit_changes_the_sum(seed, kind, data):
    flat = torch.randn(257, generator=torch.Generator().manual_seed(seed)).to(kind)
    unchanged = flat[:5].clone()
    before = digest(sum_bits([flat, unchanged]))
    width = flat.element_size() * 8
    full = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    location, bit = data.draw(st.integers(0, 256)), data.draw(st.integers(0, width - 2))
    flat[location : location + 1].view(full).bitwise_xor_(1 << bit)
    assert digest(sum_bits([flat, unchanged])) != before


def test_a_large_tensor_is_summed_in_pieces(monkeypatch):
    """torch would copy all of it to int64: 35 GiB for the weights of a model of 4.7 billion parameters."""
    flat = torch.randn(30, 35, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole = sum_bits([flat, flat[1]])
    monkeypatch.setattr(weights, "SUMMED_ELEMENTS", 100)
    widest = 0
    original = torch.Tensor.sum

    def sum_counted(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, x.numel())
        return original(x, *args, **options)

    monkeypatch.setattr(torch.Tensor, "sum", sum_counted)
    assert torch.equal(sum_bits([flat, flat[1]]), whole)
    assert widest == 100


def inject(run: Path, **fault: object) -> None:
    (run / "faults").mkdir(parents=True, exist_ok=True)
    (run / "faults" / "a.json").write_text(json.dumps(fault))


def test_a_flipped_weight_stops_the_run_before_anything_is_saved(tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    inject(run, kind="flip-weight", rank=0, step=5)
    with pytest.raises(TrainingError, match="flipped bit"):
        train(load_config(tiny, ["--resilience.faults=true", "--resilience.checksum_interval=2"]))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-2", "step-4"]
    assert (run / "faults" / "a.injected").exists()


def test_without_resilience_faults_nothing_is_injected(tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    inject(run, kind="exception", rank=0, step=2)
    assert train(load_config(tiny)).finished
    assert (run / "faults" / "a.json").exists()


def test_copies_agree_until_one_is_flipped(tiny, tmp_path, megascale):
    """Two data-parallel ranks; what rank 1 holds of rank 0's shard is flipped before the sum over step 10 is taken."""
    arguments = ["--parallel.data=2", "--resilience.checksum_interval=2", "--train.steps=6"]
    run = tmp_path / "runs" / "tiny"

    def sums() -> list[str]:
        result = [read_status(run / "status" / f"rank-{r}.status") for r in range(2)]
        return [s.checksum for s in result if s is not None]

    assert megascale("train", tiny, *arguments).returncode == 0
    calm = sums()
    assert calm[0] == calm[1]
    assert calm[0].startswith("4:")
    inject(run, kind="flip-weight", rank=1, step=11, copy=True)
    more = ["--train.steps=12", "--resilience.faults=true", "--checkpoint.interval=0", "--checkpoint.at_end=false"]
    megascale("train", tiny, *arguments, *more)
    flipped = sums()
    assert [s.partition(":")[0] for s in flipped] == ["10", "10"]
    assert flipped[0] != flipped[1]
