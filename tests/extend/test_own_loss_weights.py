"""A format of a package outside `src` whose samples carry loss weights and positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megascale.data.dataset.indexed import IndexedDataset
from tests.conftest import lines
from tests.extend.packaged import install

PACKAGE = '''
"""Tokens, loss weights in quarters and positions, as the rows of a NumPy array."""

from pathlib import Path

import numpy as np

from megascale.core.batch import SampleFields
from megascale.data.dataset.formats import FORMATS
from megascale.data.dataset.token_file import TokenFile


class Rows(TokenFile):
    """An array [3, tokens]."""

    def __init__(self, entry):
        self.prefix = str(entry)
        self._rows = np.load(entry, mmap_mode="r")
        self.tokens = self._rows.shape[1]

    @property
    def stream(self):
        return self._rows[0]

    @classmethod
    def fields(cls, entry):
        return SampleFields(loss_weights=True, positions=True)

    @property
    def loss_weights(self):
        return self._rows[1]

    @property
    def positions(self):
        return self._rows[2]

    @classmethod
    def files(cls, entry):
        return [Path(entry)]


FORMATS.register("rows", Rows)
'''
EXACT = ("--train.precision=float64", "--model.positions=rotary", "--train.eval_interval=4")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path / "site", "theirs", PACKAGE, monkeypatch)


def write_rows(prefix: Path, file: Path, scale: int = 1) -> str:
    """Write the tokens of a data set with weights 0 to 3 and positions 0 to 6, and return the file's name."""
    tokens = np.asarray(IndexedDataset(prefix).stream, np.int32)
    weights = np.random.default_rng(0).integers(0, 4, len(tokens)) * scale
    with open(file, "wb") as out:
        np.save(out, np.stack([tokens, weights, np.arange(len(tokens)) % 7]).astype(np.int32))
    return str(file)


def read_metrics(run: Path, name: str) -> list[float]:
    return [record[name] for record in lines(run / "metrics.jsonl") if name in record]


def test_weights_reach_loss_metrics_and_evaluation_in_every_layout(tokens, tmp_path, tiny, megascale):
    train = write_rows(tokens / "train", tmp_path / "train.rows")
    valid = write_rows(tokens / "valid", tmp_path / "valid.rows")
    weighted = list(EXACT) + [f"--data.train={train}", f"--data.valid={valid}"]
    layout = ["--train.name=layout", "--parallel.pipeline=2", "--parallel.data=2", "--data.loader=host"]
    runs = [
        megascale("train", tiny, *EXACT, "--train.name=plain", f"--data.train={tokens}/train", "--train.stop_after=2"),
        megascale("train", tiny, *weighted, "--train.name=serial", "--data.loader=local"),
        megascale("train", tiny, *weighted, *layout, "--train.micro_batch=1", "--train.stop_after=3"),
        megascale("train", tiny, *weighted, *layout, "--train.micro_batch=1"),
    ]
    for run in runs:
        assert run.returncode == 0, run.stderr
    plain, serial, resumed = (tmp_path / "runs" / name for name in ("plain", "serial", "layout"))
    for name in ("loss", "grad_norm", "valid_loss"):
        np.testing.assert_allclose(read_metrics(resumed, name), read_metrics(serial, name), rtol=1e-9)
    sums = read_metrics(serial, "loss_weight")
    assert read_metrics(resumed, "loss_weight") == sums
    assert len(set(sums)) > 1
    assert read_metrics(serial, "loss")[0] != read_metrics(plain, "loss")[0]
    assert "loss_weight" not in lines(plain / "metrics.jsonl")[0]
    # The ledger proves tokens and their order, whatever their weights are.
    ledgers = [lines(run / "samples" / "ledger.jsonl") for run in (plain, serial, resumed)]
    assert ledgers[0] == ledgers[1][:2]
    assert ledgers[1] == ledgers[2]


def test_data_without_any_weight_ends_the_run(tokens, tmp_path, tiny, megascale):
    train = write_rows(tokens / "train", tmp_path / "train.rows", scale=0)
    run = megascale("train", tiny, *EXACT, f"--data.train={train}", "--train.max_skipped_steps=3")
    assert run.returncode == 4
    assert "3 steps in a row, up to step 3, were skipped; the loss weights of the last one's targets sum" in run.stderr
    records = lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [(record["loss"], record["skipped_steps"]) for record in records] == [("NaN", 1), ("NaN", 2), ("NaN", 3)]
    events = lines(tmp_path / "runs" / "tiny" / "events.jsonl")
    assert [record["step"] for record in events if record["event"] == "step_without_weights"] == [1]


def test_what_is_wrong_is_refused_before_the_first_step(tokens, tmp_path, tiny, megascale):
    train = write_rows(tokens / "train", tmp_path / "train.rows")
    without = "--model.positions=none"
    unused = megascale("train", tiny, without, f"--data.train={train}")
    assert unused.returncode == 2
    assert "has positions for its tokens, which model.positions=none ignores" in unused.stderr
    held_out = megascale("train", tiny, without, f"--data.valid={train}")
    assert held_out.returncode == 2
    assert "data.valid=" in held_out.stderr
    negative = write_rows(tokens / "train", tmp_path / "negative.rows", scale=-1)
    refused = megascale("train", tiny, *EXACT, f"--data.train={negative}")
    assert refused.returncode == 4
    assert "weights must be finite and at least 0" in refused.stderr
