"""Metric sinks by value: which numbers of a record go where."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.config import from_tree
from megascale.observe import metrics
from megascale.observe.metrics import SinkRequest, TensorBoard


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) by tag."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    from tensorboard.util import tensor_util

    scalars: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("events.*")):
        for event in loading.EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                number = float(tensor_util.make_ndarray(value.tensor))
                scalars.setdefault(value.tag, []).append((event.step, number))
    return scalars


def test_tensorboard_gets_each_number_under_its_group(tmp_path):
    pytest.importorskip("tensorboard")
    sink = TensorBoard(tmp_path, 0)
    sink.write({"step": 3, "time": 1e9, "loss": 2.5, "tokens": 64, "host": "a", "epoch": 0.5})
    sink.write({"step": 4, "time": 1e9, "valid_loss": 1.25})
    sink.close()
    assert read_scalars(tmp_path) == {
        "train/loss": [(3, 2.5)],
        "progress/tokens": [(3, 64.0)],
        "progress/epoch": [(3, 0.5)],
        metrics.tensorboard_tag("valid_loss"): [(4, 1.25)],
    }


@pytest.mark.parametrize(("project", "expected"), [("mine", "mine"), (None, "run")])
def test_a_project_without_a_name_is_called_as_the_run(tmp_path, monkeypatch, project, expected):
    opened: list[tuple[str, Path]] = []
    monkeypatch.setattr(metrics, "Wandb", lambda name, run, config: opened.append((name, run)))
    observe = {"sinks": ["wandb"], "tensorboard": False} | ({} if project is None else {"wandb": project})
    list(metrics.open_sinks(SinkRequest(tmp_path / "run", from_tree({"observe": observe}), 0)))
    assert opened == [(expected, tmp_path / "run")]
