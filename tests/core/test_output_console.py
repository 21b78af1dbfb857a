"""Tables of the commands: no word is cut, on terminals of any width and in pipes, and brackets stay."""

from __future__ import annotations

import io
import resource
import signal
import sys
from pathlib import Path

import pytest
import typer
from rich.table import Table
from typer.testing import CliRunner

from megascale.cli import main
from megascale.cli.main import app
from megascale.config import reference
from megascale.core.output_console import OutputConsole
from megascale.errors import ConfigError
from megascale.resilience.driver.state.job_state import JobState
from megascale.resilience.driver.state.journal import Journal

NAME = "model.layers.0.attention.output.weight"
PROSE = "the job stopped since no node of the cluster answered for a while, and no spare was available to take over"


def print_table(**options: object) -> list[str]:
    table = Table("tensor", "state", "reason", title="checkpoint")
    table.add_row(NAME, "committed", PROSE)
    table.add_row("model.norm", "lost", "")
    stream = io.StringIO()
    console = OutputConsole(file=stream, highlight=False, **options)
    console.print(table)
    output = stream.getvalue()
    console.print(table)
    assert stream.getvalue() == 2 * output  # a print leaves the table as it is
    return output.splitlines()


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_pipe_receives_whole_words() -> None:
    lines = print_table()
    assert sum(NAME in line for line in lines) == 1
    assert max(map(len, lines)) < 160  # prose is wrapped
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("width", [90, 120])
def test_a_terminal_shrinks_prose_before_names(width: int) -> None:
    lines = print_table(force_terminal=True, color_system=None, width=width)
    assert max(map(len, lines)) == width
    assert any(NAME in line and "committed" in line for line in lines)
    assert all(word in "\n".join(lines) for word in PROSE.split())


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_receives_a_block_per_row(width: int) -> None:
    lines = print_table(force_terminal=True, color_system=None, width=width)
    assert lines == [
        "checkpoint",
        f"tensor  {NAME}",
        "state   committed",
        f"reason  {PROSE}",
        "",
        "tensor  model.norm",
        "state   lost",
        "",
    ]


@pytest.mark.parametrize("width", [28, 36, 48, 60])
def test_lines_of_columns_that_are_not_wrapped_are_not_cut(width: int) -> None:
    table = Table("rank", "state")
    table.add_column("steps", no_wrap=True)
    table.add_column("reason")
    table.add_row("alpha", "lost", "one two three four five six", "seven eight nine ten")
    stream = io.StringIO()
    OutputConsole(file=stream, highlight=False, force_terminal=True, color_system=None, width=width).print(table)
    output = stream.getvalue()
    for text in ("alpha", "lost", "one two three four five six", "seven", "eight"):
        assert text in output


def test_columns_of_the_environment_hold_for_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert f"tensor  {NAME}" in print_table()


def test_brackets_of_descriptions_are_printed() -> None:
    output = " ".join(CliRunner().invoke(app, ["config", "checkpoint"]).output.split())
    described = [setting for setting in reference.find_settings("checkpoint") if "[" in setting.description]
    assert described
    for setting in described:
        bracket = setting.description[setting.description.index("[") :].split("]")[0]
        assert f"{bracket}]" in output


def test_brackets_of_a_run_folder_are_printed(tmp_path: Path) -> None:
    run = tmp_path / "[bold]runs" / "a"
    run.mkdir(parents=True)
    journal, _ = Journal.take(run, 0.05)
    journal.save_job(JobState("a"))
    journal.close()
    result = CliRunner().invoke(app, ["jobs", str(run.parent)])
    assert result.exit_code == 0
    assert "[bold]runs/a" in result.output


@pytest.mark.parametrize("arguments", [["examples"], ["monitoring"]])
def test_files_for_a_full_disk_are_not_left_in_parts(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of file sizes stands for a full disk."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would store incomplete bytecode of new imports
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        result = CliRunner().invoke(app, [*arguments, str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written" in str(result.exception)
    assert not [*(tmp_path / "out").iterdir()]


def test_an_error_about_a_path_of_the_user_does_not_say_that_an_input_was_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megascale", "spans", f"--source={tmp_path}"])

    def make_app() -> typer.Typer:
        open(tmp_path).close()
        raise AssertionError

    with pytest.raises(SystemExit) as end:
        main.run_app(make_app)
    assert end.value.code == ConfigError.exit_code
    message = f"{tmp_path} cannot be read or written: Is a directory; name another path"
    assert message in capsys.readouterr().err
