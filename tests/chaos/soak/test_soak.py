"""`tests.chaos soak`: a soak that was ended goes on at a case, with the cases that the whole one would have had."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from megascale.data.loader import ring
from megascale.errors import ConfigError, TrainingError
from tests.chaos.soak import crashes as soak_crashes
from tests.chaos.soak import endurance
from tests.chaos.soak.command import PARTS, SoakCase, register, soak
from tests.chaos.soak.fault_tables import make_tables


def test_segments_without_a_user_are_listed_and_their_descriptors_closed_once(tmp_path, monkeypatch):
    """A descriptor that is closed twice may belong to another thread the second time."""
    paths = [ring.make_segment_path(tmp_path) for _ in range(2)]
    for path in paths:
        path.touch()
    closed: list[int] = []
    close = os.close

    def note_close(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(endurance, "find_dead_segments", functools.partial(ring.find_dead_segments, tmp_path))
    monkeypatch.setattr(os, "close", note_close)
    segments = endurance.list_segments()
    monkeypatch.undo()
    assert segments == set(paths)
    assert len(closed) == len(paths)


def test_going_on_at_a_case_gives_the_same_cases(tmp_path, monkeypatch, capsys):
    ran: list[tuple[str, str, int]] = []

    def case(file, name, cause, step):
        ran.append((name, cause.name, step))
        return SoakCase(name, len(ran) < 13, f"step {step}")  # the last of all fails

    monkeypatch.setattr(soak_crashes, "_case", case)
    out = tmp_path / "soak.json"
    soak(
        parts="crashes",
        count=None,
        first=1,
        seed=3,
        keep=tmp_path / "whole",
        out=out,
        minutes=None,
        every=60.0,
        resume=None,
        report=[],
    )
    full = ran[:]
    assert len(full) == PARTS["crashes"] == len({cause for _, cause, _ in full})
    with pytest.raises(TrainingError, match="1 cases did not hold: crashes: crash-9"):
        soak(
            parts="crashes",
            count=None,
            first=8,
            seed=3,
            keep=tmp_path / "rest",
            out=out,
            minutes=None,
            every=60.0,
            resume=None,
            report=[],
        )
    assert ran[len(full) :] == full[7:]
    assert "crashes 8/10" in capsys.readouterr().out


def test_a_case_that_there_is_not_or_that_needs_those_before_it_is_refused(tmp_path):
    def start(parts, first, count=None):
        soak(
            parts=parts,
            count=count,
            first=first,
            seed=0,
            keep=tmp_path,
            out=tmp_path / "soak.json",
            minutes=None,
            every=60.0,
            resume=None,
            report=[],
        )

    with pytest.raises(ConfigError, match="--first=2: each case of journal depends on those before it"):
        start("crashes,journal", 2)
    with pytest.raises(ConfigError, match="--first=4: layouts has 3 cases"):
        start("layouts", 4, count=3)
    assert not list(tmp_path.iterdir())


def test_a_pause_longer_than_a_call_goes_on_in_the_next_one():
    report = {"seed": 1, "every": 120.0}

    def divide(available):
        return endurance.divide_pause(report, random.Random("1-0"), available)

    full, remaining = divide(1e9)
    assert remaining == 0
    assert full > endurance.LEAST + 20
    assert divide(20.0) == (20.0, full - 20)
    report["waited"] = 20.0
    assert divide(1e9) == (full - 20, 0)
    report["waited"] = full - 1
    assert divide(1e9) == (endurance.LEAST, 0)  # since the start of the call


def test_calls_of_a_soak_add_up(tmp_path, monkeypatch):
    """Each call adds faults of the numbers that follow. The summary counts all calls, also one that was killed."""
    out = tmp_path / "soak.json"
    report = endurance.load_report(120.0, 7, out)
    rows = [("kill-rank", 1.0, 1, ""), ("kill-rank", 3.0, 0, ""), ("stop-rank", 11.0, 1, ""), ("kill-rank", 0, 0, "x")]
    for number, (kind, seconds, lost, problem) in enumerate(rows):
        row = {"number": number, "kind": kind, "problem": problem}
        outcome = {"total": seconds, "cost": seconds + lost, "lost": lost, "kept": 1, "seconds": {"detect": seconds}}
        report["faults"].append(row if problem else row | outcome)
    report["calls"] = [
        {"seconds": 1800.0, "problem": "", "remains": []},
        {"seconds": 900.0, "problem": "fault 3: x", "remains": ["process 5: sleep", "folder or file /t/a"]},
    ]
    summary = endurance.summarise(report)
    assert (summary["calls"], summary["hours"], summary["faults"]) == (2, 0.75, 4)
    assert (summary["problems"], summary["remains"]) == (1, 2)
    assert summary["kinds"]["kill-rank"] == {
        "faults": 3,
        "recovered": 2,
        "mean_seconds": 2.0,
        "mean_cost": 2.5,
        "mean_lost_steps": 0.5,
    }
    assert summary["kinds"]["segfault"] == {"faults": 0, "recovered": 0}
    out.write_text(json.dumps(report))
    assert endurance.load_report(120.0, 7, out) == report
    assert endurance.read_settings(out) == (7, 120.0)
    with pytest.raises(ConfigError, match="holds a soak of --seed=7 --every=120; name another file"):
        endurance.load_report(120.0, 8, out)

    def resume(file, minutes):
        soak(
            parts="crashes",
            count=None,
            first=1,
            seed=0,
            keep=None,
            out=out,
            minutes=minutes,
            every=60.0,
            resume=file,
            report=[],
        )

    called = []

    def endure(*arguments: Any) -> dict[str, Any]:
        called.append(arguments)
        return report

    monkeypatch.setattr(endurance, "endure", endure)
    with pytest.raises(TrainingError, match="3 problems"):
        resume(out, 2.0)
    assert called == [(2.0, 120.0, 7, out)]
    with pytest.raises(ConfigError, match="is not the report of a soak"):
        resume(tmp_path / "other.json", 2.0)
    with pytest.raises(ConfigError, match="needs --minutes"):
        resume(out, None)


def make_call(faults: int, seconds: float, problem: str = "", remains: Sequence[str] = ()) -> dict[str, Any]:
    call = {"began": 1795830005.0, "load": [1.0, 2.25], "cores": 2, "seconds": seconds, "faults": faults}
    return call | {"problem": problem, "remains": list(remains)}


def make_fault(kind: str, cost: float, lost: int = 0, problem: str = "") -> dict[str, Any]:
    fault = {"kind": kind, "problem": problem}
    return fault if problem else fault | {"cost": cost, "lost": lost}


def test_reports_of_several_soaks_are_added_into_one_table(tmp_path):
    first = {
        "seed": 64,
        "every": 120.0,
        "calls": [make_call(2, 1800.0), make_call(1, 900.0, "fault 2: a | b\nc", ["process 5: sleep"])],
        "faults": [
            make_fault("kill-rank", 1.0),
            make_fault("kill-node", 3.0),
            make_fault("stop-rank", 0.0, problem="fault 2"),
        ],
    }
    second = {
        "seed": 65,
        "every": 120.0,
        "calls": [make_call(3, 900.0)],
        "faults": [
            make_fault("kill-rank", 2.0, lost=1),
            make_fault("segfault", 4.5, lost=3),
            make_fault("stop-rank", 11.0),
        ],
    }
    files = []
    for report in (first, second):
        files.append(tmp_path / f"seed-{report['seed']}.json")
        files[-1].write_text(json.dumps(report))
    rows = [[cell.strip() for cell in line.split(" | ")] for line in make_tables(files).splitlines()]
    parts, kinds, (summary,) = rows[2:5], rows[8:-2], rows[-1]
    assert parts[0][:4] == ["| seed-64 (seed 64)", "1", "2026-11-28 01:40", "30.0"]
    assert parts[0][4:] == ["1.0 to 2.2", "2", "2: 1 kill-rank, 1 kill-node", "2", "none", "none |"]
    assert parts[1][6:] == ["1: 1 stop-rank", "0", "fault 2: a \\| b c", "process 5: sleep |"]
    assert parts[2][6] == "3: 1 kill-rank, 1 stop-rank, 1 segfault"
    assert kinds == [
        ["| kill-rank", "2", "2", "1.50 s", "2.00 s", "0.50", "1 |"],
        ["| stop-rank", "2", "1", "11.00 s", "11.00 s", "0.00", "0 |"],
        ["| segfault", "1", "1", "4.50 s", "4.50 s", "3.00", "3 |"],
        ["| kill-agent", "0", "0", "", "", "", "|"],
        ["| kill-node", "1", "1", "3.00 s", "3.00 s", "0.00", "0 |"],
        ["| each kill: kill-rank, segfault", "3", "3", "2.50 s", "4.50 s", "1.33", "3 |"],
        ["| each hang: stop-rank", "2", "1", "11.00 s", "11.00 s", "0.00", "0 |"],
        ["| all", "6", "5", "4.30 s", "11.00 s", "0.80", "3 |"],
    ]
    assert summary == (
        "Sum: 1.00 hours in 3 parts of 2 soaks (seeds 64, 65), 6 faults, 5 recovered, 1 parts with a problem, "
        "1 remains."
    )
    with pytest.raises(ConfigError, match="is given twice"):
        make_tables([files[0], files[0]])
    (tmp_path / "other.json").write_text('{"seed": 1}')
    with pytest.raises(ConfigError, match="lacks every, calls, faults; name a file of soak --minutes"):
        make_tables([tmp_path / "other.json"])
    with pytest.raises(ConfigError, match="cannot be read"):
        make_tables([tmp_path / "none.json"])


def test_the_command_prints_the_tables_of_reports(tmp_path, capsys):
    app = typer.Typer()
    register(app)
    file = tmp_path / "soak.json"
    file.write_text(json.dumps({"seed": 64, "every": 120.0, "calls": [make_call(0, 60.0)], "faults": []}))
    result = CliRunner().invoke(app, ["--report", str(file)])
    assert result.exit_code == 0, result.output
    assert "Sum: 0.02 hours in 1 parts of 1 soaks (seeds 64), 0 faults" in result.output
    result = CliRunner().invoke(app, ["--report", str(file), "--minutes", "5"])
    assert "leave out --minutes and --resume" in str(result.exception)
