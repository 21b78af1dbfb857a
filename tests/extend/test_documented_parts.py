"""The examples of docs/extending.md and docs/extending-runtime.md, put into one package and trained with."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megascale.data.dataset.indexed import IndexedDataset
from tests.conftest import lines
from tests.extend.packaged import install
from tests.forked import Forked

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text() for name in ("extending.md", "extending-runtime.md"))
EXAMPLES = re.findall(r"^## (.*?)$.*?^```python\n(.*?)^```", PAGES, re.M | re.S)


@pytest.fixture
def package(tmp_path, monkeypatch):
    parts = [code for title, code in EXAMPLES if title != "From a notebook"]
    return install(tmp_path / "site", "documented", "\n".join(parts), monkeypatch)


def test_a_run_with_all_of_them(package, megascale, tiny, tokens, tmp_path):
    np.save(tmp_path / "train.npy", IndexedDataset(tokens / "train").stream)
    arguments = [
        f"--data.train={tmp_path}/train.npy",
        "--model.activation=squared_relu",
        "--parallel.schedule=zero_bubble",
        "--train.loss=z_loss",
        "--train.callbacks=patience",
        "--observe.sinks=printed",
        "--train.steps=60",
        "--train.eval_interval=1",
        "--train.eval_samples=2",
        "--lr.schedule=in_thirds",
        "--lr.peak=1.0",  # which makes it worse, so that patience ends
        "--checkpoint.interval=0",
    ]
    done = megascale("train", tiny, *arguments)
    assert done.returncode == 130, done.stderr
    assert "held-out loss 1 " in done.stdout
    held_out = [
        record["valid_loss"] for record in lines(tmp_path / "runs/tiny/metrics.jsonl") if "valid_loss" in record
    ]
    best = min(range(len(held_out)), key=held_out.__getitem__)
    assert len(held_out) - best - 1 in (3, 4)  # the run ends after the next step
    arguments = ["--resilience.cluster=telling", "--parallel.data=1", "--train.name=told", "--checkpoint.linger=0"]
    result = megascale("launch", tiny, *arguments)
    assert result.returncode == 0, result.stderr
    assert "a node is asked for" in result.stdout


def test_the_notebooks_example_runs(tmp_path):
    code = dict(EXAMPLES)
    process = Forked(["--version"], cwd=tmp_path, before=code["A loss"] + code["From a notebook"])
    output, _ = process.communicate(timeout=120)
    assert process.wait() == 0, output
    assert int(output.splitlines()[0]) > 1000
