"""Wrong arguments of campaigns: errors that name the key, the value and the remedy, before a job starts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.chaos.__main__ import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["foreign", "--trainer=nope"], "--trainer=nope is unknown; choose among: ddp"),
        (["foreign", "--kind=nope"], "--kind=nope is in no name of a fault; choose a part of: kill"),
        (["hang", "--case=nope"], "--case='nope' is unknown; choose among: stopped rank"),
        (["hang", "--runs=0"], "Invalid value for '--runs'"),
        (["nothing"], "Commands: faults, hour, hang"),
    ],
)
def test_wrong_arguments_are_errors_with_a_remedy(arguments: list[str], message: str) -> None:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
