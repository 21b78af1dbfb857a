"""The lines with which a run says what is active: choices, NCCL's variables, missing packages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megascale.config import from_tree
from megascale.train import reporter as module
from megascale.train.reporter import Reporter
from megascale.train.run_folder import RunFolder


@pytest.fixture(autouse=True)
def without_nccl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what trainings in this process have set."""
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def report(folder: RunFolder, choices: dict[str, str], capsys: pytest.CaptureFixture[str]) -> tuple[dict, list[str]]:
    """Return the event and the printed lines of one rank 0."""
    reporter = Reporter(folder, is_leader=True)
    reporter.open(from_tree({"observe": {"tensorboard": False}}), 0)
    reporter.report_active(choices)
    reporter.close()
    (event,) = [json.loads(line) for line in folder.events.read_text().splitlines()]
    return event, capsys.readouterr().out.splitlines()


def test_nccl_variables_are_reported_in_order(folder, capsys, monkeypatch):
    monkeypatch.setenv("NCCL_IB_TC", "106")
    monkeypatch.setenv("NCCL_DEBUG", "x" * 300)
    monkeypatch.setenv("TORCH_NCCL_DUMP", "1")
    monkeypatch.setenv("COLUMNS", "500")
    event, printed = report(folder, {"attention": "sdpa", "layer norm": "torch", "gelu": "torch"}, capsys)
    settings = f"NCCL_DEBUG={'x' * 200} NCCL_IB_TC=106"
    assert event["event"] == "active"
    assert (event["NCCL's settings"], event["attention"]) == (settings, "sdpa")
    assert printed == [
        "active: attention: sdpa",
        "active: layer norm, gelu: torch",
        f"active: NCCL's settings: {settings}",
    ]


def test_without_nccl_variables_there_is_no_line(folder, capsys, monkeypatch):
    for name in [name for name in module.os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    event, printed = report(folder, {"attention": "sdpa"}, capsys)
    assert "NCCL's settings" not in event
    assert printed == ["active: attention: sdpa"]


@pytest.mark.parametrize(("requested", "installed"), [(True, False), (True, True), (False, False)])
def test_a_missing_tensorboard_is_a_line(folder, capsys, monkeypatch, requested, installed):
    monkeypatch.setattr(module, "has_tensorboard", lambda: installed)
    monkeypatch.setattr(module, "open_sinks", lambda request: iter(()))
    reporter = Reporter(folder, is_leader=True)
    reporter.open(from_tree({"observe": {"tensorboard": requested}}), 0)
    assert ("TensorBoard files are not written" in capsys.readouterr().out) is (requested and not installed)


def test_other_ranks_write_nothing(folder, capsys):
    reporter = Reporter(folder, is_leader=False)
    reporter.open(from_tree({}), 0)
    reporter.report_active({"attention": "sdpa"})
    reporter.write_metrics({"step": 1, "loss": 1.0})
    reporter.write_samples(1, 0, 4, "", {})
    reporter.log_line("a line")
    reporter.close()
    assert capsys.readouterr().out == ""
    assert [path for path in folder.path.rglob("*") if path.is_file()] == []


def test_a_step_is_a_line_of_the_ledger(folder):
    reporter = Reporter(folder, is_leader=True)
    reporter.write_samples(3, 8, 4, "00ff", {"since": 0})
    line = json.loads(folder.samples.read_text())
    assert line == {"step": 3, "first": 8, "count": 4, "ids": "00ff", "read": {"since": 0}}
