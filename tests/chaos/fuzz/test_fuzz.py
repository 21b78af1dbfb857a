"""Some inputs of every target of `python -m tests.chaos fuzz`; the bench goes on for minutes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.fuzz.targets import TARGETS, Target

INPUTS = {"checkpoint": 15, "journal": 10}  # each of these costs tens of milliseconds


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_reader_refuses_or_reads(target: Target, tmp_path: Path) -> None:
    if target.name == "http":
        pytest.importorskip("fastapi")
    feed = target.make(tmp_path)
    for seed in range(INPUTS.get(target.name, 60)):
        feed(random.Random(seed))
