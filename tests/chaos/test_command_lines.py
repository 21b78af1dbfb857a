"""Wrong arguments of campaigns: errors that name the key, the value and the remedy, before a job starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megascale.errors import ConfigError
from tests.chaos.__main__ import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["foreign", "--trainer=nope"], "--trainer=nope is unknown; choose among: ddp"),
        (["foreign", "--kind=nope"], "--kind=nope is in no name of a fault; choose a part of: kill"),
        (["hang", "--case=nope"], "--case='nope' is unknown; choose among: stopped rank"),
        (["hang", "--runs=0"], "Invalid value for '--runs'"),
        (["nothing"], "Commands: faults, hour, hang"),
        (["continue", "--setting=nope=1"], "--setting nope=1: override '--nope=1' is not of the form"),
        (["continue", "--setting=train.batch=3"], "--setting train.batch=3: there is no key train.batch"),
    ],
)
def test_wrong_arguments_are_errors_with_a_remedy(arguments: list[str], message: str) -> None:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [["checkpoint", "--points=1"], ["loader", "--kills=1"], ["faults", "--kind=kill-rank", "--runs=1"]],
    ids=lambda arguments: arguments[0],
)
def test_a_folder_without_a_parent_is_refused_and_not_created(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*arguments, f"--folder={tmp_path}/typo/work"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(
        f"--folder={tmp_path}/typo/work: {tmp_path}/typo is not a folder; create it"
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, [*arguments, f"--folder={tmp_path}/file"])
    assert f"--folder={tmp_path}/file is a file" in str(result.exception)
