"""A run whose samples are packed documents: printed fill, ledger over a resume, and steps without a counted token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megascale.api import load_config, train
from megascale.errors import DataError
from tests.conftest import lines
from tests.data.sample_sources import write_documents

PACKED = ["--data.document_mask=true", "--data.packing=best_fit", "--model.positions=rotary"]


@pytest.fixture
def documents(tmp_path: Path) -> str:
    return write_documents(tmp_path / "documents", np.random.default_rng(0).integers(2, 40, 80).tolist(), 64)


def test_the_fill_is_printed_and_the_ledger_is_exact_over_a_resume(
    tiny: Path, tmp_path: Path, documents: str, capsys: pytest.CaptureFixture[str], megascale
) -> None:
    settings = PACKED + [f"--data.train={documents}", f"--data.valid={documents}", "--observe.peak_tflops=1"]
    assert train(load_config(tiny, settings + ["--train.steps=5"])).finished
    output = capsys.readouterr().out
    assert "packing best_fit, at most 16 documents per sample:" in output
    assert "% full, with" in output
    run = tmp_path / "runs" / "tiny"
    records = [line for line in lines(run / "metrics.jsonl") if "loss" in line]
    assert len({line["loss_weight"] for line in records}) > 1  # steps have unequal counts
    assert records[-1]["mfu"] > 0
    resumed = megascale("train", tiny, *settings, "--train.steps=9", "--parallel.data=2", "--data.loader=host")
    assert resumed.returncode == 0, resumed.stderr
    checked = megascale("data", "ledger", run)
    assert "as the seed and the files determine it" in checked.stdout, checked.stderr
    drawn = megascale("data", "samples", run, "--step", 2)
    assert drawn.stdout.count("window") == 4
    refused = megascale("train", tiny, *settings, "--train.steps=10", "--data.packing=concatenate")
    assert refused.returncode == 4
    assert "data.packing was best_fit and is concatenate" in refused.stderr


def test_a_step_without_a_counted_token_is_skipped_and_counted(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents of one token have nothing to predict."""
    prefix = write_documents(tmp_path / "single", [1] * 400, 64)
    settings = ["--data.document_mask=true", f"--data.train={prefix}", "--train.max_skipped_steps=3"]
    with pytest.raises(DataError, match="3 steps in a row, up to step 3, were skipped"):
        train(load_config(tiny, settings))
    assert "step 1 is skipped: the loss weights of its targets sum to 0" in capsys.readouterr().out
    records = [line for line in lines(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss_weight" in line]
    assert [line["skipped_steps"] for line in records] == [1, 2, 3]
