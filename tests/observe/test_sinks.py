"""Metric sinks by value: which numbers of a record go where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megascale.config import from_tree
from megascale.errors import ConfigError
from megascale.observe import metrics
from megascale.observe.metrics import SinkRequest, TensorBoard, Wandb


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
        metrics.get_metric_tag("valid_loss"): [(4, 1.25)],
    }


@pytest.mark.parametrize(("step", "hidden_from"), [(0, []), (7, [8])])
def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path, step, hidden_from):
    """The start of a session at step n hides n and later steps of earlier files; a fresh run hides none."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    sink = TensorBoard(tmp_path, step)
    sink.close()
    (file,) = tmp_path.glob("events.*")
    events = list(loading.EventFileLoader(str(file)).Load())
    assert [event.step for event in events if event.session_log.status == event.session_log.START] == hidden_from


class FakeWandb:
    """The package wandb, which keeps its calls: `init` starts a run with `log` and `finish`."""

    class Error(Exception):
        """Refusal of the service."""

    def __init__(self, refuses: bool = False) -> None:
        self.calls: list[Any] = []
        self._refuses = refuses

    def init(self, **options: Any) -> FakeWandb:
        if self._refuses:
            raise self.Error("not logged in")
        self.calls.append(options)
        return self

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self.calls.append((step, numbers))

    def finish(self) -> None:
        self.calls.append("finished")


def test_weights_and_biases_continues_a_run_and_is_finished(tmp_path, monkeypatch):
    package = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    for step in (1, 2):
        sink = Wandb("mine", tmp_path, {"train": 1})
        sink.write({"step": step, "time": 1e9, "loss": 2.5, "tokens": 64, "host": "a"})
        sink.close()
    first, *_, second = (call for call in package.calls if isinstance(call, dict))
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("mine", tmp_path.name, "allow")
    assert (first["dir"], first["config"]) == (str(tmp_path), {"train": 1})
    assert first["id"] == (tmp_path / "wandb-id").read_text().strip()
    assert len(first["id"]) == 8
    numbers = {"train/loss": 2.5, "progress/tokens": 64}  # as in TensorBoard
    assert package.calls == [first, (1, numbers), "finished", first, (2, numbers), "finished"]


def test_a_refused_run_leaves_no_identity(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(refuses=True))
    with pytest.raises(ConfigError, match=r"observe\.wandb='mine': .*not logged in.*WANDB_MODE=offline"):
        Wandb("mine", tmp_path, {})
    assert not (tmp_path / "wandb-id").exists()


@pytest.mark.parametrize(("project", "expected"), [("mine", "mine"), (None, "run")])
def test_a_project_without_a_name_is_called_as_the_run(tmp_path, monkeypatch, project, expected):
    opened: list[tuple[str, Path]] = []
    monkeypatch.setattr(metrics, "Wandb", lambda name, run, config: opened.append((name, run)))
    observe = {"sinks": ["wandb"], "tensorboard": False} | ({} if project is None else {"wandb": project})
    list(metrics.open_sinks(SinkRequest(tmp_path / "run", from_tree({"observe": observe}), 0)))
    assert opened == [(expected, tmp_path / "run")]


def test_each_metric_has_a_group():
    tags = {
        "valid_loss": "valid/loss",
        "wait_tensor_seconds": "waits/tensor_seconds",
        "loader_ring_fill": "data/ring_fill",
        "float8_clipped": "precision/clipped",
        "expert_entropy": "experts/entropy",
        "dead_experts": "experts/dead_experts",
        "loss": "train/loss",
        "memory_gib": "speed/memory_gib",
        "epoch": "progress/epoch",
        "lost": "other/lost",
    }
    assert {name: metrics.get_metric_tag(name) for name in tags} == tags


def test_records_are_lines_at_once(tmp_path):
    """A reader, and a crash, find every record that was written; a later start appends."""
    for step in (1, 2):
        sink = metrics.JsonLines(tmp_path / "metrics.jsonl")
        sink.write({"step": step, "loss": float("nan")})
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step
        sink.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": "NaN"}\n{"step": 2, "loss": "NaN"}\n'


def test_records_after_a_rotation_are_in_a_new_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    sink = metrics.JsonLines(file)
    sink.write({"step": 1})
    file.rename(tmp_path / "metrics.jsonl.1")
    sink.write({"step": 2})
    file.unlink()
    sink.write({"step": 3})
    sink.write({"step": 4})
    sink.close()
    assert (tmp_path / "metrics.jsonl.1").read_text() == '{"step": 1}\n'
    assert file.read_text() == '{"step": 3}\n{"step": 4}\n'


def test_each_sink_is_opened_once_in_the_order_of_settings(tmp_path, monkeypatch):
    opened: list[str] = []
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(metrics.SINK_FACTORIES, name, lambda request, name=name: opened.append(name))
    for observe, expected in (
        ({"tensorboard": True, "wandb": "x", "sinks": ["wandb"]}, ["tensorboard", "wandb"]),
        ({"tensorboard": False, "sinks": ["wandb", "tensorboard"]}, ["wandb", "tensorboard"]),
        ({"tensorboard": True}, ["tensorboard"]),
        ({"tensorboard": False}, []),
    ):
        opened.clear()
        monkeypatch.setattr(metrics, "has_tensorboard", lambda: True)
        list(metrics.open_sinks(SinkRequest(tmp_path, from_tree({"observe": observe}), 0)))
        assert opened == expected
