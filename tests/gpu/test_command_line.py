"""Command lines of the programs that need GPUs: help pages, and errors before anything runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import graphs, replay

PROGRAMS = sorted(file.stem for file in Path(__file__).parent.glob("[!t]*.py") if "__main__" in file.read_text())


def run(monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> int | str | None:
    """Run a program in this process, and return its exit code."""
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"tests.gpu.{program}").main()
    return end.value.code


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_pages_have_the_text_of_the_program(program, monkeypatch, capsys):
    assert run(monkeypatch, program, "--help") == 0
    output = capsys.readouterr().out
    text = importlib.import_module(f"tests.gpu.{program}").__doc__
    assert text is not None
    assert text.strip() in output


@pytest.mark.parametrize("program", sorted(set(PROGRAMS) - {"abort", "recovery", "replay", "start_up"}))
def test_a_machine_without_a_gpu_is_an_error(program, monkeypatch, capsys):
    """The four other programs run on a CPU too, or measure the GPUs that exist."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, program) == 2
    assert "this program needs a GPU, and torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("graphs", ["row"], "axes='row' is unknown; choose among: tensor; pipeline; data; zero2; zero3"),
        ("graphs", ["data", "seriall"], "cases='seriall' is unknown; choose among: serial; parallel;"),
        ("same_bits", ["row"], "invalid choice: 'row'"),
        ("replay", ["--replay=3", "--repeat=3"], "unrecognized arguments: --repeat=3"),
        ("replay", [], "WORLD_SIZE=1, and replays need two processes or more; run torchrun"),
        ("documents", ["--shape=1"], "unrecognized arguments: --shape=1"),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_remedy(program, arguments, message, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run(monkeypatch, program, *arguments) == 2
    assert message in capsys.readouterr().err


def test_cases_of_replays_are_chosen_by_parts_of_their_names(capsys):
    names = list(replay.select_cases([], 2))
    assert list(replay.select_cases(["wrong"], 2)) == [name for name in names if "wrong" in name]
    assert len(replay.select_cases([], 4)) > len(names)
    with pytest.raises(SystemExit):
        replay.select_cases(["no case has this name"], 2)
    assert "is in no name of a case for 2 processes" in capsys.readouterr().err


def test_axes_of_graphs_have_settings():
    assert set(graphs.SAMPLES) <= set(graphs.AXES)
