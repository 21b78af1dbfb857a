"""Held-out losses by formula: windows of all data-parallel ranks, means, weights, and bits per byte."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megascale import api
from megascale.cli.trained_run import print_evaluation
from megascale.config import Config, from_tree
from megascale.core.batch import Batch
from megascale.data.dataset import manifest
from megascale.data.dataset.formats import FORMATS
from megascale.data.dataset.indexed import IndexedWriter
from megascale.errors import ConfigError, DataError
from megascale.train import evaluation
from megascale.train.evaluation import Evaluation, evaluate_file
from tests.data.dataset.test_sample_fields import FieldFile
from tests.data.dataset.test_sample_fields import write as write_fields

LENGTH, MICRO_BATCH = 8, 2


class Engines:
    """Engines of some data-parallel ranks, for which the loss of a token is its id."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.rounds = [0] * ranks
        self.log: list[str] = []

    def make(self, rank: int) -> Any:
        def sum_losses(batch: Batch[torch.Tensor]) -> torch.Tensor:
            assert batch.targets is not None
            assert batch.targets.shape == (LENGTH, MICRO_BATCH)
            assert batch.targets.is_contiguous()
            self.rounds[rank] += 1
            self.log.append("losses")
            losses = batch.targets.where(batch.targets >= 0, 0).double()
            if batch.loss_weights is None:
                return losses.sum()[None]
            weights = batch.loss_weights.double()
            return torch.stack([(losses * weights).sum(), weights.sum()])

        return SimpleNamespace(
            device=torch.device("cpu"),
            data_rank=rank,
            layout=SimpleNamespace(grid=SimpleNamespace(replicas=self.ranks)),
            gather_parameters=lambda: self.log.append("gather"),
            sum_losses=sum_losses,
        )


def configure() -> Config:
    model = {"sequence_length": LENGTH, "vocab_size": 1000, "positions": "rotary"}
    return from_tree({"model": model, "train": {"micro_batch": MICRO_BATCH}})


def write(prefix: Path, tokens: int) -> str:
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add(np.arange(tokens))
    return str(prefix)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 16, 17, 41, 48])
def test_each_token_is_a_target_of_one_rank(tmp_path: Path, ranks: int, tokens: int) -> None:
    engines = Engines(ranks)
    prefix = write(tmp_path / "valid", tokens)
    results = [evaluate_file(engines.make(rank), configure(), prefix) for rank in range(ranks)]
    assert {result.tokens for result in results} == {tokens}
    assert all(result.complete for result in results)
    # The engine's sums are of all ranks; here each rank has its own part.
    assert sum(result.loss for result in results) == pytest.approx((tokens - 1) / 2)
    windows = -(-tokens // LENGTH)
    assert engines.rounds == [-(-windows // (MICRO_BATCH * ranks))] * ranks
    assert engines.log[0] == "gather"


def test_a_part_of_the_windows_is_spread_over_the_file(tmp_path: Path) -> None:
    prefix = write(tmp_path / "valid", 41)  # six windows, the last of one token
    for samples, windows in ((3, [0, 2, 4]), (5, [0, 1, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5])):
        ids = [token for window in windows for token in range(8 * window, min(8 * window + 8, 41))]
        result = evaluate_file(Engines(1).make(0), configure(), prefix, samples=samples)
        expected = Evaluation(pytest.approx(np.mean(ids)), len(ids), None, None, complete=len(windows) == 6)
        assert result == expected
    strided = evaluate_file(Engines(1).make(0), configure(), prefix, stride=3)
    assert (strided.loss, strided.tokens) == (pytest.approx(20.0), 41)
    with pytest.raises(DataError, match="held-out file"):
        evaluate_file(Engines(1).make(0), configure(), write(tmp_path / "empty", 0), option="--data")


def test_bits_per_byte_need_the_complete_file_and_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "valid", 41)
    sizes: Any = object()
    part = SimpleNamespace(bytes=100, lost_bytes=5, compressed=sizes)
    monkeypatch.setattr(evaluation, "find_part", lambda name: part if name == prefix else None)
    result = evaluate_file(Engines(1).make(0), configure(), prefix)
    assert result.bits_per_byte == pytest.approx(manifest.compute_bits_per_byte(20.0, 41, 100, 5))
    assert (result.compressed, result.complete) == (sizes, True)
    partial = evaluate_file(Engines(1).make(0), configure(), prefix, samples=5)
    assert (partial.bits_per_byte, partial.compressed, partial.complete) == (None, None, False)


def test_loss_weights_make_a_weighted_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "npz", FieldFile)
    monkeypatch.setattr(evaluation, "check_fields", lambda *arguments: None)
    monkeypatch.setattr(evaluation, "find_part", lambda name: json)  # a weighted loss has no bits per byte
    prefix = write_fields(tmp_path / "valid.npz", 21, [0, 8, 16])
    result = evaluate_file(Engines(1).make(0), configure(), prefix)
    ids = np.arange(21)
    mean = pytest.approx((ids * ids).sum() / ids.sum())
    assert result == Evaluation(mean, 21, None, None, complete=True, weight_sum=ids.sum() / 4)
    part = evaluate_file(Engines(1).make(0), configure(), prefix, samples=2)
    assert (part.complete, part.tokens) == (False, 16)
    zero = write_fields(tmp_path / "zero.npz", 21, [0, 8, 16], weights=np.zeros(21))
    with pytest.raises(
        DataError, match=r"^--data: the loss weights of the 21 targets evaluated in .*zero\.npz sum to 0$"
    ):
        evaluate_file(Engines(1).make(0), configure(), zero, option="--data")


@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_within_documents_says_so(masked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedWriter(tmp_path / "valid", np.uint16) as writer:
        for number in range(6):
            writer.add([number, 2, 3])
    model = {"sequence_length": LENGTH, "vocab_size": 1000, "positions": "rotary"}
    tree = {"model": model, "train": {"micro_batch": MICRO_BATCH}, "data": {"document_mask": masked}}
    result = evaluate_file(Engines(1).make(0), from_tree(tree), str(tmp_path / "valid"))
    assert result.within_documents == masked
    assert result.weight_sum == (12 if masked else None)
    print_evaluation(result)
    assert ("data.document_mask=true" in capsys.readouterr().out) == masked


def test_an_empty_name_is_not_the_file_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--file is empty; name a token file, or omit the option"):
        api.evaluate(tmp_path, file="")
