"""The lines of `megascale timeline` about waits: longest first, with the reason and the rank that caused each."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.observe.analysis import step_timeline
from megascale.observe.analysis.step_timeline import StepTimeline, build_timeline
from megascale.observe.store import tables
from tests.observe.test_step_timeline import three_stages


class _NoTables:
    """Replaces the tables of a run. The test makes the steps."""

    def __init__(self, run: object) -> None: ...

    def __enter__(self) -> _NoTables:
        return self

    def __exit__(self, *error: object) -> None: ...


def run_timeline(monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """Return the output for a step in which rank 2 waits 46 ms for rank 1, which waits 39 ms for rank 0."""
    timeline: StepTimeline = build_timeline(1, three_stages(), [0, 1, 2], view="pipeline", stages=3)
    monkeypatch.setattr(tables, "SpanTables", _NoTables)
    monkeypatch.setattr(step_timeline, "read_step_timeline", lambda *arguments: timeline)
    result = CliRunner().invoke(app, ["timeline", "run"] + list(options))
    assert result.exit_code == 0, result.output
    return result.output


def test_each_wait_is_a_line_with_its_reason(monkeypatch):
    lines = [line for line in run_timeline(monkeypatch).splitlines() if " in forward" in line and " from " in line]
    assert lines[0] == (
        "    46.00 ms  rank 2 in forward of micro-batch 0, from 1.00 ms: bubble: rank 1 had not yet sent it: "
        "in forward of micro-batch 0, which itself waited; rank 0 caused it"
    )
    # Rank 0 is both the sender and the cause, so it is named once.
    assert lines[1] == (
        "    39.00 ms  rank 1 in forward of micro-batch 0, from 1.00 ms: bubble: rank 0 had not yet sent it: "
        "in forward of micro-batch 0"
    )
    milliseconds = [float(line.split()[0]) for line in lines]
    assert milliseconds == [46.0, 39.0, 2.0, 2.0]


def test_only_the_longest_waits_are_shown(monkeypatch):
    assert run_timeline(monkeypatch, "--waits", "1").count(" ms  rank ") == 1
    assert " ms  rank " not in run_timeline(monkeypatch, "--waits", "0")
    (wait,) = json.loads(run_timeline(monkeypatch, "--waits", "1", "--json"))["waits"]
    assert (wait["rank"], wait["on"], wait["root"], wait["seconds"]) == (2, 1, 0, pytest.approx(0.046))
