"""Loads of experts: the figures of a layer, and damaged records. `test_pages.py` has the heat map in a browser."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import DataError
from megascale.observe.dashboard.expert_loads import read_expert_loads

SETTINGS = {"parallel": {"tensor": 2, "expert": 2}}


def write_counts(run: Path, counts: dict[int, Any], extra: str = "") -> Path:
    """Write a run with the counts of some steps."""
    run.mkdir()
    lines = [
        json.dumps({"step": step, "time": time.time(), "loss": 1.0, "seconds": 1.0, "expert_counts": value})
        for step, value in counts.items()
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines + [extra, ""]))
    (run / "config.toml").write_text("[parallel]\ntensor = 2\nexpert = 2\nexperts_over = 'data'\n")
    return run


def test_figures_of_a_layer(tmp_path):
    run = write_counts(tmp_path / "run", {10: [[1] * 8], 20: [[4, 4, 0, 0, 0, 0, 0, 0], [1] * 8]})
    loads = read_expert_loads(run, None, SETTINGS)
    assert (loads["step"], loads["steps"]) == (20, [10, 20])
    skewed, even = loads["layers"]
    assert skewed == {"entropy": pytest.approx(1 / 3), "dead": 6, "load": 4.0, "rank_load": 4.0, "rank": 0}
    assert even == {"entropy": pytest.approx(1.0), "dead": 0, "load": 1.0, "rank_load": 1.0, "rank": 0}
    assert read_expert_loads(run, 10, {})["layers"][0]["rank_load"] is None
    with pytest.raises(DataError, match="step 15 of run has no counts"):
        read_expert_loads(run, 15, SETTINGS)


@pytest.mark.parametrize("value", [[], [[]], "x", [[1], [1, 2]], [[-1, 2]], [["a"]], {"a": 1}, [1, 2], None])
def test_damaged_counts_are_left_out(tmp_path, value):
    run = write_counts(tmp_path / "run", {10: value, 20: [[3, 5]]}, extra='{"step": 30, "expert_counts": [[1,')
    assert read_expert_loads(run, None, {})["steps"] == [20]
    assert read_expert_loads(tmp_path / "missing", None, {})["counts"] == []
