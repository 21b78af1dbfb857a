"""Shared fixtures: one thread a worker (tests run side by side), and a small data set of random tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MEGASCALE_STRICT_TRANSITIONS"] = "1"  # what a driver's state machine does not have is an error here

TINY = """
[model]
layers = 2
hidden = 32
heads = 4
sequence_length = 16
vocab_size = 64
vocab_multiple = 8

[data]
train = ["{data}/train"]
valid = "{data}/valid"

[lr]
peak = 1e-2

[train]
runs = "{runs}"
name = "tiny"
steps = 8
micro_batch = 2
global_batch = 4
log_interval = 1
device = "cpu"
threads = 1

[checkpoint]
interval = 2

[observe]
tensorboard = false
"""


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `train` and `valid` token files: 64 tokens, each likely to follow its predecessor."""
    from megascale.data.dataset.indexed import IndexedWriter

    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(0)
    for name, documents in (("train", 40), ("valid", 4)):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(documents):
                steps = rng.choice([1, 2, 5], p=[0.8, 0.1, 0.1], size=101)
                writer.add_document([np.cumsum(steps) % 64])
    return folder


@pytest.fixture
def tiny(tokens: Path, tmp_path: Path) -> Path:
    """A configuration file of a two-layer model; its runs go to tmp_path/runs."""
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.format(data=tokens, runs=tmp_path / "runs"))
    return file


@pytest.fixture
def megascale(tmp_path: Path):
    """Runs the command line in a process of its own; returns the finished process."""

    def run(*words: object, **options) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megascale.cli.main", *map(str, words)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | options.pop("env", {})
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240, **options
        )

    return run


def lines(file: Path) -> list[dict]:
    """The records of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]
